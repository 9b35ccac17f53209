"""How a product of few rows ("skinny") is cut into programs, and of how many rows at most one is Triton's.

Decoding reads each weight once for a handful of rows, so a product's time is that of its bytes, if enough programs ask for
them at once. Splitting the inputs too makes them enough where a weight has few outputs; the kernel that reads the product adds
the parts up. With every kernel of a layer Triton's, each can start while the one before it ends. docs/engine-log.md has the
times. The choice is by rule, not by a trial of the clock, so that two starts, and all GPUs of a run, make the same rounding.
"""

from __future__ import annotations

from typing import NamedTuple

TILES = (16, 32, 64)  # rows a program computes: the least that tensor cores take, and twice and four times that
BLOCK_BYTES = 256  # of a weight's row that one turn of a program's loop reads
LEAST_TURNS = 3  # of a split
MOST_SPLITS = 8
PROGRAMS = 2.3  # wanted a multiprocessor
MEASURED_ON = (9, 0)  # the compute capability on which these products were found faster than cuBLAS
SMALL_LAYER = 16 << 20  # bytes: a layer whose kernels take less time than their launches


class Tiling(NamedTuple):
    """`rows` and `columns` of the tile one program computes, over `share` of the inputs in turns of `block`."""

    rows: int
    columns: int
    block: int
    splits: int
    share: int
    stages: int
    even: bool


def tiling(rows: int, width: int, inputs: int, processors: int, itemsize: int = 2) -> Tiling:
    """The cut of a product of `rows` states with a weight [width, inputs] whose values take `itemsize` bytes."""
    tile = next(t for t in TILES if t >= rows)
    block = BLOCK_BYTES // itemsize
    columns = 64 if width // 64 >= 2 * processors else 32
    programs, splits = -(-width // columns), 1
    while (
        programs * splits < PROGRAMS * processors
        and splits < MOST_SPLITS
        and inputs >= 2 * splits * LEAST_TURNS * block
    ):
        splits *= 2
    share = -(-inputs // (splits * block)) * block
    splits = -(-inputs // share)
    even = inputs % block == 0 and inputs == share * splits and width % columns == 0
    return Tiling(tile, columns, block, splits, share, 3, even)


def most_rows(capability: tuple[int, int], can_overlap: bool, layer_bytes: int, fp8: bool) -> int:
    """Rows up to which a layer's products are better Triton's; 0 where that was not measured, or kernels cannot overlap."""
    if capability != MEASURED_ON or not can_overlap:
        return 0
    if layer_bytes <= SMALL_LAYER:
        return 64
    return 16 if fp8 else 32
