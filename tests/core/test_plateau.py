"""A reward that does not move is told once, with the cause that the records point to; one that rises is left alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from grpo_portable.training.plateau import EQUAL_STEPS, FLAT_STEPS, Plateau


def told(
    rewards: Iterable[float | None], *, spread: float = 0.0, truncated: float = 0.0, bootstrapped: bool = False
) -> list:
    """(step, sentence) of what is told over a run."""
    plateau, found = Plateau(bootstrapped=bootstrapped), []
    for step, reward in enumerate(rewards, 1):
        sentence = plateau.see({"step": step, "reward": reward, "zero_spread": spread, "truncated": truncated})
        if sentence:
            found.append((step, sentence))
    return found


def test_equal_rewards_that_pay_nothing_are_told_at_the_tenth_step_and_once() -> None:
    found = told([-7.5] * 40, spread=1.0)
    assert [step for step, _ in found] == [EQUAL_STEPS]
    assert "bootstrap missing?" in found[0][1]
    assert "-7.50" in found[0][1]
    assert told([0.0] * 40, spread=1.0)[0][0] == EQUAL_STEPS


def test_equal_rewards_that_pay_are_no_plateau() -> None:
    assert told([1.25] * 40, spread=1.0) == []
    assert told([0.0] * 40, spread=0.5) == []


def test_a_second_plateau_is_told_again() -> None:
    rewards = [0.0] * 15 + [0.5] + [0.0] * 15
    assert [step for step, _ in told(rewards, spread=1.0)] == [10, 26]


@pytest.mark.parametrize(
    ("rewards", "steps"),
    [
        ([-7.5 + 0.1 * (i % 3) for i in range(40)], [FLAT_STEPS]),
        ([-7.5 + 0.1 * i for i in range(40)], []),  # rises
        ([-1.0 + 0.2 * (i % 2) for i in range(19)] + [0.1] * 20, []),  # comes above zero in time
        ([-1.0 - 0.1 * i for i in range(25)], [FLAT_STEPS]),  # falls
        ([1.0] * 30, []),
    ],
)
def test_a_mean_below_zero_that_does_not_rise(rewards: list[float], steps: list[int]) -> None:
    assert [step for step, _ in told(rewards, spread=0.2)] == steps


def test_the_cause_is_read_from_the_records() -> None:
    assert "cut off" in told([-7.5] * 10, spread=1.0, truncated=0.9)[0][1]
    assert "too short" in told([-7.5] * 10, spread=1.0, bootstrapped=True)[0][1]


def test_later_updates_of_a_rollout_do_not_count_twice() -> None:
    assert told([-7.5, None] * 9, spread=1.0) == []
    assert [step for step, _ in told([-7.5, None] * 10, spread=1.0)] == [19]
