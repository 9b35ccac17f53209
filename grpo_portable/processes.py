"""The processes of a run, one a GPU: which one this is, who writes, and waiting for the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Processes:
    """Process `rank` of `count`, as accelerate's launcher names them."""

    rank: int
    count: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> tuple[_T, ...]:
        """This process's share of the items: every `count`-th one."""
        return tuple(items[self.rank :: self.count])

    def wait(self) -> None:
        """Go on when every process is here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def as_main_says(self, value: _T) -> _T:
        """The first process's value, on all of them: a decision all must take alike."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


def here() -> Processes:
    """This process, alone when no launcher says otherwise."""
    return Processes(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
