"""Attention over a static KV cache: the prompt's causal pass, and one token a row.

Keys and values lie as [rows, positions, KV heads, head dims]; row r holds `lengths[r]` of them. In a step, heads that share a
KV head are folded into the query's length, so that keys and values are read once a KV head and not repeated; the prompt's
pass repeats them.

    flash   CUDA from compute capability 8.0, 16 bits: torch's own variable-length kernel reads just the positions each row has
    batched the CPU in float32: a matrix product a row and KV head, which takes it less than sdpa's own kernel for one query
    sdpa    everywhere: a mask over the first `span` positions
    plain   scores with a soft cap, which no fused kernel computes

Legend: N rows, H heads, K KV heads, G heads a KV head, D head dims, L positions a row can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from grpo_portable.rollout.family import Shape


@dataclass(frozen=True)
class Reach:
    """What each row may attend to in one step, computed once and read by every layer.

    `lengths` [N] int32 counts the keys of each row; `starts` [N + 1] int32 is where each row begins in the cache and `queries`
    [N + 1] int32 in the query (flash); `masks` per window: [N, 1, 1, span] bool (sdpa, plain), or what is added to the scores,
    [N * K, G, span] (batched).
    """

    kind: str
    span: int
    lengths: torch.Tensor
    starts: torch.Tensor | None
    queries: torch.Tensor | None
    masks: dict[int | None, torch.Tensor]


def kind_for(shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    if shape.attn_softcap:
        return "plain"
    if device.type == "cpu" and dtype == torch.float32:
        return "batched"
    if device.type != "cuda" or torch.version.cuda is None or dtype not in (torch.float16, torch.bfloat16):
        return "sdpa"
    fits = torch.cuda.get_device_capability(device) >= (8, 0) and shape.head_dim <= 256 and shape.head_dim % 8 == 0
    return "flash" if fits else "sdpa"


def reach(kind: str, shape: Shape, lengths: torch.Tensor, capacity: int, span: int) -> Reach:
    """The Reach of rows with `lengths` keys each in a cache of `capacity` positions a row, none beyond `span` in a live row."""
    rows, device = lengths.shape[0], lengths.device
    if kind == "flash":
        steps = torch.arange(rows + 1, device=device, dtype=torch.int32)
        return Reach(kind, span, lengths.to(torch.int32), steps * capacity, steps, {})
    at = torch.arange(span, device=device)
    # A row that has ended may be longer than the span, and its window beyond it. Attending to nothing is NaN, which it would
    # leave as a key and a value to the rows that come after it.
    held = lengths[:, None].clamp(max=span)
    seen = at < held
    masks = {w: (seen if w is None else seen & (at >= held - w))[:, None, None] for w in set(shape.windows)}
    if kind == "batched":
        masks = {w: _added(mask, shape) for w, mask in masks.items()}
    return Reach(kind, span, lengths, None, None, masks)


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: Reach, shape: Shape, window: int | None
) -> torch.Tensor:
    """Attention of one query a row: q [N, H, D] over keys and values [>= N, L, K, D] → [N, H * D]."""
    rows = q.shape[0]
    if where.kind == "flash":
        return _flash_decode(q, keys, values, where, shape, window).reshape(rows, -1)
    if where.kind == "batched":
        return _batched_decode(q, keys, values, where, shape, window).view(rows, -1)
    q = q.view(rows, shape.kv_heads, shape.group, shape.head_dim)
    k, v = (t[:rows, : where.span].transpose(1, 2) for t in (keys, values))
    mask = where.masks[window]
    if where.kind == "plain":
        return _plain(q, k, v, mask, shape).reshape(rows, -1)
    mask = mask.expand(-1, -1, shape.group, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scaling).reshape(rows, -1)


def _added(mask: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A mask [N, 1, 1, span] as numbers added to the scores [N * K, G, span]."""
    low = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    return low.expand(-1, shape.kv_heads, shape.group, -1).reshape(-1, shape.group, mask.shape[-1])


def _batched_decode(q, keys, values, where: Reach, shape: Shape, window: int | None) -> torch.Tensor:
    rows = q.shape[0]
    k, v = (t.transpose(1, 2)[:rows, :, : where.span].flatten(0, 1) for t in (keys, values))  # views, no copies
    q = q.reshape(rows * shape.kv_heads, shape.group, shape.head_dim)
    scores = torch.baddbmm(where.masks[window], q, k.transpose(1, 2), alpha=shape.scaling)
    return torch.bmm(torch.softmax(scores, -1), v)


def _flash_decode(q, keys, values, where: Reach, shape: Shape, window: int | None) -> torch.Tensor:
    flat = (-1, shape.kv_heads, shape.head_dim)
    return torch.ops.aten._flash_attention_forward(
        q,
        keys.view(flat),
        values.view(flat),
        where.queries,
        where.starts,
        1,
        keys.shape[1],
        0.0,
        False,
        False,
        scale=shape.scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=where.lengths,
    )[0]


def flash_prompts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    length: int,
    shape: Shape,
    layer: int,
) -> torch.Tensor:
    """Causal attention [N, H, D] of prompts of `length` tokens, q [N, H, D], whose keys and values lie in the cache already.

    `packed`: where each prompt ends in q and begins in the cache, [B + 1] int32 both, and its keys [B] int32.
    """
    ends, begins, used = packed
    flat, window = (-1, shape.kv_heads, shape.head_dim), shape.windows[layer]
    return torch.ops.aten._flash_attention_forward(
        q,
        keys.view(flat),
        values.view(flat),
        ends,
        begins,
        length,
        length,
        0.0,
        True,
        False,
        scale=shape.scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=used,
    )[0]


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, window: int | None) -> torch.Tensor:
    """Causal attention of right-padded prompts: q [B, P, H, D], k and v [B, P, K, D] → [B, P, H * D].

    Padding lies to the right, where causal queries never look, so there is no mask to build.
    """
    batch, length = q.shape[:2]
    k, v = (t.repeat_interleave(shape.group, 2).transpose(1, 2) for t in (k, v))
    q = q.transpose(1, 2)
    mask = None
    if shape.attn_softcap or (window is not None and length > window):
        at = torch.arange(length, device=q.device)
        mask = at <= at[:, None]
        mask = mask if window is None else mask & (at > at[:, None] - window)
    if shape.attn_softcap:
        out = _plain(q, k, v, mask, shape)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scaling)
    return out.transpose(1, 2).reshape(batch, length, -1)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * shape.scaling
    if shape.attn_softcap:
        scores = torch.tanh(scores / shape.attn_softcap) * shape.attn_softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)
