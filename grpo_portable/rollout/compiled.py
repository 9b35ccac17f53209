"""The decode layer's two halves through torch.compile, where Triton works: the small kernels between the products become few.

Compiled once for every row count above 1 (the row dimension is symbolic) and for every layer (they share one shape). Never
required: when the compiler is missing or fails, the same functions run as they are.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from grpo_portable.rollout import forward
from grpo_portable.rollout.family import Shape

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    programs: forward.Programs
    compiled: bool
    reason: str


def choose(shape: Shape, device: torch.device, wanted: bool | None) -> Choice:
    """Compiled programs if `wanted`, plain ones if not; None decides by the machine."""
    plain = forward.Programs(partial(forward.before, shape), partial(forward.after, shape))
    if wanted is None:
        reason = _why_not(device)
        if reason is not None:
            return Choice(plain, False, reason)
    elif not wanted:
        return Choice(plain, False, "not asked for")
    return Choice(_compiled(plain), True, "Triton is here" if wanted is None else "asked for")


def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"compiling pays on CUDA, this is `{device.type}`"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs compute capability 7.0 or newer"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _compiled(plain: forward.Programs) -> forward.Programs:
    before, after = _OrPlain(plain.before), _OrPlain(plain.after)

    def run_before(x, pending, layer, cos, sin, keys, values, slots):
        pending = torch.zeros_like(x) if pending is None else pending  # one program for the first layer too
        _rows_vary(x, pending, cos, sin, slots)
        return before(x, pending, layer, cos, sin, keys, values, slots)

    def run_after(x, out, layer):
        _rows_vary(x, out)
        return after(x, out, layer)

    return forward.Programs(run_before, run_after)


class _OrPlain:
    """A compiled function that is the plain one from the moment the compiler fails."""

    def __init__(self, plain: Callable) -> None:
        self.plain, self.current = plain, torch.compile(plain)

    def __call__(self, *arguments: Any) -> Any:
        if self.current is self.plain:
            return self.plain(*arguments)
        try:
            return self.current(*arguments)
        except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as failure:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # a capture that has begun cannot go on with other kernels
            log.warning("compiling failed, the rollout goes on without it: %s", str(failure).splitlines()[0])
            self.current = self.plain
            return self.plain(*arguments)


def _rows_vary(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
