"""Not a test: microseconds of a product of few rows on this card, by the library, by `rollout.skinny.tiling`, and by other
cuts of it.

`python tests/gpu/product_times.py [SHAPE [ROWS ...]]`, such as `qwen3-4b 16 64`

Each product runs over enough weights that none is left in the card's cache from the time before, one after the other in a
captured graph, Triton's launched ahead as in a step (`layer_times.py` has whole layers).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_portable.bench.shapes import config_of
from grpo_portable.rollout import fp8, kernels, skinny
from grpo_portable.rollout.skinny import Tiling

HERE = torch.device("cuda")
CACHE = 200 << 20  # bytes of weights between two uses of one: several times an H200's L2
COLUMNS, BLOCK_BYTES, SPLITS, STAGES, WARPS = (64, 128), (128, 256), (1, 2, 3, 4, 8), (3, 4), (4, 8)


def products(name: str) -> dict[str, tuple[int, int]]:
    """(width, inputs) of a layer's products."""
    config = config_of(name)
    heads, head = config.num_attention_heads, getattr(config, "head_dim", 0)
    head = head or config.hidden_size // heads
    return {
        "qkv": ((heads + 2 * config.num_key_value_heads) * head, config.hidden_size),
        "out": (config.hidden_size, heads * head),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }


def microseconds(step: Callable[[int], Any], count: int) -> float:
    """Of one of `count` products, `step(i)` with the i-th weights."""
    for index in range(count):
        step(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            step(index)
    took = []
    for _ in range(4):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / count * 1e3)
    return min(took[1:])


def cuts(rows: int, width: int, inputs: int, itemsize: int) -> Iterator[tuple[Tiling, int]]:
    """Tilings of a product and the warps of a program; first the rule's own."""
    processors = torch.cuda.get_device_properties(HERE).multi_processor_count
    own = skinny.tiling(rows, width, inputs, processors, itemsize)
    yield own, 4
    for columns, size, splits, stages, warps in itertools.product(COLUMNS, BLOCK_BYTES, SPLITS, STAGES, WARPS):
        block = size // itemsize
        share = -(-inputs // (splits * block)) * block
        made = -(-inputs // share)
        even = inputs % block == 0 and inputs == share * made and width % columns == 0
        if made == splits and share >= 3 * block:
            yield Tiling(own.rows, columns, block, splits, share, stages, even), warps


def timed(x: torch.Tensor, weights: list[torch.Tensor], cut: Tiling, warps: int) -> float:
    (rows, inputs), width = x.shape, weights[0].shape[0]
    wide = torch.float32 if cut.splits > 1 else torch.bfloat16
    out = torch.empty(cut.splits, rows, width, device=HERE, dtype=wide)

    def step(index: int) -> None:
        kernels.skinny_kernel[(-(-width // cut.columns), cut.splits)](
            x, weights[index], out, rows, width, inputs, cut.share, ROWS=cut.rows, COLUMNS=cut.columns, BLOCK=cut.block,
            STAGES=cut.stages, EVEN=cut.even, num_warps=warps, AHEAD=True, launch_pdl=True,
        )  # fmt: skip

    return microseconds(step, len(weights))


def main(name: str, row_counts: list[int]) -> None:
    unit = torch.ones((), device=HERE)
    for (what, (width, inputs)), narrow, rows in itertools.product(products(name).items(), (False, True), row_counts):
        kind = torch.float8_e4m3fn if narrow else torch.bfloat16
        count = max(2, -(-CACHE // (width * inputs * kind.itemsize)))
        x = torch.randn(rows, inputs, device=HERE).to(kind)
        weights = [(torch.randn(width, inputs, device=HERE) * 0.02).to(kind) for _ in range(count)]

        def library(index: int, x: Any = x, weights: Any = weights, narrow: bool = narrow) -> Any:
            return fp8.matmul(x, weights[index], unit, torch.bfloat16) if narrow else x @ weights[index].t()

        by_library = microseconds(library, count)
        seen: list[tuple[float, Tiling, int]] = []
        for cut, warps in cuts(rows, width, inputs, kind.itemsize):
            try:
                seen.append((timed(x, weights, cut, warps), cut, warps))
            except Exception as failure:  # a cut this card has no room for
                print(f"  {cut} {warps}: {type(failure).__name__}")
        floor, sort = width * inputs * kind.itemsize / 4.3e12 * 1e6, "fp8" if narrow else "bf16"
        print(f"{what} {sort} {rows} rows: library {by_library:.1f} us, rule {seen[0][0]:.1f}, bytes {floor:.1f}")
        for took, cut, warps in sorted(seen)[:4]:
            told = f"columns {cut.columns} block {cut.block} splits {cut.splits} stages {cut.stages} warps {warps}"
            print(f"  {took:.1f} us  {told}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "qwen3-4b", [int(n) for n in sys.argv[2:]] or [16, 64])
