"""How a worker's error is told to the supervisor: its kind (`ladder.EXIT`), and failure.json."""

from __future__ import annotations

import errno
import re
import traceback

from grpo_portable.errors import (
    EngineError,
    GrpoPortableError,
    Interrupted,
    NonFiniteError,
    PathClosed,
    RewardError,
    UsageError,
)
from grpo_portable.run import RunFolder

_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate", re.I)


def kind_of(error: BaseException) -> str:
    """Which of `ladder.EXIT`'s kinds an error is, or `crash`."""
    if isinstance(error, (UsageError, PathClosed)):
        return "user"
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted"
    for cls, kind in ((NonFiniteError, "nonfinite"), (RewardError, "reward"), (EngineError, "engine")):
        if isinstance(error, cls):
            return "oom" if kind == "engine" and _OUT_OF_MEMORY.search(str(error)) else kind
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))):
        return "oom"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk"
    return "crash"


def write(run: RunFolder, error: BaseException) -> str:
    """Write failure.json for the supervisor; returns the kind."""
    kind = kind_of(error)
    ours = error if isinstance(error, GrpoPortableError) else None
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    phase = run.read_json("heartbeat").get("doing", "starting") if run.heartbeat_file.exists() else "starting"
    frames = traceback.format_exception(error)
    run.write_json(
        "failure.json",
        {
            "kind": kind,
            "class": type(error).__name__,
            "fact": ours.fact
            if ours
            else f"{type(error).__name__}: {first_line}"
            if first_line
            else type(error).__name__,
            "because": ours.because if ours else None,
            "help": ours.help if ours else None,
            "phase": phase,
            "traceback_tail": "".join(frames)[-4000:],
        },
    )
    return kind
