"""The model's forward over the rollout's weights: one token a row with the cache, and the prompts' pass that fills the cache.

`Plain` computes a decode layer in ordinary torch calls and runs everywhere; `fused.Fused` does the same in fewer kernels
where Triton works. The residual stream is carried as a pair (x, pending): the sum is taken where the next norm reads it.
Legend: N rows, B prompts, P prompt tokens, H heads, K KV heads, D head dims, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from grpo_portable.rollout import attention, booking, sampler
from grpo_portable.rollout.family import Shape
from grpo_portable.rollout.fp8 import product_fp8
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.weights import Dense, Layer, Weights

Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Rows:
    """The rows one step runs. `lengths` [N] int64 counts the keys each has before the step, a live one at most `span` after it.

    Row r's first `shared[r]` keys (int32) are also the first of row `leaders[r]` (int32).
    """

    lengths: torch.Tensor
    leaders: torch.Tensor
    shared: torch.Tensor
    span: int


class Plain:
    """A decode layer in ordinary torch calls. `reason` says why it was chosen."""

    name = "plain"
    multiple = 1  # widths that prompts are best padded to
    free_rows = 0  # up to which FP8 products take any number of rows
    joins = False  # whether prompts can be tokens of a decode step: `ready_for_both`, `both`, `first`

    def __init__(self, shape: Shape, reason: str = "") -> None:
        self.shape, self.reason = shape, reason

    def ready(self, tables: Tables, cache: Cache, rows: Rows) -> Any:
        """What every layer of one step needs and no layer changes."""
        places = cache.places(rows.lengths)
        turns = {name: (cos[rows.lengths], sin[rows.lengths]) for name, (cos, sin) in tables.items()}
        return (
            cache,
            places,
            turns,
            attention.reach(cache.kind, self.shape, rows.lengths + 1, cache.capacity, rows.span),
        )

    def normed(self, x: torch.Tensor, pending: Any, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual [N, hidden] with `pending` added, and its norm."""
        x = x if pending is None else x + pending
        return x, norm(x, factors, self.shape.eps)

    def before(
        self, x: torch.Tensor, pending: Any, layer: Layer, index: int, ready: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and the queries [N, H, D]; keys and values go to the cache."""
        cache, places, turns, _ = ready
        x, h = self.normed(x, pending, layer.norm_in)
        q, k, v = heads(h, layer, self.shape, *turns[self.shape.rotary[index]])
        cache.write(index, places, k, v)
        return x, q

    def ready_for_prompts(self, tables: Tables, cache: Cache, rows: torch.Tensor, length: int) -> Any:
        """What every layer of a prefill needs: prompts of `length` tokens, one a row of `rows` [B]."""
        batch = rows.shape[0]
        turns = {
            name: (cos[:length].repeat(batch, 1), sin[:length].repeat(batch, 1)) for name, (cos, sin) in tables.items()
        }
        return cache, rows, turns

    def prompt(
        self, x: torch.Tensor, pending: Any, layer: Layer, index: int, ready: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer's attention [B * P, H * D] over whole prompts, whose keys and values go to the cache; None from the last
        layer, whose output nothing reads."""
        cache, rows, turns = ready
        shape, batch = self.shape, rows.shape[0]
        x, h = self.normed(x, pending, layer.norm_in)
        q, k, v = (t.reshape(batch, -1, *t.shape[1:]) for t in heads(h, layer, shape, *turns[shape.rotary[index]]))
        length = k.shape[1]
        cache.keys[index][:, :length].index_copy_(0, rows, k)
        cache.values[index][:, :length].index_copy_(0, rows, v)
        if index + 1 == shape.layers:
            return x, None
        return x, attention.prefill(q, k, v, shape, shape.windows[index]).view(x.shape[0], -1)

    def attend(self, q: torch.Tensor, index: int, ready: Any) -> torch.Tensor:
        """Attention outputs [N, H * D]."""
        cache, _, _, reach = ready
        return attention.decode(q, cache.keys[index], cache.values[index], reach, self.shape, self.shape.windows[index])

    def after(self, x: torch.Tensor, out: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, Any]:
        """The residual with the attention's part, and what the MLP adds to it."""
        y = product(out, layer.out)
        if layer.norm_attn_out is not None:
            y = norm(y, layer.norm_attn_out, self.shape.eps)
        x, h = self.normed(x, y, layer.norm_mlp)
        y = product(gated(product(h, layer.gate_up), self.shape.activation), layer.down)
        return x, y if layer.norm_mlp_out is None else norm(y, layer.norm_mlp_out, self.shape.eps)

    def draw(
        self, logits: torch.Tensor, noise: torch.Tensor, drawing: sampler.Drawing, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [N] and their log-probabilities [N]."""
        return sampler.draw(logits, noise, drawing, seen)

    def book(self, state: booking.State, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """What a step leaves of its rows."""
        booking.book(state, tokens, logprobs)


def step(weights: Weights, tables: Tables, cache: Cache, tokens: torch.Tensor, rows: Rows, run: Plain) -> torch.Tensor:
    """Logits [N, V] after `tokens` [N], each at position `lengths[r]` of its row, where the cache takes its keys and values."""
    ready = run.ready(tables, cache, rows)
    x, pending = embedded(weights, run.shape, tokens), None
    for index, layer in enumerate(weights.layers):
        x, q = run.before(x, pending, layer, index, ready)
        x, pending = run.after(x, run.attend(q, index, ready), layer)
    return logits_of(weights, run.shape, run.normed(x, pending, weights.norm)[1])


def step_with_prompts(
    weights: Weights, tables: Tables, cache: Cache, tokens: torch.Tensor, rows: Rows, prompts: torch.Tensor,
    places: torch.Tensor, counts: torch.Tensor, run: Any,
) -> torch.Tensor:  # fmt: skip
    """`step`, and in the same products what `prefill` does for `prompts` [B, P] of `counts` [B] tokens, into rows `places` [B].

    Rows of these prompts may be among those that step: a layer's keys are there before its attention. P is at most L - 1: what
    pads a prompt goes to its row's last position, which no row reaches.
    """
    ready = run.ready_for_both(tables, cache, rows, prompts, places, counts)
    x, pending = embedded(weights, run.shape, torch.cat((tokens, prompts.reshape(-1)))), None
    for index, layer in enumerate(weights.layers):
        x, out = run.both(x, pending, layer, index, ready)
        x, pending = run.after(x, out, layer)
    count = tokens.shape[0]
    return logits_of(weights, run.shape, run.normed(x[:count], run.first(pending, count), weights.norm)[1])


def prefill(
    weights: Weights, tables: Tables, cache: Cache, tokens: torch.Tensor, rows: torch.Tensor, run: Plain
) -> None:
    """Run prompts [B, P], padded to the right, and leave their keys and values in `rows` [B], one a prompt.

    Positions past a prompt's end receive the padding's keys; each is overwritten before its row's length reaches it.
    """
    ready = run.ready_for_prompts(tables, cache, rows, tokens.shape[1])
    x, pending = embedded(weights, run.shape, tokens.reshape(-1)), None
    for index, layer in enumerate(weights.layers):
        x, out = run.prompt(x, pending, layer, index, ready)
        if out is not None:
            x, pending = run.after(x, out, layer)


def heads(h: torch.Tensor, layer: Layer, shape: Shape, cos: torch.Tensor, sin: torch.Tensor):
    """Rotated queries [N, H, D] and keys [N, K, D], and values [N, K, D], of normed states [N, hidden]."""
    qkv = product(h, layer.qkv).view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    both, v = qkv.split((shape.heads + shape.kv_heads, shape.kv_heads), 1)
    if layer.norm_q is None or layer.norm_k is None:
        q, k = rotated(both, cos, sin).split((shape.heads, shape.kv_heads), 1)
        return q, k, v
    q, k = both.split((shape.heads, shape.kv_heads), 1)
    q, k = norm(q, layer.norm_q, shape.eps), norm(k, layer.norm_k, shape.eps)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the first dims of x [N, heads, D]; `cos` and signed `sin` are [N, rotated dims]."""
    dims = cos.shape[-1]
    part = x if dims == x.shape[-1] else x[..., :dims]
    turned = part.roll(dims // 2, -1)
    part = torch.addcmul(part * cos[:, None], turned, sin[:, None])
    return part if dims == x.shape[-1] else torch.cat((part, x[..., dims:]), -1)


def norm(x: torch.Tensor, factors: torch.Tensor, eps: float) -> torch.Tensor:
    if x.device.type == "cpu" and x.dtype == factors.dtype == torch.float32:  # where rms_norm is nine calls
        spread = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return (x * spread).mul_(factors)
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
    if part.packed is not None:
        return part.packed.times(x, part.bias)
    if part.scale is None or part.unit is None:
        return F.linear(x, part.weight, part.bias)
    return product_fp8(x, part.weight, part.bias, part.scale, part.unit)


def embedded(weights: Weights, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, weights.embed)
    return x if shape.embed_scale == 1 else x * torch.tensor(shape.embed_scale, dtype=x.dtype).item()


def logits_of(weights: Weights, shape: Shape, h: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] of normed states [N, hidden]."""
    logits = _product(h, weights.head)
    return logits if not shape.logit_softcap else torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
