"""The weight a linear layer of the policy computes with: its base, de-quantised if need be, plus the exact adapter delta.

    LoRA, rsLoRA   W + s B A            DoRA   m / |W + s B A| (W + s B A), the norm over each output's row

Layers are recognised by what they carry (`lora_A`, `lora_B`, `scaling`), so PEFT need not be installed. Everything is added in
float32 and rounded once, into the caller's tensor; nothing is ever merged into a quantised weight, and the delta of
one update is never added on top of the last one's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grpo_portable.errors import EngineUnsupported
from grpo_portable.rollout.family import active


def base_of(module: Any) -> Any:
    """The layer that holds the frozen weight, inside an adapter or not."""
    module = active(module)
    return module.base_layer if hasattr(module, "base_layer") else module


def adapters_of(module: Any) -> list[str]:
    """Names of the adapters the module applies in its forward and has not merged already."""
    module = active(module)
    if not hasattr(module, "lora_A") or getattr(module, "disable_adapters", False):
        return []
    merged = set(getattr(module, "merged_adapters", ()))
    return [name for name in module.active_adapters if name in module.lora_A and name not in merged]


def is_quantised(module: Any) -> bool:
    """Whether the base weight is stored in fewer bits than products are computed in."""
    weight = base_of(module).weight
    return not weight.dtype.is_floating_point or weight.dtype.itemsize == 1 or _is_subclass(weight)


def is_fixed(module: Any) -> bool:
    """Whether the effective weight cannot change while the policy trains."""
    has_adapter = hasattr(active(module), "lora_A")
    return not has_adapter and not any(p.requires_grad for p in base_of(module).parameters())


def check(module: Any) -> None:
    """EngineUnsupported if this layer computes something that a plain weight cannot hold."""
    layer, base = active(module), base_of(module)
    if not hasattr(base, "weight") or getattr(base.weight, "ndim", 0) != 2:
        raise EngineUnsupported(
            f"a `{type(base).__name__}` layer holds no weight matrix", because="its parameters are sharded or packed"
        )
    if base.weight.is_meta:
        raise EngineUnsupported(
            "some weights are not in memory", because="they were off-loaded to disk or to another device"
        )
    if not _scale_is_known(base):
        raise EngineUnsupported(
            f"weights of `{type(base).__name__}` cannot be de-quantised here", because="their scale is not known"
        )
    magnitudes, names = getattr(layer, "lora_magnitude_vector", {}), adapters_of(module)
    if len(names) > 1 and any(name in magnitudes for name in names):
        raise EngineUnsupported("a DoRA adapter beside another one is no single weight")
    for name in names:
        variant = (getattr(layer, "lora_variant", None) or {}).get(name)
        kind = variant.__name__ if isinstance(variant, type) else type(variant).__name__
        if variant is not None and "Dora" not in kind:
            raise EngineUnsupported(f"the portable engine does not know adapters of kind `{kind}`")


@torch.no_grad()
def effective_weight(module: Any) -> torch.Tensor:
    """The weight, [outputs, inputs] in float32, a new tensor."""
    layer, weight = active(module), dequantised(base_of(module))
    for name in adapters_of(module):
        first, second = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
        weight.addmm_(second.to(weight.device), first.to(weight.device), alpha=float(layer.scaling[name]))
        magnitudes = getattr(layer, "lora_magnitude_vector", None)
        if magnitudes is not None and name in magnitudes:
            magnitude = magnitudes[name].weight.float().to(weight.device)
            weight.mul_((magnitude / torch.linalg.vector_norm(weight, dim=1))[:, None])
    return weight


@torch.no_grad()
def effective_bias(module: Any) -> torch.Tensor | None:
    """The bias, [outputs] in float32, or None."""
    layer, bias = active(module), getattr(base_of(module), "bias", None)
    total = None if bias is None else bias.detach().float().clone()
    for name in adapters_of(module):
        extra = getattr(layer.lora_B[name], "bias", None)
        if extra is not None:
            scaled = extra.detach().float() * float(layer.scaling[name])
            total = scaled if total is None else total + scaled
    return total


@torch.no_grad()
def dequantised(base: Any) -> torch.Tensor:
    """The base weight as a new float32 tensor."""
    weight = base.weight
    if not weight.dtype.is_floating_point:
        import bitsandbytes.functional as bnb

        return bnb.dequantize_4bit(weight.detach(), weight.quant_state).to(torch.float32, copy=True)
    if _is_subclass(weight):
        return weight.detach().dequantize().to(torch.float32, copy=True)
    full = weight.detach().to(torch.float32, copy=True)
    return full if weight.dtype.itemsize > 1 else _times_blocks(full, base.weight_scale_inv.detach().float())


def _times_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Each block of an FP8 weight times its scale; one scale a tensor, a row or a block."""
    if scales.ndim == 2:
        for dim in (0, 1):
            size = -(-weight.shape[dim] // scales.shape[dim])
            size = 128 if scales.shape[dim] > 1 and size < 128 < weight.shape[dim] else size
            scales = scales.repeat_interleave(size, dim)[(slice(None),) * dim + (slice(0, weight.shape[dim]),)]
    return weight.mul_(scales)


def _scale_is_known(base: Any) -> bool:
    weight = base.weight
    if not weight.dtype.is_floating_point:
        return getattr(weight, "quant_state", None) is not None
    return weight.dtype.itemsize > 1 or _is_subclass(weight) or getattr(base, "weight_scale_inv", None) is not None


def _is_subclass(weight: torch.Tensor) -> bool:
    """torchao keeps its weights as tensor subclasses; bitsandbytes' are known by their `quant_state`."""
    return type(weight.data) is not torch.Tensor and not hasattr(weight, "quant_state")


def compute_dtype(modules: Iterable[Any]) -> torch.dtype:
    """The type the policy's products run in: that of its plain weights, or what its quantised weights are de-quantised to."""
    for module in modules:
        base = base_of(module)
        if base.weight.dtype.is_floating_point and base.weight.dtype.itemsize > 1:
            return base.weight.dtype
        state = getattr(base.weight, "quant_state", None)
        return getattr(base, "compute_dtype", None) or (state.dtype if state is not None else torch.bfloat16)
    return torch.float32
