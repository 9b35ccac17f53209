"""How products of few rows are cut: every input and output once, enough programs, and the same cut each time."""

from itertools import product

import pytest

from grpo_portable.rollout.skinny import MOST_SPLITS, TILES, most_rows, tiling

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("rows", "width", "inputs", "itemsize", "wanted"),
    [  # (rows, columns, splits) of the tilings that were fastest for a 4B model on an H200
        (8, 6144, 2560, 2, (16, 64, 2)),
        (16, 2560, 4096, 2, (16, 64, 4)),
        (17, 19456, 2560, 2, (64, 64, 1)),
        (32, 2560, 9728, 2, (64, 64, 3)),
        (64, 6144, 2560, 1, (64, 64, 1)),
        (16, 2560, 9728, 1, (16, 64, 4)),
        (64, 960, 576, 2, (64, 32, 3)),  # a small model's
    ],
)
def test_cuts(rows: int, width: int, inputs: int, itemsize: int, wanted: tuple[int, int, int]) -> None:
    cut = tiling(rows, width, inputs, H200, itemsize)
    assert (cut.rows, cut.columns, cut.splits) == wanted


def test_every_input_is_summed_once() -> None:
    sizes = product((16, 31, 64, 960, 1000, 19456), (16, 128, 129, 384, 576, 1000, 2560, 9728, 30000))
    for (width, inputs), itemsize, processors, rows in product(sizes, (1, 2), (1, 24, 84, 132), (1, 16, 33, 64)):
        cut = tiling(rows, width, inputs, processors, itemsize)
        assert cut.rows >= rows and cut.rows in TILES
        assert cut.share % cut.block == 0 and 1 <= cut.splits <= MOST_SPLITS
        assert (cut.splits - 1) * cut.share < inputs <= cut.splits * cut.share  # no split is empty, none is missing
        if cut.even:  # no mask is looked at then
            assert cut.splits * cut.share == inputs and width % cut.columns == 0


def test_where_triton_multiplies() -> None:
    assert most_rows((9, 0), True) == 64
    assert most_rows((9, 0), False) == 0  # it is the overlap that pays
    assert most_rows((8, 0), True) == most_rows((12, 0), True) == 0  # not measured there
