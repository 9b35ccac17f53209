"""Statistics of right and wrong answers, for one model and for two models that answered the same questions.

Legend: n questions; of the n pairs `gained` went wrong → right, `lost` right → wrong, `both` and `neither` agree.
Gained and lost pairs are the discordant ones; a difference between two models on the same questions rests on them alone,
so nothing here uses the unpaired standard error. Pure Python: this module knows nothing of models, files or answers.

Sources: Wilson 1927; McNemar 1947 (exact form); Tango 1998 (score interval for paired proportions); Efron 1979
(bootstrap); Miller 2024, arXiv 2411.00640 (paired and clustered errors for language model evaluation).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

LEVEL = 0.05
POWER = 0.80
DRAWS = 10_000
FEW = 25  # with fewer discordant pairs, or a delta this near to n of n, no normal approximation is used
Z = NormalDist().inv_cdf(1 - LEVEL / 2)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Paired:
    """Two models on the same n questions. `delta`, `se`, intervals and `smallest_detectable` are shares, not points."""

    n: int
    both: int
    gained: int
    lost: int
    neither: int
    delta: float
    se: float | None  # None for a single question
    interval: Interval  # 95 %
    method: str  # of the interval: "normal", or "exact" (see `exact_interval`) when there are few discordant pairs
    bootstrap: Interval  # 95 %, percentile
    p: float  # exact McNemar, two-sided
    smallest_detectable: float | None  # None: no difference could be shown with so few questions

    @property
    def verdict(self) -> str:
        """`higher`, `lower` or `not shown to differ`; a difference needs both the interval and the exact test."""
        return verdict(self.delta, self.interval, self.p)


@dataclass(frozen=True)
class Mean:
    """A mean over questions with its 95 % interval; `se` is None for a single question."""

    n: int
    mean: float
    se: float | None
    interval: Interval
    p: float | None = None  # two-sided, against a mean of 0; None where 0 is no hypothesis (accuracies)


def verdict(delta: float, interval: Interval, p: float) -> str:
    """`higher` or `lower` when the interval leaves out 0 and p < 0.05, else `not shown to differ`."""
    if p >= LEVEL or interval[0] <= 0 <= interval[1]:
        return "not shown to differ"
    return "higher" if delta > 0 else "lower"


def wilson(k: float, n: float) -> Interval:
    """95 % Wilson interval of a share k/n; (0, 1) when n is 0. k and n may be effective, not whole, counts."""
    if n <= 0:
        return 0.0, 1.0
    p, z2 = k / n, Z * Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(max(p * (1 - p), 0.0) / n + z2 / (4 * n * n))
    # At k = 0 and k = n the bound is 0 and 1 exactly; rounding would leave 1e-17 on the wrong side.
    return (0.0 if k <= 0 else max(0.0, centre - half)), (1.0 if k >= n else min(1.0, centre + half))


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact McNemar p: were `gained` and `lost` a fair coin's throws? 1 when there are none."""
    m = gained + lost
    tail = term = 1
    for i in range(min(gained, lost)):
        term = term * (m - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / 2**m)  # whole numbers until this division, which rounds once


def paired_se(n: int, gained: int, lost: int) -> float | None:
    """Standard error of (gained - lost)/n over questions; None when n is 1."""
    if n < 2:
        return None
    return math.sqrt(max((gained + lost - (gained - lost) ** 2 / n) / (n * (n - 1)), 0.0))


def score_interval(n: int, gained: int, lost: int) -> Interval:
    """95 % score interval (Tango 1998) of (gained - lost)/n: honest for few pairs, and wider than 0 when there are none."""
    delta = (gained - lost) / n

    def statistic(shift: float) -> float:
        b = -gained - lost + (2 * n - gained + lost) * shift
        c = -lost * shift * (1 - shift)
        share_lost = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * share_lost + shift * (1 - shift))
        excess = gained - lost - n * shift
        return math.copysign(math.inf, excess) if variance <= 0 else excess / math.sqrt(variance)

    def root(low: float, high: float, target: float) -> float:
        for _ in range(60):  # the statistic falls as the shift rises
            middle = (low + high) / 2
            low, high = (middle, high) if statistic(middle) > target else (low, middle)
        return (low + high) / 2

    return (root(-1.0, delta, Z) if delta > -1 else -1.0), (root(delta, 1.0, -Z) if delta < 1 else 1.0)


