"""The word of diagnosis for each window of training, and whether the reward agrees with the evaluation."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats as scipy_stats

from grpo_portable.scores import windows


def run_of(rewards, **every):
    return [{"step": i + 1, "reward": r, **every} for i, r in enumerate(rewards)]


def noisy(levels, noise=0.05, seed=0):
    rng = random.Random(seed)
    return [level + rng.gauss(0, noise) for level in levels]


def words(steps):
    return [w.word for w in windows.windows(steps)]


def test_climbing_then_flat():
    steps = run_of(noisy([0.5 + 0.01 * i for i in range(40)] + [0.9] * 40))
    found = words(steps)
    assert set(found[1:4]) == {"climbing"}
    assert found[-1] == "flat"
    assert windows.whole(steps).word == "climbing"


def test_noise_alone_is_flat():
    """The word claims a trend at the 5 % level, so about one window in twenty may; over many runs no more than that."""
    found = [word for seed in range(40) for word in words(run_of(noisy([1.0] * 80, 0.1, seed)))]
    assert sum(word != "flat" for word in found) / len(found) < 0.10


def test_collapsing_and_falling():
    up = [0.5 + 0.01 * i for i in range(40)]
    assert words(run_of(noisy(up + [0.3] * 10)))[-1] == "collapsing"
    assert words(run_of(noisy(up + [0.9 - 0.005 * i for i in range(30)])))[-1] == "falling"


def test_recovery_after_a_collapse_is_climbing_again():
    levels = [0.9] * 20 + [0.2 + 0.02 * i for i in range(30)]
    assert words(run_of(noisy(levels, 0.02)))[-1] == "climbing"


def test_negative_rewards_climb_too():
    """As the tag rewards of small models: -7.5 at the start, +6.4 at the end."""
    steps = run_of(noisy(np.linspace(-7.5, 6.4, 100), 0.8))
    assert set(words(steps)) == {"climbing"}


@pytest.mark.parametrize(
    ("every", "word"),
    [
        ({"truncated": 0.7}, "truncating"),
        ({"zero_spread": 0.95}, "no spread"),
        ({"skipped": True}, "skipping"),
        ({"truncated": 0.7, "zero_spread": 0.95, "skipped": True}, "skipping"),
        ({"truncated": None, "zero_spread": math.nan}, "flat"),
    ],
)
def test_vital_signs_come_before_the_trend(every, word):
    assert words(run_of([1.0] * 10, **every)) == [word, word]


def test_no_reward_recorded():
    assert words([{"step": 1}, {"step": 2, "reward": None}]) == ["unknown"]
    assert windows.windows([]) == []
    assert windows.whole([]) is None


@pytest.mark.parametrize(
    ("steps", "size"), [(1, 5), (36, 5), (40, 5), (41, 10), (100, 20), (150, 20), (160, 20), (500, 100), (9000, 1125)]
)
def test_windows_have_round_sizes(steps, size):
    assert windows.window_size(steps) == size


@pytest.mark.parametrize("n", [1, 2, 3, 7, 11, 36, 41, 150, 333])
def test_windows_hold_every_step_once(n):
    found = windows.windows(run_of([1.0] * n))
    assert found[0].first == 1
    assert found[-1].last == n
    assert all(a.last + 1 == b.first for a, b in pairwise(found))
    assert len(found) <= 8


def test_window_numbers_are_means_and_memory_is_the_peak():
    steps = [
        {"step": i, "reward": i, "loss": 1, "memory_gib": i, "step_s": None, "truncated": 0.1 * i} for i in (1, 2, 3)
    ]
    (window,) = windows.windows(steps)
    assert (window.reward, window.memory_gib, window.step_s, window.zero_spread) == (2, 3, None, None)
    assert window.truncated == pytest.approx(0.2)


def test_a_step_written_twice_counts_last():
    records = [
        {"step": 1, "reward": 1},
        {"step": 3, "reward": 0},
        {"step": 2, "reward": 2},
        {"step": 3, "reward": 9},
        {"x": 1},
    ]
    assert [r["reward"] for r in windows.steps_in_order(records)] == [1, 2, 9]


def test_trend_is_least_squares():
    xs, ys = list(range(30)), noisy([0.02 * i for i in range(30)], 0.1)
    slope, t, _ = windows.trend(xs, ys)
    theirs = scipy_stats.linregress(xs, ys)
    assert slope == pytest.approx(theirs.slope)
    assert t == pytest.approx(theirs.slope / theirs.stderr)
    assert windows.trend([1, 2, 3, 4], [1, 2, 3, 4])[1] == math.inf
    assert windows.trend([1, 2, 3, 4], [5, 5, 5, 5])[:2] == (0, 0)


@pytest.mark.parametrize("degrees", [2, 3, 4, 5, 8, 13, 40, 200])
def test_trend_limit_is_students(degrees):
    n = degrees + 2
    assert windows.trend(range(n), noisy([0.0] * n))[2] == pytest.approx(scipy_stats.t.ppf(0.975, degrees), abs=0.2)


def correctness(levels):
    return [{"step": i + 1, "reward": v, "rewards": {"correctness": v}} for i, v in enumerate(levels)]


def scored(verdict):
    return {"against": "base", "verdict": verdict}


@pytest.mark.parametrize(
    ("levels", "verdict", "word"),
    [
        (np.linspace(0.4, 0.8, 40), "higher", "agree"),
        ([0.6] * 40, "not shown to differ", "agree"),
        (np.linspace(0.8, 0.4, 40), "lower", "agree"),
        (np.linspace(0.4, 0.8, 40), "not shown to differ", "training only"),
        ([0.6] * 40, "higher", "evaluation only"),
        (np.linspace(0.4, 0.8, 40), "lower", "opposite"),
    ],
)
def test_reward_against_accuracy(levels, verdict, word):
    found = windows.agreement(correctness(noisy(levels, 0.02)), scored(verdict))
    assert found.word == word


def test_agreement_by_hand():
    found = windows.agreement(correctness([0.2, 0.4] * 10 + [0.6, 0.8] * 10), scored("higher"))
    assert (found.steps, found.start, found.end) == (5, pytest.approx(0.28), pytest.approx(0.72))


def test_agreement_needs_something_to_agree():
    assert windows.agreement(correctness([0.5] * 9), scored("higher")) is None
    assert windows.agreement(correctness([5.0] * 40), scored("higher")) is None
    assert windows.agreement(run_of([0.5] * 40), scored("higher")) is None
    assert windows.agreement(correctness([0.5] * 40), {"against": None}) is None


def test_a_step_whose_rewards_are_no_table_has_no_components():
    steps = [{"step": 1, "reward": 0.5, "rewards": 1.0}, {"step": 2, "reward": 0.5, "rewards": {"correctness": 0.25}}]
    assert windows.reward_names(steps) == ["correctness"]
    assert windows.series(steps, windows.component("correctness")) == ([2], [0.25])
