"""Folders for what is handed from one part of a process to another: in shared memory if there is room, else where temporary
files go. Each is held by a lock that ends with its process, so what a killed process left is swept away by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "grpo-portable-"
LOCK = "lock"
YOUNG_S = 60.0  # a folder this young may not have taken its lock yet


class Scratch:
    """A private folder; `close` removes it. Use as a context manager, or keep it as long as its files are needed."""

    def __init__(self, size: int, shared: Path | None = None) -> None:
        """`size`: bytes it must have room for. `shared`: put it there, and let others read it; OSError if it cannot be."""
        import fcntl  # Linux and macOS; vLLM runs on no other system

        root = place(size) if shared is None else shared
        if shared is None:  # elsewhere a lock may count on one host only
            sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        if shared is not None:
            self.path.chmod(0o755)
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError) if shared is not None else contextlib.nullcontext():  # some have no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def place(size: int) -> Path:
    """Where `size` bytes go: shared memory if twice as much is free there, else the folder for temporary files."""
    with contextlib.suppress(OSError):
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size:
            return MEMORY
    return Path(tempfile.gettempdir())


def sweep(root: Path) -> list[Path]:
    """Remove and return the folders under `root` whose process is gone."""
    import fcntl

    gone = []
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held by a living process, another user's, or just removed by someone else
            if time.time() - folder.stat().st_mtime < YOUNG_S:
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                gone.append(folder)
            finally:
                os.close(lock)
    return gone
