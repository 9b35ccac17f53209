"""Guards of the training loop: numbers that are not finite, and the wish to stop.

A bad update is dropped, counted and named; three in a row end the run, since then it is not chance. A stop (Ctrl-C, SIGTERM)
ends at once what can be repeated, a rollout or an evaluation, and lets an update finish.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from types import FrameType

import torch

from grpo_portable.errors import NonFiniteError

IN_A_ROW = 3
IN_A_ROW_SCALED = 16  # float16's gradient scale starts at 2**16 and halves after each overflow: that many are in order


class NonFiniteGuard:
    """Counts updates that were skipped because loss or gradient was not finite; raises NonFiniteError at the limit in a row."""

    def __init__(self, *, scaled: bool = False) -> None:
        self.limit = IN_A_ROW_SCALED if scaled else IN_A_ROW
        self.in_a_row = self.total = 0

    def see(self, bad: str | None, step: int) -> bool:
        """Whether the update of `step` must be skipped; `bad` names what was not finite, None when all was."""
        if bad is None:
            self.in_a_row = 0
            return False
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"{self.in_a_row} updates in a row were not finite, the last at step {step}",
                because=f"the first bad tensor is {bad}",
                help="lower learning_rate or max_grad_norm, or choose a path with a wider number format",
            )
        return True


def first_not_finite(named: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity, None when there is none."""
    for name, tensor in named:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def require_finite(named: Iterable[tuple[str, torch.Tensor]], what: str) -> None:
    """Raise NonFiniteError rather than let a bad number into a saved adapter."""
    bad = first_not_finite(named)
    if bad is not None:
        raise NonFiniteError(f"{what} is not saved", because=f"{bad} holds numbers that are not finite")


class StopSignal:
    """Turns SIGTERM and SIGINT into KeyboardInterrupt; inside `deferred()` it is only noted, save in `allowed()` parts."""

    def __init__(self) -> None:
        self.wanted = False
        self._deferred = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Handle both signals inside; the handlers there were before come back."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a stop waits: what runs here must not be cut in two."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A part of what is deferred that can be dropped and repeated: a stop ends it at once."""
        before, self._deferred = self._deferred, False
        try:
            if self.wanted:
                raise KeyboardInterrupt
            yield
        finally:
            self._deferred = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.wanted = not self.wanted, True
        if first and not self._deferred:  # a second one must not cut the saving in two that the first one asked for
            raise KeyboardInterrupt
