"""Statistics against hand computations, statsmodels, scipy, numpy and brute force."""

from __future__ import annotations

import math
import random
import time
import tracemalloc
from itertools import product

import numpy as np
import pytest
import spent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from grpo_portable.scores import stats

counts = st.integers(0, 400)


def test_worked_example():
    """b=60 lost, c=90 gained, n=1319, by hand: delta 30/1319, SE sqrt((150 - 900/1319)/(1319*1318))."""
    p = stats.paired_counts(both=500, gained=90, lost=60, neither=669)
    assert p.n == 1319
    assert p.delta == pytest.approx(0.0227, abs=5e-5)
    assert p.se == pytest.approx(0.0093, abs=5e-5)
    assert p.interval == pytest.approx((0.0046, 0.0409), abs=5e-5)
    assert p.bootstrap == pytest.approx((0.0045, 0.0409), abs=4e-4)  # a resample's delta moves in steps of 1/1319
    assert p.p == pytest.approx(0.018, abs=5e-4)
    assert p.method == "normal"
    assert p.verdict == "higher"


@pytest.mark.parametrize(
    ("n", "rate", "points"), [(1319, 0.05, 1.72), (1319, 0.10, 2.44), (1319, 0.20, 3.45), (200, 0.20, 8.86)]
)
def test_smallest_detectable_table(n, rate, points):
    """(1.9600 + 0.8416) sqrt(rate/n)."""
    found = stats.smallest_detectable(n, rate)
    assert found is not None
    assert 100 * found == pytest.approx(points, abs=0.006)


def test_smallest_detectable_is_never_less_than_the_exact_test_can_show():
    assert stats.smallest_detectable(5, 1.0) is None
    assert stats.smallest_detectable(300, 0.0) == 8 / 300
    assert stats.mcnemar_exact(6, 0) < 0.05 < stats.mcnemar_exact(5, 0)
    assert scipy_stats.poisson.sf(5, 8) > 0.8


@pytest.mark.parametrize(
    ("n", "rate"),
    [(200, 0.2), (400, 0.1), (1319, 0.05)],
)
def test_smallest_detectable_has_the_power_it_claims(n, rate):
    """Draw data sets with a true delta of that size: the test shows about 80 % of them."""
    rng = np.random.default_rng(1)
    delta = stats.smallest_detectable(n, rate)
    draws = rng.multinomial(n, [(rate + delta) / 2, (rate - delta) / 2, 1 - rate], size=1500)
    shown = np.mean([abs(c - b) / math.sqrt(c + b - (c - b) ** 2 / n) > stats.Z for c, b, _ in draws])
    assert shown == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (1, 1, 1.0), (3, 1, 0.625)]
)
def test_mcnemar_by_hand(gained, lost, p):
    assert stats.mcnemar_exact(gained, lost) == p


@given(counts, counts)
@settings(max_examples=150, deadline=None)
def test_mcnemar_is_statsmodels_and_scipy(gained, lost):
    ours = stats.mcnemar_exact(gained, lost)
    theirs = min(1.0, mcnemar([[7, lost], [gained, 9]], exact=True).pvalue) if gained + lost else 1.0
    assert ours == pytest.approx(theirs, rel=1e-9)
    if gained + lost:
        assert ours == pytest.approx(scipy_stats.binomtest(gained, gained + lost).pvalue, rel=1e-9)


def test_mcnemar_of_many_pairs_is_finite_and_fast():
    with spent.at_most(5):
        assert 0 <= stats.mcnemar_exact(60_000, 40_000) < 1e-300
        assert stats.mcnemar_exact(50_000, 50_000) == 1.0


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@settings(max_examples=200, deadline=None)
def test_wilson_is_statsmodels(kn):
    k, n = kn
    low, high = stats.wilson(k, n)
    assert (low, high) == pytest.approx(proportion_confint(k, n, method="wilson"), abs=1e-12)
    assert 0 <= low <= k / n <= high <= 1


def test_wilson_by_hand():
    """0 of 10: upper z²/(n+z²) = 3.8415/13.8415."""
    assert stats.wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert stats.wilson(0, 0) == (0.0, 1.0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=120))
@settings(max_examples=150, deadline=None)
def test_paired_table_and_symmetry(pairs):
    base, tuned = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = stats.paired(base, tuned), stats.paired(tuned, base)
    assert there.both + there.gained + there.lost + there.neither == there.n == len(pairs)
    assert there.delta == pytest.approx(sum(tuned) / len(pairs) - sum(base) / len(pairs))
    assert (there.gained, there.lost, there.p) == (back.lost, back.gained, back.p)
    assert there.interval == pytest.approx((-back.interval[1], -back.interval[0]), abs=1e-9)
    assert -1 <= there.interval[0] <= there.delta <= there.interval[1] <= 1
    assert there.interval[0] < there.interval[1]
    if len(pairs) > 1:
        assert there.se == pytest.approx(np.std(np.subtract(tuned, base, dtype=float), ddof=1) / math.sqrt(len(pairs)))


