"""The model's forward over the rollout's weights: one token a row with the cache, and the prompts' pass that fills the cache.

Written as pure functions of tensors around the attention call, so that the same lines run eagerly, inside a CUDA graph, or
compiled (`compiled.py`). The residual stream is carried as a pair (x, pending): the sum is taken by the next norm's kernel.
Legend: N rows, B prompts, P prompt tokens, H heads, K KV heads, D head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from grpo_portable.rollout import attention
from grpo_portable.rollout.family import Shape
from grpo_portable.rollout.fp8 import product_fp8
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.weights import Dense, Layer, Weights

Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Programs(NamedTuple):
    """The two halves of a decode layer, before and after its attention; eager or compiled."""

    before: Callable
    after: Callable


def step(
    weights: Weights,
    shape: Shape,
    tables: Tables,
    cache: Cache,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    span: int,
    run: Programs,
) -> torch.Tensor:
    """Logits [N, V] after `tokens` [N], each at position `lengths[r]` of its row, where the cache takes its keys and values."""
    rows = tokens.shape[0]
    where = attention.reach(cache.kind, shape, lengths + 1, cache.capacity, span)
    slots = torch.arange(rows, device=tokens.device) * cache.capacity + lengths
    turns = {name: (cos[lengths], sin[lengths]) for name, (cos, sin) in tables.items()}
    x, pending = embedded(weights, shape, tokens), None
    for index, layer in enumerate(weights.layers):
        keys, values = cache.keys[index], cache.values[index]
        x, q = run.before(x, pending, layer, *turns[shape.rotary[index]], keys, values, slots)
        out = attention.decode(q, keys, values, where, shape, shape.windows[index])
        x, pending = run.after(x, out, layer)
    return logits_of(weights, shape, x if pending is None else x + pending)


def prefill(
    weights: Weights, shape: Shape, tables: Tables, cache: Cache, tokens: torch.Tensor, copies: Sequence[Sequence[int]]
) -> None:
    """Run prompts [B, P], padded to the right, and write the keys and values of prompt b to every row in `copies[b]`.

    Positions past a prompt's end receive the padding's keys; each is overwritten before its row's length reaches it.
    """
    batch, length = tokens.shape
    into, source = cache.targets(copies)
    turns = {
        name: (cos[:length].repeat(batch, 1), sin[:length].repeat(batch, 1)) for name, (cos, sin) in tables.items()
    }
    x = embedded(weights, shape, tokens.reshape(-1))
    for index, layer in enumerate(weights.layers):
        q, k, v = heads(norm(x, layer.norm_in, shape.eps), layer, shape, *turns[shape.rotary[index]])
        q, k, v = (t.reshape(batch, length, -1, shape.head_dim) for t in (q, k, v))
        cache.write(index, into, k[source], v[source])
        if index + 1 == len(weights.layers):
            return  # nothing reads the last layer's output: the first completion token is drawn by the first step
        out = attention.prefill(q, k, v, shape, shape.windows[index])
        x, pending = after(shape, x, out.view(batch * length, -1), layer)
        x = x + pending


def before(shape: Shape, x, pending, layer: Layer, cos, sin, keys, values, slots) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual [N, hidden] with `pending` added, and the queries [N, H, D]; keys and values go to `slots` of the cache."""
    if pending is not None:
        x = x + pending
    q, k, v = heads(norm(x, layer.norm_in, shape.eps), layer, shape, cos, sin)
    keys.view(-1, shape.kv_heads, shape.head_dim).index_copy_(0, slots, k)
    values.view(-1, shape.kv_heads, shape.head_dim).index_copy_(0, slots, v)
    return x, q


def after(shape: Shape, x, out, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual after attention output `out` [N, H * D], and what the MLP adds to it."""
    y = product(out, layer.out)
    if layer.norm_attn_out is not None:
        y = norm(y, layer.norm_attn_out, shape.eps)
    x = x + y
    y = product(gated(product(norm(x, layer.norm_mlp, shape.eps), layer.gate_up), shape.activation), layer.down)
    if layer.norm_mlp_out is not None:
        y = norm(y, layer.norm_mlp_out, shape.eps)
    return x, y


def heads(h: torch.Tensor, layer: Layer, shape: Shape, cos: torch.Tensor, sin: torch.Tensor):
    """Rotated queries [N, H, D] and keys [N, K, D], and values [N, K, D], of normed states [N, hidden]."""
    q, k, v = (
        product(h, layer.qkv)
        .view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        .split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    )
    if layer.norm_q is not None and layer.norm_k is not None:
        q, k = norm(q, layer.norm_q, shape.eps), norm(k, layer.norm_k, shape.eps)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the first dims of x [N, heads, D]; `cos` and signed `sin` are [N, rotated dims]."""
    dims = cos.shape[-1]
    part = x if dims == x.shape[-1] else x[..., :dims]
    turned = torch.cat((part[..., dims // 2 :], part[..., : dims // 2]), -1)
    part = torch.addcmul(part * cos[:, None], turned, sin[:, None])
    return part if dims == x.shape[-1] else torch.cat((part, x[..., dims:]), -1)


def norm(x: torch.Tensor, factors: torch.Tensor, eps: float) -> torch.Tensor:
    if factors.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), factors, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), factors, eps).to(x.dtype)


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def product(x: torch.Tensor, parts: tuple[Dense, ...]) -> torch.Tensor:
    """x [N, inputs] times the weights of `parts`, their outputs side by side."""
    outs = [_product(x, part) for part in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def _product(x: torch.Tensor, part: Dense) -> torch.Tensor:
    if part.scale is None or part.unit is None:
        return F.linear(x, part.weight, part.bias)
    return product_fp8(x, part.weight, part.bias, part.scale, part.unit)


def embedded(weights: Weights, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, weights.embed)
    return x if shape.embed_scale == 1 else x * torch.tensor(shape.embed_scale, dtype=x.dtype).item()


def logits_of(weights: Weights, shape: Shape, x: torch.Tensor) -> torch.Tensor:
    logits = F.linear(norm(x, weights.norm, shape.eps), weights.head.weight, weights.head.bias)
    return logits if not shape.logit_softcap else torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
