"""How a product of few rows ("skinny") is cut into programs, and of how many rows at most one is Triton's.

Decoding reads each weight once for a handful of rows, so a product's time is that of its bytes, if enough programs ask for
them at once. Splitting the inputs too makes them enough where a weight has few outputs; the kernel that reads the product adds
the parts up. With every kernel of a layer Triton's, each can start while the one before it ends. docs/engine-log.md has the
times. The choice is by rule, not by a trial of the clock, so that two starts, and all GPUs of a run, make the same rounding.
"""

from __future__ import annotations

from typing import NamedTuple

TILES = (16, 64)  # rows a program computes: the least that tensor cores take, and that those of a whole warp group do
COLUMNS = 64  # outputs a program computes; half of them where that leaves half the card idle
BLOCK_BYTES = 256  # of a weight's row that one turn of a program's loop reads
LEAST_TURNS = 2  # of a split
MOST_SPLITS = 8
MEASURED_ON = (9, 0)  # the compute capability on which these products were found faster than cuBLAS


class Tiling(NamedTuple):
    """`rows` and `columns` of the tile one program computes, over `share` of the inputs in turns of `block`."""

    rows: int
    columns: int
    block: int
    splits: int
    share: int
    stages: int
    even: bool


def tiling(
    rows: int, width: int, inputs: int, processors: int, itemsize: int = 2, *, most_splits: int = MOST_SPLITS
) -> Tiling:
    """The cut of a product of `rows` states with a weight [width, inputs] whose values take `itemsize` bytes."""
    tile = next(t for t in TILES if t >= rows)
    block = BLOCK_BYTES // itemsize
    if inputs < 8 * block:
        block //= 2
    most = max(1, min(most_splits, inputs // (LEAST_TURNS * block)))
    columns = COLUMNS if 2 * most * -(-width // COLUMNS) >= processors else COLUMNS // 2
    tiles = -(-width // columns)
    if tile == TILES[-1] and tiles > processors:  # programs share a multiprocessor's memory: less of it each
        block //= 2
    splits = _splits(tile, tiles, processors, most)
    share = -(-inputs // (splits * block)) * block
    splits = -(-inputs // share)
    even = inputs % block == 0 and inputs == share * splits and width % columns == 0
    return Tiling(tile, columns, block, splits, share, 3 if tiles > 2 * processors else 4, even)


def _splits(tile: int, tiles: int, processors: int, most: int) -> int:
    """Of the inputs: small tiles as many as fill the card, in powers of two; large ones, of which a multiprocessor's memory
    holds one, as many as it has room for."""
    if tile == TILES[-1]:
        return max(1, min(processors // tiles, most))
    splits = 1
    while 20 * tiles * splits < 19 * processors and 2 * splits <= most:
        splits *= 2
    return splits


def most_rows(capability: tuple[int, int], can_overlap: bool) -> int:
    """Rows up to which products are better Triton's; 0 where that was not measured, or kernels cannot overlap."""
    return TILES[-1] if capability == MEASURED_ON and can_overlap else 0
