"""A frozen linear layer and its LoRA adapter as one node of the graph: y = W x + s B (A x), few kernels, float32 gradients.

PEFT's layer reads its input as float32, autocast rounds it and both matrices again, and each step is a node of its own. On
small models launching the kernels is what an update waits for (docs/training.md). The matrices' 16-bit copies are made for
all layers at once.

    forward     y = W x,   h = A x,   y += s B h
    backward    g = B' dy, dx = W' dy + s A' g,   dA = s g x',   dB = s dy h'        (' transposed)

Legend: R rows (batch x positions), I inputs, O outputs, r rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from grpo_portable.rollout.family import unwrap
from grpo_portable.updates.agreement import agree, random_like

TRIAL_ROWS = 8


class LoraProduct(torch.autograd.Function):
    """(…, O) from x (…, I), W (O, I), bias (O) or None, A (r, I), B (O, r) as trained and as computed with, and the scale s."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        low_a: torch.Tensor,
        low_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        hidden = rows @ low_a.t()
        out = functional.linear(rows, weight, bias).addmm_(hidden, low_b.t(), alpha=scale)
        ctx.save_for_backward(rows, weight, hidden, low_a, low_b)
        ctx.scale, ctx.trained = scale, a.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weight, hidden, low_a, low_b = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        inner = grad @ low_b
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(inner, low_a, alpha=ctx.scale).view(*grads[0].shape[:-1], -1)
        if ctx.needs_input_grad[3]:
            grad_a = _scaled(inner.t() @ rows, ctx.scale, ctx.trained)
        if ctx.needs_input_grad[4]:
            grad_b = _scaled(grad.t() @ hidden, ctx.scale, ctx.trained)
        return grad_x, None, None, grad_a, grad_b, None, None, None


def _scaled(product: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """scale * product as `dtype`, in one kernel."""
    if scale == 1:
        return product.to(dtype)
    return torch.mul(product, scale, out=torch.empty_like(product, dtype=dtype))


@contextlib.contextmanager
def lora_products(model: Any) -> Iterator[int]:
    """Inside, the model's plain LoRA layers on frozen dense weights compute by `LoraProduct`; gives their number.

    One layer of each kind is tried on its device first, and those of a kind that PEFT computes otherwise stay PEFT's.
    Layers with dropout, DoRA, a bias of the adapter or quantised weights stay PEFT's. So does each call with the adapter off
    or in another number format than the weight's. Calls without gradients take the same way, so that ratios of one policy
    with itself are 1.
    """
    layers = _trusted([module for module in model.modules() if _is_plain(module)])
    trained = [_matrices(layer) for layer in layers]
    sources = [matrix for pair in trained for matrix in pair]
    copies = [
        m if m.dtype == layer.base_layer.weight.dtype else torch.empty_like(m, dtype=layer.base_layer.weight.dtype)
        for layer, pair in zip(layers, trained, strict=True)
        for m in pair
    ]
    pairs = [(copy, source) for copy, source in zip(copies, sources, strict=True) if copy is not source]
    old, new = [copy for copy, _ in pairs], [source for _, source in pairs]

    def refresh(*_: Any) -> None:
        # at each forward pass: optimizers that write past autograd leave no other trace of a change
        if old:
            with torch.no_grad():
                torch._foreach_copy_(old, new)

    inner = unwrap(model)
    # PEFT and TRL call the outer models' forward without their hooks; the part below the head is always called as a module
    hook = getattr(inner, "base_model", inner).register_forward_pre_hook(refresh)
    for index, layer in enumerate(layers):
        layer.forward = _forward(layer, *trained[index], copies[2 * index], copies[2 * index + 1])
    try:
        yield len(layers)
    finally:
        hook.remove()
        for layer in layers:
            del layer.forward


def _forward(layer: Any, a: torch.Tensor, b: torch.Tensor, low_a: torch.Tensor, low_b: torch.Tensor) -> Any:
    base, plain, names = layer.base_layer, layer.forward, list(layer.lora_A)
    scale, kind = float(layer.scaling[names[0]]), base.weight.device.type

    def forward(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if (
            args
            or named
            or layer.disable_adapters
            or layer.merged
            or layer.active_adapters != names
            or not (x.dtype == base.weight.dtype == low)
        ):
            return plain(x, *args, **named)
        return LoraProduct.apply(x, base.weight, base.bias, a, b, low_a, low_b, scale)

    return forward


def _matrices(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    name = next(iter(layer.lora_A))
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _is_plain(module: Any) -> bool:
    base, names = getattr(module, "base_layer", None), list(getattr(module, "lora_A", ()))
    if type(base) is not torch.nn.Linear or len(names) != 1 or "forward" in vars(module):
        return False
    name = names[0]
    weights = (base.weight, *_matrices(module))
    return (
        not base.weight.requires_grad
        and type(base.weight) is torch.nn.Parameter
        and all(w.dtype.is_floating_point and w.device == base.weight.device and not w.is_meta for w in weights)
        and not module.lora_variant.get(name)
        and isinstance(module.lora_dropout[name], torch.nn.Identity)
        and module.lora_B[name].bias is None
    )


def _trusted(layers: Sequence[Any]) -> list[Any]:
    """The layers of those kinds whose first one gives by `LoraProduct` what it gives by itself."""
    kinds: dict[Any, bool] = {}
    for layer in layers:
        if _kind(layer) not in kinds:
            kinds[_kind(layer)] = _agrees(layer)
    return [layer for layer in layers if kinds[_kind(layer)]]


def _kind(layer: Any) -> Any:
    base, (a, b) = layer.base_layer, _matrices(layer)
    tensors = ((t.shape, t.dtype) for t in (base.weight, a, b))
    return type(layer), base.weight.device, *tensors, base.bias is None, *layer.scaling.values()


def _agrees(layer: Any) -> bool:
    """Whether a layer and `LoraProduct` agree on random rows. B is random too: a new adapter's is zero, and shows nothing."""
    base, (a, b), (name, *_) = layer.base_layer, _matrices(layer), list(layer.lora_A)
    places = f"lora_A.{name}.weight", f"lora_B.{name}.weight"

    def plain(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(places, (a, b), strict=True)), (x,))

    def ours(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        low = (m.detach().to(base.weight.dtype) for m in (a, b))
        return LoraProduct.apply(x, base.weight, base.bias, a, b, *low, float(layer.scaling[name]))

    x = random_like((TRIAL_ROWS, base.in_features), base.weight)
    small = x.dtype != torch.float32
    with torch.autocast(x.device.type, x.dtype if small else None, enabled=small):
        return x.dtype == base.weight.dtype and agree(
            plain, ours, x, a.detach(), random_like(tuple(b.shape), b) / b.shape[1] ** 0.5
        )
