"""Which questions a step sees, and how its completions are cut into micro-batches. Pure functions of what they are given.

Legend: B questions a rollout, G completions a question, N = B*G rows, m rows a micro-batch, A = N/m micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import Sampler

_LEFT_PADDED = ("prompt_ids", "prompt_mask")
_RIGHT_PADDED = (
    "completion_ids",
    "completion_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


@lru_cache(maxsize=4)  # passes that are at work; a long run over many questions would keep all of them
def _order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return tuple(order)


def questions_of(rollout: int, *, count: int, per_rollout: int, seed: int) -> list[int]:
    """The `per_rollout` question indices of a rollout: the next ones of an endless row of shuffled passes over the data."""
    places = range(rollout * per_rollout, (rollout + 1) * per_rollout)
    return [_order(count, seed, place // count)[place % count] for place in places]


def by_length_within_steps(order: Sequence[int], lengths: Sequence[int], rows: int) -> list[int]:
    """`order` with each run of `rows` indices, those of one step, sorted longest first: the same steps, less padding in their
    micro-batches.
    """
    parts = (order[i : i + rows] for i in range(0, len(order), rows))
    return [i for part in parts for i in sorted(part, key=lambda i: (-lengths[i], i))]


class ShuffledSteps(Sampler[int]):
    """Row indices of one pass after another, shuffled by seed and epoch, each step of `rows` sorted by length."""

    def __init__(self, lengths: Sequence[int], rows: int, seed: int) -> None:
        self.lengths, self.rows, self.seed, self.epoch = lengths, rows, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = _order(len(self.lengths), self.seed, self.epoch)
        return iter(by_length_within_steps(order, self.lengths, self.rows))

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate at the start of each pass, also on a resumed one."""
        self.epoch = epoch


def micro_batches(batch: Mapping[str, Any], parts: int, *, by_length: bool) -> list[dict[str, Any]]:
    """A generation batch (N, ...) cut into `parts` equal ones, each without the padding columns it does not need.

    `by_length` puts rows with no advantage last and orders the rest by length, so that little is padded.
    """
    completion_mask = batch["completion_mask"]
    rows = completion_mask.size(0)
    order = list(range(rows))
    if by_length:
        lengths = (batch["prompt_mask"].sum(1) + completion_mask.sum(1)).tolist()
        idle = (batch["advantages"] == 0).tolist()
        order.sort(key=lambda row: (idle[row], -lengths[row], row))
    index = torch.tensor(order, device=completion_mask.device).chunk(parts)
    return [_trimmed({k: v[i] if _per_row(v, rows) else v for k, v in batch.items()}) for i in index]


def _per_row(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == rows


def _trimmed(part: dict[str, Any]) -> dict[str, Any]:
    longest_prompt = max(1, int(part["prompt_mask"].sum(1).max()))
    longest_completion = max(1, int(part["completion_mask"].sum(1).max()))
    for key in _LEFT_PADDED:
        part[key] = part[key][:, -longest_prompt:]
    for key in _RIGHT_PADDED:
        if part.get(key) is not None and part[key].dim() == 2 and part[key].size(1) > 1:
            part[key] = part[key][:, :longest_completion]
    return part


class Steps:
    """What transformers' loop reads as its dataloader: for each optimizer step A times the rows of that step's rollout."""

    def __init__(
        self, rows_of: Callable[[int], list[dict[str, Any]]], first: int, steps: int, accumulation: int
    ) -> None:
        self.rows_of, self.first, self.steps, self.accumulation = rows_of, first, steps, accumulation

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for step in range(self.first, self.steps):
            yield from [self.rows_of(step)] * self.accumulation
