"""Numbers of the host on their way to the device, which goes on computing meanwhile."""

from __future__ import annotations

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