def conditional_interval(n: int, gained: int, lost: int) -> Interval:
    """95 % Clopper-Pearson interval of gained among discordant pairs, as a delta; it holds 0 whenever McNemar's p >= 0.05."""
    m = gained + lost

    def root(successes: int, upper: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            below = _binomial(m, middle).at_most(successes)  # falls as the share rises
            too_low = below > LEVEL / 2 if upper else below > 1 - LEVEL / 2
            low, high = (middle, high) if too_low else (low, middle)
        return (low + high) / 2

    share_low = root(gained - 1, upper=False) if gained else 0.0
    share_high = root(gained, upper=True) if lost else 1.0
    return (2 * share_low - 1) * m / n, (2 * share_high - 1) * m / n


def exact_interval(n: int, gained: int, lost: int) -> Interval:
    """95 % interval for few discordant pairs: from the lower to the upper of the score and the conditional interval.

    The score interval covers where no normal approximation does; the conditional one keeps it from contradicting the exact
    test, which with 4 gained and none lost says p = 0.125 where the score interval alone would leave 0 out.
    """
    score, conditional = score_interval(n, gained, lost), conditional_interval(n, gained, lost)
    return min(score[0], conditional[0]), max(score[1], conditional[1])


def paired_bootstrap(n: int, gained: int, lost: int, draws: int = DRAWS, seed: int = 0) -> Interval:
    """95 % percentile interval of the paired bootstrap: questions drawn with replacement, each keeping its pair of answers.

    A resample's delta depends only on how many gained and lost questions it holds. Drawing n questions with replacement
    makes those two counts multinomial with the observed shares, so drawing the counts is drawing the questions: first how
    many of the n are discordant (binomial), then how many of these are gained (binomial).
    """
    discordant = gained + lost
    if discordant == 0:
        return 0.0, 0.0
    rng = random.Random(seed)
    how_many = _binomial(n, discordant / n)
    split: dict[int, _Binomial] = {}
    deltas = []
    for _ in range(draws):
        m = how_many.drawn(rng.random())
        if m not in split:
            split[m] = _binomial(m, gained / discordant)
        deltas.append(2 * split[m].drawn(rng.random()) - m)
    deltas.sort()
    cut = int(draws * LEVEL / 2)
    return deltas[cut] / n, deltas[draws - 1 - cut] / n


def smallest_detectable(n: int, discordant_rate: float, power: float = POWER) -> float | None:
    """The delta that n questions show with the given power at the 5 % level, about 2.8 sqrt(rate / n) at 80 %.

    Never below 8 of n: the exact test needs 6 gains without a loss, and 8 expected gains bring 6 or more in 81 % of samples.
    None when n is below 6, so that nothing could be shown.
    """
    if n < 6:
        return None
    return min(1.0, max((Z + NormalDist().inv_cdf(power)) * math.sqrt(discordant_rate / n), 8 / n))


def paired(base: Sequence[bool], tuned: Sequence[bool]) -> Paired:
    """The paired comparison of two models' right and wrong answers, question by question; ValueError if they do not pair."""
    if len(base) != len(tuned) or not base:
        raise ValueError(f"paired answers of {len(base)} and {len(tuned)} questions")
    pairs = [(bool(a), bool(b)) for a, b in zip(base, tuned, strict=True)]
    return paired_counts(
        both=pairs.count((True, True)),
        gained=pairs.count((False, True)),
        lost=pairs.count((True, False)),
        neither=pairs.count((False, False)),
    )


def paired_counts(both: int, gained: int, lost: int, neither: int) -> Paired:
    """The paired comparison from the 2x2 table itself."""
    n = both + gained + lost + neither
    delta, se = (gained - lost) / n, paired_se(n, gained, lost)
    few = min(gained + lost, n - abs(gained - lost)) < FEW
    return Paired(
        n=n,
        both=both,
        gained=gained,
        lost=lost,
        neither=neither,
        delta=delta,
        se=se,
        interval=exact_interval(n, gained, lost) if few or se is None else (delta - Z * se, delta + Z * se),
        method="exact" if few else "normal",
        bootstrap=paired_bootstrap(n, gained, lost),
        p=mcnemar_exact(gained, lost),
        smallest_detectable=smallest_detectable(n, (gained + lost) / n),
    )


def clustered(answers: Sequence[Sequence[bool]]) -> Mean:
    """Accuracy over k sampled answers a question, the question as the unit: its samples are no independent evidence.

    The interval is Wilson's at the effective number of questions p(1-p)/se², so it stays within 0 and 1.
    """
    means = [sum(map(bool, row)) / len(row) for row in answers]
    n, mean = len(means), math.fsum(means) / len(means)
    se = _mean_se(means, mean)
    effective = mean * (1 - mean) / (se * se) if se else n
    return Mean(n, mean, se, wilson(mean * effective, effective))


def paired_mean(differences: Sequence[float]) -> Mean:
    """Mean of one difference a question (each in -1..1), with a normal 95 % interval and p against 0.

    With few questions that differ, p is that of the exact sign-flip test, which is McNemar's when all differences are -1, 0 or
    1. Without any spread the interval opens by z²/(n+z²), as the score interval does for no discordant pairs.
    """
    n, mean = len(differences), math.fsum(differences) / len(differences)
    se = _mean_se(differences, mean)
    half = Z * se if se else Z * Z / (n + Z * Z)
    interval = max(-1.0, mean - half), min(1.0, mean + half)
    moved = [d for d in differences if d]
    if not se or len(moved) < FEW:
        return Mean(n, mean, se, interval, sign_flip_exact(moved))
    return Mean(n, mean, se, interval, 2 * NormalDist().cdf(-abs(mean) / se))


def sign_flip_exact(differences: Sequence[float]) -> float:
    """Two-sided p that the sum is as far from 0 when each difference's sign is a fair coin's throw; 1 when there are none."""
    if len({abs(d) for d in differences}) == 1:  # however many there are
        return mcnemar_exact(sum(d > 0 for d in differences), sum(d < 0 for d in differences))
    observed = abs(math.fsum(differences)) - 1e-7  # sums of the same shares in another order count as far
    if observed <= 0:
        return 1.0
    # each sum is one of the one half's and one of the other's: 2 * 4,096 for 24, not 16 million
    half = len(differences) // 2
    one, other = _flipped(differences[:half]), sorted(_flipped(differences[half:]))
    far = sum(bisect_right(other, -observed - s) + len(other) - bisect_left(other, observed - s) for s in one)
    return far / 2 ** len(differences)


def _flipped(differences: Sequence[float]) -> list[float]:
    """The sum under each choice of signs."""
    sums = [0.0]
    for d in differences:
        sums = [s + step for s in sums for step in (d, -d)]
    return sums


def _mean_se(values: Sequence[float], mean: float) -> float | None:
    n = len(values)
    if n < 2:
        return None
    if min(values) == max(values):
        return 0.0
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n * (n - 1)))


