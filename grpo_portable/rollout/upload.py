"""Numbers of the host on their way to the device, which goes on computing meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def upload(values: Any, device: torch.device) -> torch.Tensor:
    """`values` (an array, or a list of numbers) on `device`, ordered behind what its stream does already.

    A copy from pageable memory waits for that stream; one from pinned memory does not, and torch keeps the memory until
    the copy is made.
    """
    held = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    return held.to(device) if device.type != "cuda" else held.pin_memory().to(device, non_blocking=True)


def upload_all(values: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of int64 and float64 in one copy: each has a latency of its own that the device waits for."""
    if device.type != "cuda":
        return [upload(array, device) for array in values]
    there = upload(np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in values]), device)
    parts = zip(there.split([array.size for array in values]), values, strict=True)
    return [(part if a.dtype == np.int64 else part.view(torch.float64)).view(a.shape) for part, a in parts]
