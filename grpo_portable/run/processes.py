"""The processes of a run, one a GPU: which one this is, who writes, and where they meet.

They meet in a gloo group of their own, beside the one gradients go through, and ask again and again whether the others are
there: a wait inside NCCL would hear no signal and give no sign of life. Alone, nothing here does anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

_T = TypeVar("_T")
LIMIT = timedelta(hours=4)  # of one meeting; the supervisor ends a process that gives no sign of life long before
# of one collective, twice what the supervisor waits for a sign of life. NCCL's own 10 minutes would end the process that waits
# for the others, and the one that hangs would not be known
COLLECTIVE_LIMIT = timedelta(hours=1)
SHORTEST_NAP_S, LONGEST_NAP_S = 1e-4, 0.02
NAP_SHARE = 0.02  # of the time waited so far: what asking now and then may add to a wait


def _silent() -> None:
    """Nobody is told of the waiting."""


@dataclass(frozen=True)
class Processes:
    """Process `rank` of `count`, as accelerate's launcher names them. `tick` is called now and then while it waits."""

    rank: int
    count: int
    tick: Callable[[], None] = field(default=_silent, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Go on when every process is here."""
        if self.count == 1:
            return
        import torch.distributed

        arrival = torch.distributed.barrier(group=_group(), async_op=True)
        began = time.perf_counter()
        while not arrival.is_completed():
            waited = time.perf_counter() - began
            time.sleep(min(max(SHORTEST_NAP_S, NAP_SHARE * waited), LONGEST_NAP_S))
            self.tick()
        arrival.wait()  # raises where another process is gone

    def gather(self, value: _T) -> list[_T]:
        """Each process's value, by rank, on all of them."""
        if self.count == 1:
            return [value]
        import torch.distributed

        self.wait()
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value, group=_group())
        return found

    def any(self, mine: bool) -> bool:
        """Whether it is so in any process: a decision all must take alike."""
        return any(self.gather(mine))

    def as_main_says(self, value: _T) -> _T:
        """The first process's value, on all of them."""
        return self.gather(value)[0]


ALONE = Processes(0, 1)


def here() -> Processes:
    """This process, alone when no launcher says otherwise."""
    return Processes(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def join(*, cpu: bool) -> Processes:
    """This process once it has met the others; its GPU is torch's current one then. Alone, nothing is started."""
    mine = here()
    if mine.count > 1:
        from accelerate import PartialState

        # makes the group that gradients go through, and takes this rank's GPU
        PartialState(cpu=cpu, timeout=COLLECTIVE_LIMIT)
        _group()
    return mine


@cache
def _group() -> Any:
    """The gloo group of all processes; made when all of them ask for it."""
    import torch.distributed

    return torch.distributed.new_group(backend="gloo", timeout=LIMIT)
