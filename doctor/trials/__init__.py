"""Trials: what is run in a child interpreter, and how it tells what it saw.

The only place in the doctor that imports torch, vLLM, unsloth, bitsandbytes or pynvml, each in one file, inside the
function that needs it. A trial calls `stage(name)` before a step that might hang or crash and `tell(key, value)` as soon
as something is known. `doctor.child` reads both.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

# trial name -> "module:function"
TRIALS = {
    "nvml": "doctor.trials.nvml:nvml",
    "cuda": "doctor.trials.cuda:cuda",
    "cpu": "doctor.trials.cpu:cpu",
    "bnb": "doctor.trials.bnb:bnb_4bit",
    "vllm_import": "doctor.trials.vllm:vllm_import",
    "vllm_start": "doctor.trials.vllm:vllm_start",
    "unsloth": "doctor.trials.unsloth:unsloth_import",
    "attention": "doctor.trials.step:attention",
    "cuda_graph": "doctor.trials.step:cuda_graph",
    "lora_step": "doctor.trials.step:lora_step",
}

_told: Any = None


def tell(key: str, value: Any) -> None:
    """Reports one fact to the parent, at once."""
    _told.write(json.dumps([key, value]) + "\n")
    _told.flush()


def stage(name: str) -> None:
    """Says which step begins, so that a hang or a crash has a place."""
    tell("stage", name)


def describe(error: BaseException) -> str:
    """The exception on one line, with the innermost cause when it says something else."""
    innermost = error
    while (deeper := _cause(innermost)) is not None:
        innermost = deeper
    text = _one_line(error)
    cause = _one_line(innermost)
    return text if innermost is error or cause in text else f"{text} (from {cause})"


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    # An exception merely met on the way is noise, unless it is a library that did not load.
    hidden = error.__suppress_context__ or not isinstance(error.__context__, (ImportError, OSError))
    return None if hidden else error.__context__


def _one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def attempt(run: Callable[[], Any]) -> str | None:
    """None when `run()` returned, else what it raised, on one line. For steps whose failure is itself the fact."""
    try:
        run()
    except BaseException as e:  # a foreign library may raise anything; the failure is the fact
        return describe(e)
    return None


def _die_with_the_doctor() -> None:
    """On Linux, asks the kernel to end this process when the doctor is killed: nobody would be left to end a hang."""
    if sys.platform == "linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Runs the trial `argv[0]` (a name above, or module:function), telling into the file `argv[1]`.

    Exit code 0 when it returned, 1 when it raised.
    """
    global _told
    name, path, *args = argv
    module, _, function = TRIALS.get(name, name).partition(":")
    _die_with_the_doctor()
    with open(path, "w", encoding="utf-8") as _told:
        try:
            getattr(importlib.import_module(module), function)(*args)
        except BaseException as e:  # process edge: whatever it was, the parent must hear of it
            tell("raised", describe(e))
            code = 1
        else:
            code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Half-loaded native libraries like to crash in their destructors; everything was told, so leave without them.
    os._exit(code)
