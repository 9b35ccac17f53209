"""Rewards: answer and format, hacks that must not be paid, the length penalty, rewards by name and of one's own."""

from fractions import Fraction
from pathlib import Path

import pytest

from grpo_portable.errors import RecipeError
from grpo_portable.rewards import NAMES, resolve, tags, verifiable
from grpo_portable.rewards.length import soft_overlong


def pay(name: str, text: object, gold: object = "18", style: str = "gsm8k_marker") -> float | None:
    (reward,) = resolve([name], style, max_completion_tokens=100)
    return reward(prompts=["q"], completions=[text], gold=[gold], completion_ids=[[0]])[0]


@pytest.mark.parametrize(
    ("text", "gold", "correct", "kept"),
    [
        ("9 * 2\n#### 18", "18", 1.0, 0.25),
        ("9 * 2\n#### 19", "18", 0.0, 0.25),
        ("9 * 2\n#### $18.00", "18", 1.0, 0.0),
        ("18", "18", 0.0, 0.0),
        ("#### 1234", "9 * 137 = 1,234\n#### 1,234", 1.0, 0.25),
        (None, "18", 0.0, 0.0),
        ([{"role": "assistant", "content": "#### 18"}], 18.0, 1.0, 0.25),
        ("#### 18", "none", None, 0.25),
        ("#### 18", None, None, 0.25),
    ],
)
def test_correctness_and_format_are_paid_apart(text: object, gold: object, correct: float | None, kept: float) -> None:
    assert pay("correctness", text, gold) == correct
    assert pay("marker_format", text, gold) == kept


def test_values_are_exact_in_binary_so_that_equal_rewards_have_no_spread() -> None:
    for value in (verifiable.CORRECT, verifiable.FORMAT, *vars(tags.B).values(), *vars(tags.C).values()):
        if isinstance(value, float):
            assert Fraction(value).denominator in (1, 2, 4)


HACKS = [
    ("every number that might be it", "#### 16 17 18 19 20"),
    ("a choice", "#### 18 or 19"),
    ("an early right answer, taken back", "#### 18\nNo:\n#### 5"),
    ("the answer only after the end token", "#### 5<|im_end|>\n#### 18"),
    ("nothing, then an end token, then the answer", "<|endoftext|>#### 18"),
    ("the instruction said again", "Give the result as #### <answer>"),
    ("the question said again, with an example of its own", "9 eggs.\n\nQuestion: 9 * 2?\nAnswer: #### 18"),
    ("an answer that is still being thought", "<think>#### 18"),
    ("a quoted answer", 'I could say "#### 18" but will not.'),
    ("an expression left to the grader", "#### 9*2"),
    ("an equation that ends right", "#### 5 = 18"),
    ("a bound", "#### >= 18"),
    ("a range", "#### 17-19"),
    ("digits of another script", "#### １８"),
]


@pytest.mark.parametrize(("hack", "text"), HACKS, ids=[hack for hack, _ in HACKS])
def test_hacks_are_not_paid(hack: str, text: str) -> None:
    assert pay("correctness", text) == 0.0


def test_several_markers_keep_the_answer_and_lose_the_format() -> None:
    text = "#### 18\nOnce more.\n#### 18"
    assert (pay("correctness", text), pay("marker_format", text)) == (1.0, 0.0)


# length


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_soft_overlong_punishment(tokens: int, value: float) -> None:
    assert soft_overlong(tokens, 100, 20) == value


def test_soft_overlong_punishment_of_the_paper() -> None:
    assert soft_overlong(16_384, 20_480, 4_096) == 0.0
    assert soft_overlong(18_432, 20_480, 4_096) == -0.5


def test_overlong_penalty_reads_the_tokens_that_the_trainer_hands_over() -> None:
    (reward,) = resolve(["overlong_penalty"], "free", max_completion_tokens=100)
    assert reward(prompts=["q"] * 2, completions=["a"] * 2, completion_ids=[[7] * 90, [7]], gold=["1"] * 2) == [
        -0.5,
        0.0,
    ]
    (reward,) = resolve(["overlong_penalty"], "free", max_completion_tokens=100, overlong_tokens=50)
    assert reward(prompts=["q"], completions=["a"], completion_ids=[[7] * 75]) == [-0.5]


@pytest.mark.parametrize(("limit", "soft"), [(None, None), (0, None), (10, 20)])
def test_overlong_penalty_without_a_fitting_limit_is_refused(limit: int | None, soft: int | None) -> None:
    with pytest.raises(RecipeError):
        resolve(["overlong_penalty"], "free", max_completion_tokens=limit, overlong_tokens=soft)


# names


def test_every_reward_has_its_name_and_takes_what_trl_passes() -> None:
    names = [name for name in NAMES if name != "symbolic_correctness"]
    for name, reward in zip(names, resolve(names, "tagged", max_completion_tokens=64), strict=True):
        assert reward.__name__ == name
        values = reward(
            prompts=["q"] * 2,
            completions=["a", "r<end_working_out><SOLUTION>2</SOLUTION>"],
            gold=["1", "2"],
            completion_ids=[[1], [2]],
            trainer_state=None,
            log_metric=print,
        )
        assert len(values) == 2
        assert all(isinstance(value, float) for value in values)


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(RecipeError) as error:
        resolve(["corectness"], "free")
    assert error.value.help == "did you mean `correctness`?"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(
        "def short(completions, **_):\n    return [-len(c) for c in completions]\nx = 1\n"
    )
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script.py FILE')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["own_rewards:short", "own_rewards.py:short"])
def test_a_reward_of_ones_own(own: Path, name: str) -> None:
    (reward,) = resolve([name], "free")
    assert reward(prompts=["q"], completions=["abc"], gold=["1"]) == [-3]


def test_a_file_with_rewards_may_hold_a_dataclass(own: Path) -> None:
    (own / "scale.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Scale:\n    by: float = 2.0\n"
        "def score(completions, **_):\n    return [Scale().by * len(c) for c in completions]\n"
    )
    (reward,) = resolve(["scale.py:score"], "free")
    assert reward(prompts=["q"], completions=["abc"], gold=["1"]) == [6.0]


def test_two_rewards_of_one_file_share_what_it_loads(own: Path) -> None:
    (own / "two.py").write_text(
        "loaded = []\nloaded.append(1)\n"
        "def one(completions, **_):\n    loaded.append(2)\n    return [0.0 for _ in completions]\n"
        "def two(completions, **_):\n    return [len(loaded) for _ in completions]\n"
    )
    one, two = resolve(["two.py:one", str(own / "two.py:two")], "free")
    one(prompts=["q"], completions=["a"], gold=["1"])
    assert two(prompts=["q"], completions=["a"], gold=["1"]) == [2]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_rewards:long", "has no `long`"),
        ("own_rewards:x", "is not a function"),
        ("no_such_rewards:short", "ModuleNotFoundError"),
        ("broken_rewards:short", "ZeroDivisionError"),
        ("broken_rewards.py:short", "ZeroDivisionError"),
        ("script:short", "SystemExit: usage: script.py FILE"),
        ("script.py:short", "SystemExit: usage: script.py FILE"),
        ("missing.py:short", "no file"),
        ("own_rewards:", "module:function"),
        (":short", "module:function"),
    ],
)
def test_a_reward_that_cannot_be_had_says_why(own: Path, name: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        resolve([name], "free")
    assert told in str(error.value)
