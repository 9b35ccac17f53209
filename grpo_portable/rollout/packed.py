"""Float32 products on the CPU, with weights laid out for them before the first step instead of at each one.

A decode step multiplies few rows by each weight, so ordering the weight for the vector units costs as much as the product.
oneDNN orders large ones once (`torch.ops.mkldnn`, what torch's own compiler calls); small ones are quickest as they are,
stored inputs first.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

PACKED_FROM = 2**18  # values; for smaller weights oneDNN's dispatch costs more than its layout gains
ROWS = 16  # the layout hardly depends on the rows it is made for


class Packed:
    """One weight [outputs, inputs] in oneDNN's own layout."""

    def __init__(self) -> None:
        self._weight: torch.Tensor | None = None

    @property
    def filled(self) -> bool:
        return self._weight is not None

    def take(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [N, inputs] times the weight → [N, outputs]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")


def layout(outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, Packed | None]:
    """Where a copied weight [outputs, inputs] is kept: a tensor to fill, or one without memory and the Packed to fill."""
    if device.type != "cpu" or dtype != torch.float32:
        return torch.empty(outputs, inputs, dtype=dtype, device=device), None
    if outputs * inputs >= PACKED_FROM and works():
        return torch.empty(outputs, inputs, dtype=dtype, device="meta"), Packed()
    return torch.empty(inputs, outputs, dtype=dtype).t(), None


@functools.cache
def works() -> bool:
    """Whether this build of torch has oneDNN's products and they are right; tried once."""
    try:
        draw = torch.Generator().manual_seed(0)  # of its own: a trial takes nothing from the run's draws
        weight, x, bias = (torch.randn(*size, generator=draw) for size in ((48, 32), (3, 32), (48,)))
        packed = Packed()
        packed.take(weight)
        return bool(torch.allclose(packed.times(x, bias), F.linear(x, weight, bias), atol=1e-4))
    except (AttributeError, RuntimeError, NotImplementedError):  # torch without oneDNN, or a processor it does not know
        return False
