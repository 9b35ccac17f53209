"""Not a test: microseconds of one decode layer on this card, its products by the library and by Triton.

`python tests/gpu/layer_times.py [--keys N] [SHAPE ...]`

Eight layers with weights of their own (more than a card's cache holds for the larger shapes) run in one captured graph, over
rows of N (254) keys of which eight at a time share the first 127, as a group shares its prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from grpo_portable.bench.shapes import config_of
from grpo_portable.rollout.family import Shape
from grpo_portable.rollout.forward import Rows
from grpo_portable.rollout.fused import Fused
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.weights import Dense, Layer

LAYERS, KEYS, PROMPT = 8, 254, 127
SHAPES = ("qwen3-4b", "qwen3-1.7b", "qwen3-0.6b", "smollm2-135m")
HERE = torch.device("cuda")


def shape_of(name: str) -> tuple[Shape, int]:
    config = config_of(name)
    heads = config.num_attention_heads
    shape = Shape(
        layers=LAYERS, hidden=config.hidden_size, heads=heads, kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads, vocab=config.vocab_size, eps=1e-6,
        scaling=0.1, activation="silu", norm_offset=0.0, embed_scale=1.0, attn_softcap=None, logit_softcap=None,
        windows=(None,) * LAYERS, rotary=("",) * LAYERS, context=4096,
    )  # fmt: skip
    return shape, config.intermediate_size


def dense(width: int, inputs: int, fp8: bool) -> tuple[Dense, ...]:
    weight = torch.randn(width, inputs, device=HERE) * 0.02
    if not fp8:
        return (Dense(weight.bfloat16(), None),)
    scale = weight.abs().amax(1) / 448
    return (Dense((weight / scale[:, None]).to(torch.float8_e4m3fn), None, scale, torch.ones((), device=HERE)),)


def layer_of(shape: Shape, mlp: int, fp8: bool, head_norms: bool) -> Layer:
    ones, inner = torch.ones(shape.hidden, device=HERE, dtype=torch.bfloat16), shape.heads * shape.head_dim
    head = ones[: shape.head_dim] if head_norms else None
    return Layer(
        norm_in=ones, norm_attn_out=None, norm_mlp=ones, norm_mlp_out=None, norm_q=head, norm_k=head,
        qkv=dense(inner + 2 * shape.kv_heads * shape.head_dim, shape.hidden, fp8), out=dense(shape.hidden, inner, fp8),
        gate_up=dense(2 * mlp, shape.hidden, fp8), down=dense(shape.hidden, mlp, fp8),
    )  # fmt: skip


def step_of(run: Fused, layers: list[Layer], rows: int, keys: int = KEYS) -> Callable[[], None]:
    shape, capacity = run.shape, keys + 130
    x = torch.randn(rows, shape.hidden, device=HERE).bfloat16()
    cache = Cache(shape, rows, capacity, HERE, torch.bfloat16)
    tables = {"": (torch.ones(capacity, shape.head_dim, device=HERE, dtype=torch.bfloat16),) * 2}
    leaders = torch.arange(rows, device=HERE, dtype=torch.int32) // 8 * 8
    held = Rows(torch.full((rows,), keys, device=HERE), leaders, torch.full_like(leaders, PROMPT), capacity)
    ready = run.ready(tables, cache, held)

    def step() -> None:
        a, p = x, x
        for index, layer in enumerate(layers):
            a, q = run.before(a, p, layer, index, ready)
            a, p = run.after(a, run.attend(q, index, ready), layer)

    return step


def microseconds(step: Callable[[], None], repeats: int = 3) -> float:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    took = []
    for _ in range(4):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / repeats / LAYERS * 1e3)
    return min(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--keys", type=int, default=KEYS)
    given = parser.parse_args()
    for name in given.shapes:
        shape, mlp = shape_of(name)
        for fp8 in (False, True):
            layers = [layer_of(shape, mlp, fp8, name.startswith("qwen3")) for _ in range(LAYERS)]
            for rows in (1, 8, 16, 32, 48, 64):
                library, triton = (
                    microseconds(step_of(Fused(shape, HERE, skinny_rows=most), layers, rows, given.keys))
                    for most in (0, 64)
                )
                print(f"{name} {'fp8' if fp8 else 'bf16'} {rows:3} rows: {library:6.1f} us, Triton's {triton:6.1f} us")


if __name__ == "__main__":
    main()