def test_paired_refuses_what_is_not_paired():
    with pytest.raises(ValueError, match="2 and 1"):
        stats.paired([True, False], [True])
    with pytest.raises(ValueError, match="0 and 0"):
        stats.paired([], [])


def test_score_interval_published():
    """Airway reactivity before and after transplantation, 1/1/7/12 of 21 (Fagerland et al. 2014): Tango -0.517 to -0.026."""
    assert stats.score_interval(21, gained=1, lost=7) == pytest.approx((-0.517, -0.026), abs=5e-4)


@given(st.integers(0, 24), st.integers(0, 24), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_few_pairs_never_contradict_the_exact_test(gained, lost, rest):
    if not 0 < gained + lost < stats.FEW:
        return
    n = gained + lost + rest
    pair = stats.paired_counts(rest, gained, lost, 0)
    assert pair.method == "exact"
    assert (pair.interval[0] <= 0 <= pair.interval[1]) or pair.p < 0.05
    exact = scipy_stats.binomtest(gained, gained + lost).proportion_ci(0.95, "exact")
    ours = stats.conditional_interval(n, gained, lost)
    assert ours == pytest.approx(tuple((2 * share - 1) * (gained + lost) / n for share in exact), abs=1e-9)


def test_score_interval_without_discordant_pairs_is_not_empty():
    """Nothing changed on 300 questions: the true delta may still be up to z²/(n+z²) either way."""
    bound = 3.841459 / 303.841459
    assert stats.score_interval(300, 0, 0) == pytest.approx((-bound, bound), abs=1e-6)


@pytest.mark.parametrize(("n", "gained", "lost"), [(40, 6, 1), (40, 0, 3), (120, 9, 9), (15, 15, 0), (60, 20, 4)])
def test_score_interval_inverts_the_score_test(n, gained, lost):
    """At each bound, the score statistic with the other cell probability fitted by grid search is z."""

    def score(delta):
        # share lost; share gained is this + delta
        grid = np.linspace(max(0.0, -delta) + 1e-9, (1 - delta) / 2 - 1e-9, 200_001)
        rest = 1 - 2 * grid - delta
        likelihood = gained * np.log(grid + delta) + lost * np.log(grid) + (n - gained - lost) * np.log(rest)
        share_lost = grid[np.argmax(likelihood)]
        return (gained - lost - n * delta) / math.sqrt(n * (2 * share_lost + delta - delta * delta))

    low, high = stats.score_interval(n, gained, lost)
    assert score(low) == pytest.approx(stats.Z, abs=0.01)
    if high < 1:
        assert score(high) == pytest.approx(-stats.Z, abs=0.01)


@pytest.mark.parametrize(("up", "down"), [(0.05, 0.05), (0.15, 0.02), (0.01, 0.0)])
def test_interval_covers_for_small_samples(up, down):
    """Exact coverage over every table of 50 questions: near 95 %, where the plain normal interval falls far short."""
    n, covered = 50, 0.0
    for c in range(n + 1):
        for b in range(n + 1 - c):
            mass = scipy_stats.multinomial.pmf([c, b, n - b - c], n, [up, down, 1 - up - down])
            if mass < 1e-9:
                continue
            low, high = stats.exact_interval(n, c, b)
            covered += mass * (low <= up - down <= high)
    assert covered > 0.93


@pytest.mark.parametrize(("n", "gained", "lost"), [(300, 92, 16), (1319, 90, 60), (50, 7, 3)])
def test_bootstrap_of_counts_is_the_bootstrap_of_questions(n, gained, lost):
    rng = np.random.default_rng(0)
    differences = np.repeat([1, -1, 0], [gained, lost, n - gained - lost])
    deltas = np.array([differences[rng.integers(0, n, n)].mean() for _ in range(10_000)])
    low, high = stats.paired_bootstrap(n, gained, lost)
    assert low == pytest.approx(np.quantile(deltas, 0.025), abs=2.5 / n)
    assert high == pytest.approx(np.quantile(deltas, 0.975), abs=2.5 / n)


def test_bootstrap_is_seeded_and_fast():
    with spent.at_most(3):
        assert stats.paired_bootstrap(1319, 300, 250) == stats.paired_bootstrap(1319, 300, 250)
    assert stats.paired_bootstrap(30, 0, 0) == (0.0, 0.0)


def test_a_hundred_thousand_questions_take_seconds_and_little_memory():
    tracemalloc.start()
    start = time.process_time()
    low, high = stats.paired_bootstrap(100_000, 10_000, 9_000)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    se = stats.paired_se(100_000, 10_000, 9_000)
    assert (low, high) == pytest.approx((0.01 - 1.96 * se, 0.01 + 1.96 * se), abs=0.1 * se)
    assert seconds < 60 and peak < 200 * 2**20  # with whole tables: 400 MiB, and a hundred times the seconds


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (40, 0.02), (3000, 0.3), (100_000, 0.999), (100_000, 1e-5)])
def test_a_binomial_without_its_tails_is_one(n, p):
    ours = stats._binomial(n, p)
    middle = round(n * p)
    for k in {0, 1, max(0, middle - 2), middle, min(n, middle + 3), n}:
        assert ours.at_most(k) == pytest.approx(scipy_stats.binom.cdf(k, n, p), abs=1e-9)
    for uniform in (0.0, 1e-12, 0.3, 1 - 1e-12):
        k = ours.drawn(uniform)
        assert ours.at_most(k - 1) < uniform <= ours.at_most(k) or (uniform == 0.0 and k == ours.first)


