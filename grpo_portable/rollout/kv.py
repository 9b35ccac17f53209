"""The static KV cache: keys and values of every layer, [rows, positions, KV heads, head dims] each.

Addresses never change, so captured graphs stay valid; moving a row, or giving a prompt to several, is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_portable.rollout import attention
from grpo_portable.rollout.family import Shape

COPY_BYTES = 2**28  # a copy of rows goes through a buffer of about this size


class Cache:
    def __init__(self, shape: Shape, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rows, self.capacity = rows, capacity
        self.kind = attention.kind_for(shape, device, dtype)
        size = (2 * shape.layers, rows, capacity, shape.kv_heads, shape.head_dim)
        # zeros, not empty: masked positions are multiplied by zero, and zero times a stray NaN is NaN
        self.all = torch.zeros(size, device=device, dtype=dtype)
        self.keys, self.values = list(self.all[: shape.layers]), list(self.all[shape.layers :])

    def copy(self, sources: Sequence[int], targets: Sequence[int], span: int) -> None:
        """Copy the first `span` positions of rows `sources` over rows `targets`; no target is a source."""
        if not sources or span < 1:
            return
        device = self.all.device
        into, source = torch.tensor(targets, device=device), torch.tensor(sources, device=device)
        each = len(sources) * span * self.all.stride(2) * self.all.element_size()
        for part in self.all[:, :, :span].split(max(1, COPY_BYTES // each)):
            part.index_copy_(1, into, part.index_select(1, source))


def bytes_of(shape: Shape, rows: int, capacity: int, dtype: torch.dtype) -> int:
    return 2 * shape.layers * rows * capacity * shape.kv_heads * shape.head_dim * dtype.itemsize
