"""How a worker's error is told to the supervisor: its kind (`ladder.EXIT`), and failure.json."""

from __future__ import annotations

import contextlib
import errno
import traceback
from pathlib import Path
from typing import Any

from doctor.privacy import clean
from grpo_portable.errors import (
    EngineError,
    GrpoPortableError,
    Interrupted,
    NonFiniteError,
    PathClosed,
    RewardError,
    UsageError,
)
from grpo_portable.run.folder import RunFolder
from grpo_portable.run.processes import here
from grpo_portable.supervision.ladder import COLLECTIVE, DISK, ENGINES, GPU_ERROR, ORDER, OUT_OF_MEMORY

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ENTRY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def kind_of(error: BaseException, folder: Path | None = None) -> str:
    """Which of `ladder.KINDS` an error is, or else what it was raised from; `crash` where nothing tells.

    `folder`: the run's, for errors of writing into it.
    """
    return next((kind for e in _causes(error) if (kind := _own_kind(e, folder)) is not None), "crash")


def _causes(error: BaseException) -> list[BaseException]:
    """The error, what it was raised from, and so on."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _own_kind(error: BaseException, folder: Path | None) -> str | None:
    if isinstance(error, (UsageError, PathClosed)):
        return "user"
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted"
    for cls, kind in ((NonFiniteError, "nonfinite"), (RewardError, "reward"), (EngineError, "engine")):
        if isinstance(error, cls):
            return "oom" if kind == "engine" and OUT_OF_MEMORY.search(str(error)) else kind
    raised = isinstance(error, RuntimeError)
    lost = here().count > 1 and isinstance(error, (RuntimeError, OSError))
    may_be = {
        "disk": _of_disk(error, folder),
        "oom": isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (raised and OUT_OF_MEMORY.search(str(error))),
        "collective": lost and COLLECTIVE.search(str(error)),
        "import": isinstance(error, ImportError),
        "engine": _of_an_engine(error) or (raised and GPU_ERROR.search(str(error))),
    }
    return next((kind for kind in ORDER if may_be[kind]), None)


def _of_an_engine(error: BaseException) -> bool:
    """Whether it came through the code of one, by the names of modules: files lie in folders of any name."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).lower().startswith(ENGINES) for frame in frames)


def _of_disk(error: BaseException, folder: Path | None) -> bool:
    """No room anywhere, or the run's folder cannot be written. Safetensors raises an error of its own and says it in words."""
    if not isinstance(error, OSError):
        return isinstance(error, Exception) and bool(DISK.search(str(error)))
    inside = folder is not None and Path(str(error.filename or "")).is_relative_to(folder)
    return error.errno in _NO_ROOM or (inside and error.errno in _NO_ENTRY)


def write(run: RunFolder, error: BaseException) -> str:
    """Write failure.json for the supervisor; returns the kind. Never raises: a full disk may be what it has to tell of.

    Of several processes the first to fail is heard: the others then fail because it is gone.
    """
    kind = kind_of(error, run.path)
    if here().count > 1 and (run.path / "failure.json").exists():
        return kind
    ours = error if isinstance(error, GrpoPortableError) else None
    first_line = next(iter(str(error).splitlines()), "")
    fact = ours.fact if ours else f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    frames = "".join(traceback.format_exception(error))
    told: dict[str, Any] = {
        "kind": kind,
        "class": type(error).__name__,
        "fact": clean(fact),
        "because": clean(ours.because) if ours and ours.because else None,
        "help": clean(ours.help) if ours and ours.help else None,
        **run.doing().record(),
        "traceback_tail": clean(frames[-4000:]),
    }
    if here().count > 1:
        told["rank"] = run.rank
    with contextlib.suppress(OSError):  # a line in the worker's log says the kind as well
        run.write_json("failure.json", told)
    return kind