def test_verdict_needs_both_interval_and_exact_test():
    assert stats.verdict(0.1, (0.01, 0.2), 0.01) == "higher"
    assert stats.verdict(-0.1, (-0.2, -0.01), 0.01) == "lower"
    assert stats.verdict(0.1, (-0.01, 0.2), 0.01) == "not shown to differ"
    assert stats.verdict(0.1, (0.01, 0.2), 0.06) == "not shown to differ"
    assert stats.paired_counts(20, 5, 0, 5).verdict == "not shown to differ"  # 5 : 0 is p = 0.0625


def test_clustered_of_one_sample_is_the_plain_accuracy():
    answers = [[True]] * 60 + [[False]] * 40
    mean = stats.clustered(answers)
    assert (mean.n, mean.mean) == (100, 0.6)
    assert mean.se == pytest.approx(math.sqrt(0.6 * 0.4 / 99))
    assert mean.interval == pytest.approx(stats.wilson(0.6 * 99, 99))


def test_clustered_samples_of_a_question_are_not_independent():
    """Eight samples that always agree say no more than one does; samples that vary within the question say more."""
    agreeing = stats.clustered([[True] * 8] * 60 + [[False] * 8] * 40)
    varying = stats.clustered([[True] * 5 + [False] * 3] * 50 + [[True] * 4 + [False] * 4] * 50)
    assert agreeing.se == pytest.approx(stats.clustered([[True]] * 60 + [[False]] * 40).se)
    assert varying.se < agreeing.se / 3
    assert stats.clustered([[True] * 4] * 30).interval == pytest.approx(stats.wilson(30, 30))


def test_paired_mean_by_hand():
    """0.5, 0, -0.25, 0.75: mean 0.25, variance 0.625/3, SE sqrt(0.625/12); 4 of 8 sign patterns sum to 1 or more either way."""
    mean = stats.paired_mean([0.5, 0.0, -0.25, 0.75])
    assert mean.mean == 0.25
    assert mean.se == pytest.approx(math.sqrt(0.625 / 12))
    assert mean.p == 0.5


def test_paired_mean_of_many_is_normal():
    differences = [0.5, -0.25] * 40
    mean = stats.paired_mean(differences)
    assert mean.p == pytest.approx(2 * scipy_stats.norm.sf(0.125 / (np.std(differences, ddof=1) / math.sqrt(80))))


@given(st.integers(0, 12), st.integers(0, 12))
def test_sign_flip_of_ones_is_mcnemar(gained, lost):
    assert stats.sign_flip_exact([1.0] * gained + [-1.0] * lost) == pytest.approx(stats.mcnemar_exact(gained, lost))


@given(st.lists(st.integers(-700, 700).map(lambda i: i / 700), min_size=1, max_size=9))
def test_sign_flip_counts_every_choice_of_signs(differences):
    far = abs(math.fsum(differences)) - 1e-7
    sums = [math.fsum(chosen) for chosen in product(*((d, -d) for d in differences))]
    assert stats.sign_flip_exact(differences) == pytest.approx(sum(abs(s) >= far for s in sums) / len(sums))


def test_sign_flip_of_unrelated_differences_takes_no_time():
    draw = random.Random(0)
    with spent.at_most(1.0):
        assert 0 < stats.sign_flip_exact([draw.gauss(0.2, 1) for _ in range(stats.FEW - 1)]) < 1


def test_paired_mean_without_spread():
    assert stats.paired_mean([0.0] * 50).p == 1.0
    assert stats.paired_mean([0.0] * 50).interval == pytest.approx(stats.score_interval(50, 0, 0))
    assert stats.paired_mean([0.5] * 3).p == 0.25
    assert stats.paired_mean([1.0] * 10_000).p == 0.0  # 2^-9999: every question gained, in no time
    assert stats.paired_mean([1.0]).se is None
