"""A policy that learns with few kernels: what transformers and PEFT write as many small steps, while an update is made.

Norms become torch's own fused one, rotary positions one node of 6 kernels instead of 10 forward and 18 backward, adapters one
node a layer (lora_product.py). Sums are rounded less often than in the models' own code, so results agree within rounding and
not bit for bit. Each replacement is tried on the model's device against the code it stands for, and left out where they differ.
`fused_attention` stands apart: every update needs it, also one that leaves the layers as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_portable.rollout.family import unwrap
from grpo_portable.updates.agreement import agree, random_like
from grpo_portable.updates.lora_product import lora_products

ROWS, POSITIONS, HEADS = 2, 4, 3  # of the trial


class Rotary(torch.autograd.Function):
    """Queries and keys (…, d) turned by cos and sin (…, d): x cos + swap(x) signed, where swap exchanges the halves of d and
    `signed` is sin with its first half negated; `swapped` is swap(signed).
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor, swapped: Any
    ) -> Any:
        ctx.save_for_backward(cos, swapped)
        return _turned(q, cos, signed), _turned(k, cos, signed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos, swapped = ctx.saved_tensors
        return _turned(grads[0], cos, swapped), _turned(grads[1], cos, swapped), None, None, None


def _swap(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return (x * cos).addcmul_(_swap(x), sin)


def rotary(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain` (transformers' apply_rotary_pos_emb) in few kernels; where types differ or dimensions stay unturned, itself."""
    last: list[torch.Tensor] = []  # the sine of this forward pass, which all layers share, and what is made of it

    def apply(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if not (q.dtype == k.dtype == cos.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        if not last or last[0] is not sin:
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            last[:] = [sin, signed, _swap(signed)]
        _, signed, swapped = last
        wide = [t.unsqueeze(unsqueeze_dim) for t in (cos, signed, swapped)]
        return Rotary.apply(q, k, *wide)

    return apply


def fused_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """`norm` (x / rms(x) * weight, with `variance_epsilon`) as one kernel; in another type than its weight's, as it is.

    torch.nn.functional.rms_norm is the same kernel, but autocast reads and gives float32 there.
    """
    weight, epsilon, plain = norm.weight, norm.variance_epsilon, norm.forward
    kernel, shape = torch.ops.aten._fused_rms_norm, list(weight.shape)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, shape, weight, epsilon)[0] if x.dtype == weight.dtype else plain(x)

    return forward


def fused_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Inside, transformers' attention keeps to torch's fused kernels on `device`."""
    return contextlib.nullcontext() if _attends_groups(device) else repeated_keys()


def _attends_groups(device: torch.device) -> bool:
    """Whether the device has an attention kernel that reads a group's keys once. Before compute capability 8.0 there is the
    memory-efficient one alone, which takes no groups (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@contextlib.contextmanager
def repeated_keys() -> Iterator[None]:
    """Inside, transformers repeats keys and values for each head of their group before attention, as it does under a mask.

    Else torch would compute attention as matrix products, and keep S x S float32 scores a head for the backward pass.
    """
    home: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    before = home.use_gqa_in_sdpa
    home.use_gqa_in_sdpa = lambda *_, **__: False
    try:
        yield
    finally:
        home.use_gqa_in_sdpa = before


@contextlib.contextmanager
def few_kernels(model: Any) -> Iterator[dict[str, int]]:
    """Inside, the model computes with few kernels; gives how many of `adapters`, `norms` and `rotary` were replaced."""
    inner = unwrap(model)
    with contextlib.ExitStack() as stack:
        adapters = stack.enter_context(lora_products(model))
        norms = _trusted_norms(inner)
        for norm in norms:
            norm.forward = fused_norm(norm)
            stack.callback(delattr, norm, "forward")
        homes = [home for home in _attention_modules(inner) if _rotary_agrees(home.apply_rotary_pos_emb, inner)]
        for home in homes:
            stack.callback(setattr, home, "apply_rotary_pos_emb", home.apply_rotary_pos_emb)
            home.apply_rotary_pos_emb = rotary(home.apply_rotary_pos_emb)
        yield {"adapters": adapters, "norms": len(norms), "rotary": len(homes)}


def _trusted_norms(model: Any) -> list[Any]:
    """The model's frozen norms of the plain kind, if the fused kernel gives what the first of each size gives."""
    found = [
        m
        for m in model.modules()
        if type(m).__name__.endswith("RMSNorm")
        and hasattr(m, "variance_epsilon")
        and isinstance(getattr(m, "weight", None), torch.nn.Parameter)
        and not m.weight.requires_grad
        and "forward" not in vars(m)
    ]
    agrees: dict[Any, bool] = {}
    for norm in found:
        key = (type(norm), norm.weight.shape, norm.weight.dtype)
        if key not in agrees:
            x = random_like((ROWS, POSITIONS, norm.weight.shape[0]), norm.weight)
            agrees[key] = hasattr(torch.ops.aten, "_fused_rms_norm") and agree(norm.forward, fused_norm(norm), x)
    return [norm for norm in found if agrees[(type(norm), norm.weight.shape, norm.weight.dtype)]]


def _attention_modules(model: Any) -> list[Any]:
    """The source modules of the model's attention layers that turn queries and keys by a function of their own."""
    names = {type(m).__module__ for m in model.modules() if type(m).__name__.endswith("Attention")}
    homes = [sys.modules[name] for name in sorted(names)]
    return [home for home in homes if _takes_the_usual(getattr(home, "apply_rotary_pos_emb", None))]


def _takes_the_usual(function: Any) -> bool:
    """Whether a function takes what transformers' common one takes, and no more."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_varnames[: code.co_argcount] == ("q", "k", "cos", "sin", "unsqueeze_dim")


def _rotary_agrees(plain: Callable[..., Any], model: Any) -> bool:
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    like = next(model.parameters())
    angle = random_like((ROWS, POSITIONS, size // 2), like).float()
    cos, sin = (torch.cat((f(angle), f(angle)), -1).to(like.dtype) for f in (torch.cos, torch.sin))
    q = random_like((ROWS, HEADS, POSITIONS, size), like)
    ours = rotary(plain)
    return agree(lambda *x: torch.cat(plain(*x, cos, sin)), lambda *x: torch.cat(ours(*x, cos, sin)), q, q.flip(1))
