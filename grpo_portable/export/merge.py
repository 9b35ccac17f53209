"""Adapter and base as one set of weights: each is added up in float32 and rounded once, to what is written.

The base must hold its weights unpacked: a delta of RL is often smaller than the steps of 4-bit or 8-bit weights, and would be
rounded away. How much of it survives the rounding is measured, since even 16 bits can lose a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo_portable.errors import EngineUnsupported, ExportError
from grpo_portable.models import policy
from grpo_portable.rollout import delta


@dataclass(frozen=True)
class Faithful:
    """Of all merged matrices together: |delta| / |weights|, and the share of the delta that is left after rounding (1: all)."""

    matrices: int
    relative_size: float
    survives: float


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, float32 tensor) of every weight as transformers names it, adapters added; tied weights once, in order."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    for name, parameter in base.named_parameters():
        owner, _, last = name.rpartition(".")
        module, inside, _ = owner.partition(".base_layer")
        if inside and module in adapted:
            layer = adapted[module]
            tensor = delta.effective_weight(layer) if last == "weight" else delta.effective_bias(layer)
            assert tensor is not None
            yield f"{module}.{last}", tensor
        elif "lora_" not in name:
            yield name, parameter.detach().to(torch.float32)


def require_unpacked(model: Any) -> None:
    """ExportError when the base is quantised or an adapter is of a kind that no plain weight can hold."""
    if policy.is_quantised(model):
        raise ExportError("the base is quantised", because="a merge would round the adapter away")
    for module in model.modules():
        if hasattr(module, "lora_A"):
            try:
                delta.check(module)
            except EngineUnsupported as error:
                raise ExportError("this adapter cannot be merged", because=str(error)) from error


@torch.no_grad()
def bake(model: Any, dtype: torch.dtype) -> tuple[Any, Faithful]:
    """The base model with the adapter inside its weights, all of them in `dtype`, and how faithful that is. In place."""
    require_unpacked(model)
    if not hasattr(model, "peft_config"):
        return model.to(dtype), Faithful(0, 0.0, 1.0)
    delta_squared = base_squared = kept = 0.0
    count = 0
    for module in model.modules():
        if not hasattr(module, "lora_A"):
            continue
        weight, exact = delta.base_of(module).weight, delta.effective_weight(module)
        before = weight.detach().float()
        rounded = exact.to(dtype)
        change = exact - before
        delta_squared += float(change.square().sum(dtype=torch.float64))
        base_squared += float(before.square().sum(dtype=torch.float64))
        kept += float(((rounded.float() - before.to(dtype).float()) * change).sum(dtype=torch.float64))
        weight.data = rounded
        bias = delta.effective_bias(module)
        if bias is not None and delta.base_of(module).bias is not None:
            delta.base_of(module).bias.data = bias.to(dtype)
        count += 1
    survives = kept / delta_squared if delta_squared else 1.0
    size = (delta_squared / base_squared) ** 0.5 if base_squared else 0.0
    return model.unload().to(dtype), Faithful(count, size, survives)