@dataclass(frozen=True)
class _Binomial:
    """P(X <= k) for k = first, first + 1, ...; ends in 1 exactly, so that a search in it always finds a place."""

    first: int
    cdf: list[float]

    def at_most(self, k: int) -> float:
        """P(X <= k)."""
        return 0.0 if k < self.first else self.cdf[min(k - self.first, len(self.cdf) - 1)]

    def drawn(self, uniform: float) -> int:
        """The draw that belongs to a number in [0, 1)."""
        return self.first + bisect_left(self.cdf, uniform)


def _binomial(n: int, p: float) -> _Binomial:
    """Successes of n throws, without the tails: beyond 10 standard deviations and 40 lies less than 1e-21 (Bernstein)."""
    if p >= 1:
        return _Binomial(n, [1.0])
    log_p, log_q, top = math.log(p) if p > 0 else -math.inf, math.log1p(-p), math.lgamma(n + 1)
    reach = 10 * math.sqrt(n * p * (1 - p)) + 40
    first, last = max(0, math.floor(n * p - reach)), min(n, math.ceil(n * p + reach))
    mass = [
        math.exp(top - math.lgamma(k + 1) - math.lgamma(n - k + 1) + (k * log_p if k else 0.0) + (n - k) * log_q)
        for k in range(first, last + 1)
    ]
    cdf = list(accumulate(mass))
    cdf[-1] = 1.0
    return _Binomial(first, cdf)
