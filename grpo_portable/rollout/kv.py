"""The static KV cache: one tensor of keys and one of values a layer, [rows, positions, KV heads, head dims].

Addresses never change, so captured graphs stay valid; moving a row is a copy.
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
        size = (rows, capacity, shape.kv_heads, shape.head_dim)
        # zeros, not empty: masked positions are multiplied by zero, and zero times a stray NaN is NaN
        self.keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]

    def targets(self, copies: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows to write, and which prompt each takes its keys and values from."""
        device = self.keys[0].device
        rows = torch.tensor([row for group in copies for row in group], device=device)
        return rows, torch.tensor([b for b, group in enumerate(copies) for _ in group], device=device)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [len(rows), P, K, D] at the first P positions of `rows`."""
        length = keys.shape[1]
        self.keys[layer][:, :length].index_copy_(0, rows, keys)
        self.values[layer][:, :length].index_copy_(0, rows, values)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, span: int) -> None:
        """Copy the first `span` positions of rows `sources` over rows `targets`; no row is in both."""
        for tensor in (*self.keys, *self.values):
            tensor[:, :span].index_copy_(0, targets, tensor[:, :span].index_select(0, sources))


def bytes_of(shape: Shape, rows: int, capacity: int, dtype: torch.dtype) -> int:
    return 2 * shape.layers * rows * capacity * shape.kv_heads * shape.head_dim * dtype.itemsize
