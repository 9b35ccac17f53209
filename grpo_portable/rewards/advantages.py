"""Group-relative advantages with unscored samples left out. Pure Python; B groups of G samples, N = B*G rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-4  # added to the spread, as TRL does


def total(columns: Sequence[Sequence[float | None]], weights: Sequence[float] | None = None) -> list[float | None]:
    """The weighted sum of several rewards (one column each) a sample; None where any of them is None.

    A sum over the rewards that are there would compare a part of one sample with the whole of another.
    """
    weights = weights or [1.0] * len(columns)
    return [
        math.fsum(w * r for w, r in zip(weights, scored, strict=True))
        if len(scored := _scored(row)) == len(row)
        else None
        for row in zip(*columns, strict=True)
    ]


def group_advantages(
    rewards: Sequence[float | None], group_size: int, scale: str = "group", epsilon: float = EPSILON
) -> list[float]:
    """(N,) rewards to (N,) advantages: (R - mean) / (std + epsilon), mean over the group (GRPO, arXiv 2402.03300).

    `scale`: the std (n - 1) is of the `group`, of the whole `batch`, or not used (`none`, Dr. GRPO, arXiv 2503.20783).
    What is not finite takes no part in mean or std and gets 0, as do groups with fewer than two scored samples or no spread.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale must be group, batch or none, not {scale!r}")
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards are not a whole number of groups of {group_size}")
    batch_std = _std(_scored(rewards)) if scale == "batch" else 0.0
    advantages: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        scored = _scored(group)
        if len(scored) < 2 or min(scored) == max(scored):
            # equal rewards carry no signal; without this, rounding in the mean would be divided by epsilon
            advantages += [0.0] * group_size
            continue
        mean = math.fsum(scored) / len(scored)
        spread = {"group": _std(scored) + epsilon, "batch": batch_std + epsilon, "none": 1.0}[scale]
        advantages += [0.0 if r is None or not math.isfinite(r) else (r - mean) / spread for r in group]
    return advantages


def _scored(rewards: Sequence[float | None]) -> list[float]:
    return [r for r in rewards if r is not None and math.isfinite(r)]


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
