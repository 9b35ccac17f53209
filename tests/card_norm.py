"""torch's fused norm as a card computes it, for tests on a CPU, where `aten._fused_rms_norm` is the steps of a model's own.

The card's kernel works in float32 and rounds once (aten/src/ATen/native/cuda/layer_norm_kernel.cu); for its backward pass
autograd keeps the input as it came, 1 / rms of each row in float32, and the weight (tools/autograd/derivatives.yaml).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CardNorm(torch.autograd.Function):
    """x / rms(x) * weight of x (…, H), weight (H)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        slope = torch.empty_like(x)
        rows = zip(*(t.reshape(-1, t.shape[-1]).split(16) for t in (slope, x, grads[0], scale)), strict=True)
        for out, part, grad, each in rows:  # a kernel holds no float32 tensor of the whole
            wide, steep = part.float(), grad.float() * weight.float()
            out.copy_((steep - wide * each * each * (steep * wide).mean(-1, keepdim=True)) * each)
        return slope, None, None


def card_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """In place of `updates.few_kernels.fused_norm`."""
    weight, epsilon, plain = norm.weight, norm.variance_epsilon, norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return CardNorm.apply(x, weight, epsilon) if x.dtype == weight.dtype else plain(x)

    return forward
