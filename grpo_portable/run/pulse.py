"""Signs of life where nobody knows how long it takes: long rollouts, a model that is downloaded or read from a slow disk.

Work of our own ticks, and so does an engine at each of its steps. In a wait inside others' code, the process is not hung as
long as bytes move; where nobody counts them (no /proc), the wait has a limit of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_portable.run.folder import RunFolder

EVERY_S = 5.0
LEAST_BYTES = 64 * 1024  # in one look; less is logs, and this look itself
BLIND_LIMIT_S = 4 * 3600.0
JOIN_LIMIT_S = 60.0
_COUNTERS = Path("/proc/self/io")


class Tick:
    """To be called as often as one likes from work that gets on; renews the heartbeat every few seconds."""

    def __init__(self, run: RunFolder, every: float = EVERY_S) -> None:
        self.run, self.every, self._last = run, every, time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= self.every:
            self._last = now
            self.run.beat()


@contextlib.contextmanager
def while_bytes_move(run: RunFolder, every: float = EVERY_S) -> Iterator[None]:
    """Inside, the heartbeat is renewed every few seconds in which this process read or wrote something."""
    done, began = threading.Event(), time.monotonic()

    def watch() -> None:
        before = _bytes()
        while not done.wait(every):
            now = _bytes()
            uncounted = now is None or before is None
            moved = now is not None and before is not None and now - before >= LEAST_BYTES
            if moved or (uncounted and time.monotonic() - began < BLIND_LIMIT_S):
                run.beat()
            before = now

    watcher = threading.Thread(target=watch, name="pulse", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(JOIN_LIMIT_S)


def _bytes() -> int | None:
    """Bytes this process has moved through system calls, the network's included where they end in a file; None: not told."""
    try:
        lines = _COUNTERS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes")))
