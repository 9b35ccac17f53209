"""The static KV cache: keys and values of every layer, [rows, positions, KV heads, head dims] each.

They lie so in memory too, but where batched products read them (`attention.py`): there the heads lie outside the positions.

Addresses never change, so captured graphs stay valid; moving a row, or giving a prompt to several, is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_portable.rollout import attention
from grpo_portable.rollout.family import Shape


class Cache:
    def __init__(self, shape: Shape, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows, self.capacity = rows, capacity
        self.kind = attention.kind_for(shape, device, dtype)
        self.heads_first = self.kind == "batched"
        inner = (shape.kv_heads, capacity) if self.heads_first else (capacity, shape.kv_heads)
        # zeros, not empty: masked positions are multiplied by zero, and zero times a stray NaN is NaN
        held = torch.zeros(2 * shape.layers, rows, *inner, shape.head_dim, device=device, dtype=dtype)
        wide = shape.head_dim * dtype.itemsize % 8 == 0
        words = held.view(torch.int64) if wide else held  # a copy moves eight bytes at a time where it can
        self.all, self._words = (t.transpose(2, 3) if self.heads_first else t for t in (held, words))
        self.keys, self.values = list(self.all[: shape.layers]), list(self.all[shape.layers :])

    def places(self, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Where the next key of rows with `lengths` [N] keys goes: what `write` wants."""
        rows = torch.arange(lengths.shape[0], device=lengths.device)
        return (rows, lengths) if self.heads_first else (rows * self.capacity + lengths,)

    def write(self, layer: int, places: tuple[torch.Tensor, ...], keys: torch.Tensor, values: torch.Tensor) -> None:
        """One more key and value a row, both [N, KV heads, head dims], of one layer."""
        for held, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if self.heads_first:
                held.index_put_(places, new)
            else:
                held.view(-1, *new.shape[1:]).index_copy_(0, places[0], new)

    def copy(self, sources: Sequence[int], targets: Sequence[int], span: int) -> None:
        """Copy the first `span` positions of rows `sources` over rows `targets`; no target is a source."""
        for source, first, count in runs(sources, targets) if span > 0 else ():
            self._words[:, first : first + count, :span].copy_(self._words[:, source : source + 1, :span])


def runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, first target, count): copies of one row into rows that lie side by side are one copy."""
    found: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if found and found[-1][0] == source and sum(found[-1][1:]) == target:
            found[-1] = (source, found[-1][1], found[-1][2] + 1)
        else:
            found.append((source, target, 1))
    return found


def bytes_of(shape: Shape, rows: int, capacity: int, dtype: torch.dtype) -> int:
    return 2 * shape.layers * rows * capacity * shape.kv_heads * shape.head_dim * dtype.itemsize
