"""Whether Triton's kernels work on this machine and give what plain torch gives: one layer both ways when an engine starts.

Whatever keeps Triton from working (no compiler for its launcher, a card or a shape it does not take) shows here, and the engine
goes on in plain torch, or with the library's products, with the reason kept.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
import torch.nn.functional as F

from grpo_portable.rollout import booking, fp8, sampler, skinny
from grpo_portable.rollout.family import Shape
from grpo_portable.rollout.forward import Plain, Rows
from grpo_portable.rollout.fused import CHUNK, KEYS_A_SPLIT, Fused
from grpo_portable.rollout.graphs import Graphs, free_to_repeat
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.weights import Layer


def choose(shape: Shape, layer: Layer, device: torch.device, dtype: torch.dtype, wanted: bool | None = None) -> Plain:
    """Fused where it works (or Plain if `wanted` is False), with the reason."""
    if wanted is False:
        return Plain(shape, "not asked for")
    reason = _why_not(device, dtype)
    if reason is None:
        try:
            from grpo_portable.rollout import kernels

            fused = Fused(shape, device, "tried on this machine")
            reason = difference(fused, Plain(shape), layer, device, dtype)
            most = skinny.most_rows(torch.cuda.get_device_capability(device), kernels.CAN_OVERLAP)
            wide = Fused(shape, device, f"tried on this machine, with products of up to {most} rows", most)
            if reason is None and most and _skinny_fits(wide, layer, device, dtype):
                fused, wide.free_rows = wide, most if _is_all_skinny(layer) else 0
        except Exception as failure:  # whatever keeps Triton from working here is the answer that is asked for
            lines = str(failure).strip().splitlines()
            reason = f"Triton does not work here: {type(failure).__name__} {lines[-1] if lines else ''}".strip()
    return fused if reason is None else Plain(shape, reason)


def _is_all_skinny(layer: Layer) -> bool:
    others = (layer.out, layer.gate_up, layer.down)
    plain = layer.norm_attn_out is None and len(layer.qkv) == 1
    return plain and all(len(parts) == 1 and parts[0].bias is None for parts in others)


def _skinny_fits(fused: Fused, layer: Layer, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's products run here, give the same layer, and give it again from a captured graph, which older drivers
    do not make of launches ahead of time. If not, the library's are there.
    """
    try:
        plain = Plain(fused.shape)
        if any(difference(fused, plain, layer, device, dtype, rows) is not None for rows in skinny.TILES):
            return False
        return captured_alike(fused, layer, device, dtype)
    except Exception:  # whatever this driver or this Triton does not take
        return False


@torch.no_grad()
def captured_alike(fused: Fused, layer: Layer, device: torch.device, dtype: torch.dtype) -> bool:
    shape, rows, capacity = replace(fused.shape, layers=1), fp8.ROWS, 64
    run = Fused(shape, device, skinny_rows=fused.skinny_rows)
    draw = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(rows, shape.hidden, generator=draw, device=device).to(dtype)
    tables = {name: (torch.ones(capacity, shape.head_dim, device=device, dtype=dtype),) * 2 for name in shape.rotary}
    alone, made = torch.arange(rows, device=device, dtype=torch.int32), torch.empty_like(x)
    held = Rows(torch.full((rows,), capacity // 2, device=device), alone, torch.zeros_like(alone), capacity)
    ready = run.ready(tables, Cache(shape, rows, capacity, device, dtype), held)

    def step() -> None:
        summed, q = run.before(x, x, layer, 0, ready)
        made.copy_(run.normed(*run.after(summed, run.attend(q, 0, ready), layer), layer.norm_in)[0])

    step()
    wanted = made.clone()
    made.zero_()
    Graphs(device).run("layer", step, free_to_repeat)
    return bool((made - wanted).float().norm() <= 0.01 * wanted.float().norm())


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"Triton's kernels run on CUDA, this is `{device.type}`"
    if dtype not in (torch.float16, torch.bfloat16):
        return "the fused kernels are for 16-bit weights"
    return None if importlib.util.find_spec("triton") is not None else "Triton is not installed"


@torch.no_grad()
def difference(
    fused: Plain, plain: Plain, layer: Layer, device: torch.device, dtype: torch.dtype, rows: int = fp8.ROWS
) -> str | None:
    """None when one layer, one draw and what is booked of it are the same both ways, else where they part."""
    shape, capacity = plain.shape, 2 * KEYS_A_SPLIT
    draw = torch.Generator(device=device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, device=device).to(dtype)

    x, y, old = (
        random(rows, shape.hidden),
        random(rows, shape.hidden),
        random(2, rows, capacity, shape.kv_heads, shape.head_dim),
    )
    angles = torch.rand(capacity, shape.head_dim, generator=draw, device=device) * 6
    tables = {name: (angles.cos().to(dtype), angles.sin().to(dtype)) for name in set(shape.rotary)}
    lengths = torch.arange(rows, device=device) * 37 % (capacity - 1)
    alone = torch.arange(rows, device=device, dtype=torch.int32)
    seen: list[list[torch.Tensor]] = []
    booked: list[booking.State] = []
    allowed = 0.02 if layer.qkv[0].scale is None else 0.1  # an FP8 state that rounds the other way is 6 % off
    for run in (plain, fused):
        cache = Cache(replace(shape, layers=1), rows, capacity, device, dtype)
        for tensor, content in ((cache.keys[0], old[0]), (cache.values[0], old[1])):
            tensor.copy_(content)
        ready = run.ready(tables, cache, Rows(lengths, alone, torch.zeros_like(alone), capacity))
        summed, q = run.before(x, y, layer, 0, ready)
        out = run.attend(q, 0, ready)
        total = run.normed(*run.after(summed, out, layer), layer.norm_in)[0]
        logits = F.pad(x.float(), (0, 3 * CHUNK), value=-2.0).to(dtype)
        noise = torch.linspace(0.01, 0.99, rows, device=device, dtype=torch.float64)
        _, logprobs = run.draw(logits, noise, sampler.Drawing(0.8, 1.0, 0, 0.0, 1.0), None)
        state = booking.State(*(tensor.clone() for tensor in _some_state(rows, device)))
        run.book(state, alone.long() % 5, noise.float())
        seen.append([q, out, total, cache.keys[0], cache.values[0], logprobs])
        booked.append(state)
    if not all(torch.equal(a, b) for a, b in zip(*booked, strict=True)):
        return "the fused kernels book another state"
    for name, a, b in zip(("queries", "attention", "layer", "keys", "values", "draw"), *seen, strict=True):
        error = float((a.float() - b.float()).norm() / a.float().norm())
        if not error < allowed:
            return f"the fused kernels' {name} are off by {error:.1%}"
    return None


def _some_state(rows: int, device: torch.device) -> booking.State:
    """Rows of which some go on, some reach their limit, some draw a stop and some had ended."""
    row = torch.arange(rows, device=device)
    kept = torch.zeros(2, rows, dtype=torch.long, device=device)
    return booking.State(
        row % 7, row, row + row % 3, row % 4 > 0, torch.tensor([2, 3], device=device), kept[:1, 0], kept, kept.float()
    )
