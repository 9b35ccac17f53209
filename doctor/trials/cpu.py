"""How fast torch computes on the CPU, in tenths of a second: one large product, and one that only reads its weight.

The best of a few tries, since another program may have had the cores in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from doctor.trials import stage, tell

_SIDE = 1024
_READ_SIDE = 4096  # 64 MiB in float32: more than most caches hold
_TRIES = 5


def cpu() -> None:
    """Tells cpu_rates."""
    stage("import torch")
    import torch

    tell_rates(torch)


def tell_rates(torch: Any) -> None:
    """Tells cpu_rates: gflops of a float32 product, gb_s read by a matrix-vector product, and torch's threads."""
    stage("CPU rates")
    with torch.inference_mode():
        a, b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
        product_s = _best_s(lambda: a @ b)
        weight, x = torch.ones(_READ_SIDE, _READ_SIDE), torch.ones(_READ_SIDE)
        read_s = _best_s(lambda: weight @ x)
    rates = {
        "gflops": round(2e-9 * _SIDE**3 / product_s, 1),
        "gb_s": round(4e-9 * _READ_SIDE**2 / read_s, 1),
        "threads": torch.get_num_threads(),
    }
    tell("cpu_rates", rates)


def _best_s(run: Callable[[], Any]) -> float:
    run()  # threads and memory are made on the way
    best = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
