"""Rewards that fail, and the advantages of what is left: nothing moves but the sample at fault."""

import asyncio
import math

import pytest

from grpo_portable.errors import RewardError
from grpo_portable.rewards.advantages import group_advantages, total
from grpo_portable.rewards.faults import FaultCounter, guarded


def run(fn: object, n: int = 4, **columns: object) -> tuple[list[float | None], list[tuple[str, int, str]]]:
    faults: list[tuple[str, int, str]] = []
    guard = guarded(fn, lambda *fault: faults.append(fault))  # type: ignore[arg-type]
    return guard(prompts=["q"] * n, completions=list(range(n)), **columns), faults


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (None, "returned None"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        (-float("inf"), "returned -inf"),
        (1e39, "returned 1e+39"),  # infinite in float32
        (10**400, "OverflowError"),
        ("1.0", "returned str"),
        ([1.0], "returned list"),
    ],
)
def test_a_bad_value_costs_its_sample_only(bad: object, reason: str) -> None:
    values, faults = run(lambda prompts, completions, **_: [1.0, bad, 0, True])
    assert values == [1.0, None, 0.0, 1.0]
    assert [(index, reason in why) for _, index, why in faults] == [(1, True)]


def test_a_reward_that_raises_costs_the_samples_at_fault_only() -> None:
    def picky(prompts: list, completions: list, gold: list, **_: object) -> list[float]:
        if 2 in completions:
            raise ValueError("two\nis too much")
        return [float(g) for g in gold]

    values, faults = run(picky, gold=[10, 11, 12, 13])
    assert values == [10.0, 11.0, None, 13.0]
    assert faults == [("picky", 2, "raised ValueError: two is too much")]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), "raised SystemExit: 3"),
        (asyncio.CancelledError(), "raised CancelledError: "),
        (GeneratorExit(), "raised GeneratorExit: "),
    ],
)
def test_a_reward_that_would_end_the_process_is_at_fault_like_any_other(error: BaseException, told: str) -> None:
    def leaves(completions: list, **_: object) -> list[float]:
        if 2 in completions:
            raise error
        return [1.0] * len(completions)

    async def leaves_later(completions: list, **_: object) -> list[float]:
        return leaves(completions)

    for reward in (leaves, leaves_later):
        values, faults = run(reward)
        assert values == [1.0, 1.0, None, 1.0]
        assert [(index, why) for _, index, why in faults] == [(2, told)]


def test_an_error_that_cannot_be_told_is_a_fault_like_any_other() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def raises(**_: object) -> list[float]:
        raise Mute

    values, faults = run(raises, n=1)
    assert values == [None]
    assert faults == [("raises", 0, "raised Mute: (an error that cannot be told)")]


def test_what_a_reward_does_to_its_lists_the_next_one_does_not_see() -> None:
    def takes_all(completions: list, gold: list, **_: object) -> list[float]:
        gold.sort()
        return [float(completions.pop(0)) for _ in range(2)]

    completions, gold = [1, 2], ["b", "a"]
    values = guarded(takes_all, lambda *_: None)(prompts=["q"] * 2, completions=completions, gold=gold)
    assert (values, completions, gold) == ([1.0, 2.0], [1, 2], ["b", "a"])


def test_a_wish_to_stop_is_no_fault_of_the_reward() -> None:
    def stopped(**_: object) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stopped)


def test_a_value_may_raise_anything_when_it_is_made_a_number() -> None:
    class Odd:
        def __float__(self) -> float:
            raise KeyError("x")

    values, faults = run(lambda completions, **_: [1.0, Odd(), 1.0, 1.0])
    assert values == [1.0, None, 1.0, 1.0] and "KeyError" in faults[0][2]


def test_a_reward_of_the_wrong_length_is_asked_again_for_each_sample() -> None:
    values, faults = run(lambda completions, **_: [1.0 for c in completions if c != 1])
    assert values == [1.0, None, 1.0, 1.0]
    assert faults[0][1:] == (1, "returned 0 rewards for 1 completions")


def test_a_reward_that_needs_the_whole_batch_loses_the_whole_batch() -> None:
    def ranks(completions: list, **_: object) -> list[float]:
        raise RuntimeError("no")

    ranks.whole_batch = True  # type: ignore[attr-defined]
    values, faults = run(ranks)
    assert values == [None] * 4
    assert len(faults) == 4


def test_a_reward_gets_the_columns_it_names_and_keeps_its_name() -> None:
    def fixed(completions: list, gold: list) -> list[float]:
        return [1.0] * len(completions)

    async def later(completions: list, **_: object) -> list[float]:
        return [2.0] * len(completions)

    class Model:
        def __call__(self, completions: list, **_: object) -> list[float]:
            return [3.0] * len(completions)

    assert run(fixed, gold=[1] * 4, level=["easy"] * 4)[0] == [1.0] * 4
    assert run(later)[0] == [2.0] * 4
    assert run(Model())[0] == [3.0] * 4
    assert guarded(fixed, print).__name__ == "fixed"
    assert guarded(Model(), print).__name__ == "Model"


def test_torch_scalars_are_numbers() -> None:
    torch = pytest.importorskip("torch")
    values, faults = run(lambda completions, **_: torch.tensor([0.5, float("nan"), 1.0, 2.0]))
    assert values == [0.5, None, 1.0, 2.0]
    assert [index for _, index, _ in faults] == [1]


def test_five_percent_of_a_step_may_fail_and_no_more() -> None:
    counter = FaultCounter()
    for index in (3, 3, 7):  # two rewards fail on the same sample: one sample
        counter.record("mine", index, "returned nan")
    assert counter.end_step(40) == ["`mine` returned nan (3 x)"]
    assert counter.end_step(40) == []
    assert counter.total == 2
    for index in range(3):
        counter.record("mine", index, "raised ValueError: no")
    with pytest.raises(RewardError) as error:
        counter.end_step(40)
    assert error.value.fact == "3 of 40 completions of a step could not be scored"
    assert error.value.because == "`mine` raised ValueError: no (3 x)"
    assert error.value.help


def test_advantages_by_hand() -> None:
    # rewards 1 0 0 1: mean 1/2, std (n - 1) sqrt(1/3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert group_advantages([1.0, 0.0, 0.0, 1.0], 4) == pytest.approx([expected, -expected, -expected, expected])
    assert group_advantages([1.0, 0.0, 0.0, 1.0], 4, "none") == [0.5, -0.5, -0.5, 0.5]


def test_an_unscored_sample_moves_nobody() -> None:
    without = group_advantages([1.0, 0.0, 0.0, 1.0], 4)
    for hole in (None, float("nan"), float("inf"), -float("inf")):
        with_hole = group_advantages([1.0, hole, 0.0, 0.0, hole, 1.0], 6)
        assert [with_hole[i] for i in (0, 2, 3, 5)] == without
        assert (with_hole[1], with_hole[4]) == (0.0, 0.0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_without_signal_get_zero(scale: str) -> None:
    rewards = [0.1] * 4 + [None] * 4 + [1.0, None, None, None] + [0.0, 1.0, 0.0, 1.0]
    advantages = group_advantages(rewards, 4, scale)
    assert advantages[:12] == [0.0] * 12
    assert all(advantages[12:])


def test_batch_scale_divides_by_the_spread_of_all_scored() -> None:
    advantages = group_advantages([0.0, 1.0, None, 4.0, 4.0, 4.0], 3, "batch")
    scored = [0.0, 1.0, 4.0, 4.0, 4.0]
    mean = sum(scored) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in scored) / 4)
    assert advantages == pytest.approx([-0.5 / (std + 1e-4), 0.5 / (std + 1e-4), 0, 0, 0, 0])


def test_a_partly_scored_sample_is_not_compared() -> None:
    assert total([[1.0, None, 0.0, 1.0], [0.25, 0.25, float("nan"), float("inf")]]) == [1.25, None, None, None]
    assert total([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.5]) == [2.5, 4.0]


@pytest.mark.parametrize(
    ("rewards", "size", "scale"), [([1.0] * 5, 2, "group"), ([1.0] * 4, 2, "other"), ([1.0], 0, "group")]
)
def test_advantages_refuse_what_cannot_be(rewards: list, size: int, scale: str) -> None:
    with pytest.raises(ValueError):
        group_advantages(rewards, size, scale)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl_once_partly_scored_rows_are_emptied(scale: str) -> None:
    """TRL leaves out rows in which every reward is NaN, so emptying partly scored rows is all that its trainer lacks."""
    torch = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    nan = float("nan")
    columns = [[1.0, 0.0, nan, 1.0, 0.0, 0.0, 1.0, nan], [0.25, 0.25, 0.25, 0.0, nan, 0.25, 0.0, nan]]
    rows = torch.tensor(columns).T.clone()
    rows[rows.isnan().any(dim=1)] = nan
    rewards = rows.nansum(dim=1)
    rewards[rows.isnan().all(dim=1)] = nan
    grouped = rewards.view(-1, 4)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(4)
    std = nanstd(rewards).expand(8) if scale == "batch" else nanstd(grouped, dim=1).repeat_interleave(4)
    theirs = torch.nan_to_num((rewards - mean) / (1.0 if scale == "none" else std + 1e-4), nan=0.0)
    assert group_advantages(total(columns), 4, scale) == pytest.approx(theirs.tolist(), abs=1e-5)
