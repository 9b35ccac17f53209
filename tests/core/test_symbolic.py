"""Symbolic equality in a child process: what is equal, what is not, and what happens when it takes too long."""

import importlib.util
import time
from pathlib import Path

import pytest

from grpo_portable.answers import judge
from grpo_portable.answers.symbolic import SymbolicChecker
from grpo_portable.errors import RecipeError
from grpo_portable.rewards import resolve

installed = importlib.util.find_spec("math_verify") is not None
needs_math_verify = pytest.mark.skipif(not installed, reason="math-verify is not installed")


@pytest.fixture(scope="module")
def checker():
    with SymbolicChecker(time_limit_s=5) as checker:
        yield checker


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("x^2+1", "1+x^2", True),
        ("\\frac{\\pi}{2}", "\\pi/2", True),
        ("(1,2)", "(1, 2)", True),
        ("(2,1)", "(1,2)", False),
        ("\\text{Evelyn}", "Evelyn", True),
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("4", "4\\sqrt{2}", False),
        ("1.5707963", "\\frac{\\pi}{2}", False),  # near is not equal
        ("3", "\\pi", False),
        ("1024", "2^{10}", True),
        ("", "\\pi", False),
        ("\\frac{", "\\pi", False),
    ],
)
def test_equal_expressions(checker: SymbolicChecker, answer: str, gold: str, equal: bool) -> None:
    assert checker.equal(answer, gold) is equal


@pytest.mark.parametrize(
    ("answer", "gold", "equal"), [("1/2", "0.5", True), ("0.333333", "\\frac{1}{3}", False), ("50%", "0.5", False)]
)
def test_numbers_are_compared_exactly_and_without_a_child(answer: str, gold: str, equal: bool) -> None:
    checker = SymbolicChecker()
    assert checker.equal(answer, gold) is equal
    assert checker._child is None


@needs_math_verify
def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_one_is_checked() -> None:
    with SymbolicChecker(time_limit_s=1.5) as checker:
        assert checker.equal("\\pi", "\\pi") is True
        began = time.perf_counter()
        assert checker.equal("9^{9^{9^{9}}}", "\\pi") is False
        assert time.perf_counter() - began < 30
        assert checker.equal("\\pi", "\\pi") is True


@needs_math_verify
def test_the_reward_reads_numbers_itself_and_asks_for_the_rest() -> None:
    (reward,) = resolve(["symbolic_correctness"], "boxed")
    completions = ["\\boxed{\\frac{\\pi}{2}}", "\\boxed{18}", "\\boxed{19}", "no box", "\\boxed{1}"]
    gold = ["\\pi/2", "18", "18", "\\pi", None]
    assert reward(prompts=[""] * 5, completions=completions, gold=gold) == [1.0, 1.0, 0.0, 0.0, None]


WRITTEN = {
    "gsm8k_marker": "so it is\n#### {}",
    "boxed": "so it is \\boxed{{{}}}",
    "free": "The answer is {}.",
    "tagged": "<end_working_out><SOLUTION>{}</SOLUTION>",
}


@needs_math_verify
@pytest.mark.parametrize("style", WRITTEN)
@pytest.mark.parametrize("dollars", ["{}", "${}$", "$ {} $"])
@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("x^2+1", "1+x^2", "x^2-1"),
        ("\\pi/2", "\\frac{\\pi}{2}", "\\pi"),
        ("(-\\infty, 3)", "(-\\infty,3)", "(-\\infty,3]"),
        ("\\{1, 2\\}", "\\{2, 1\\}", "\\{1\\}"),
        ("18", "18", "19"),
    ],
)
def test_training_pays_what_the_evaluation_calls_right(
    gold: str, right: str, wrong: str, dollars: str, style: str
) -> None:
    (reward,) = resolve(["symbolic_correctness"], style)
    completions = [WRITTEN[style].format(dollars.format(answer)) for answer in (right, wrong)]
    judged = [judge.correct(completion, gold, style) for completion in completions]
    assert judged == [True, False]
    assert reward(prompts=[""] * 2, completions=completions, gold=[gold] * 2) == [1.0, 0.0]


@needs_math_verify
@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("free", "**Answer:** $x+1$"),
        ("free", "The answer is **$x+1$**."),
        ("free", "Answer: \\[x+1\\]"),
        ("free", "Answer:\n\n$$x+1$$"),
        ("gsm8k_marker", "#### **x+1**"),
        ("gsm8k_marker", "#### `x+1`"),
        ("gsm8k_marker", "####\n\\(x+1\\)."),
        ("tagged", "<end_working_out><SOLUTION>**x+1**</SOLUTION>"),
    ],
)
def test_marks_around_an_expression_are_none_of_it(style: str, text: str) -> None:
    assert [judge.correct(text, gold, style) for gold in ("x+1", "$x+1$.", "x-1")] == [True, True, False]


@needs_math_verify
@pytest.mark.parametrize(
    "hedge",
    [
        "{} or {}",
        "${}$ or ${}$",
        "{}, {}",
        "{} = {}",
        "{} \\text{{ or }} {}",
        "{} $${}$$",
        "\\({}\\) \\({}\\)",
        "{} $ {}",
        "${}$ is wrong, it is ${}$",
        "\\{{{}, {}\\}}",
        "\\begin{{cases}}{}\\\\{}\\end{{cases}}",
    ],
)
def test_no_text_is_right_for_two_golds(hedge: str) -> None:
    text = "#### " + hedge.format("x+1", "x-1")
    assert sum(judge.correct(text, gold, "gsm8k_marker") is True for gold in ("x+1", "x-1")) <= 1


@needs_math_verify
def test_a_question_asked_again_at_once_is_not_worked_out_again() -> None:
    with SymbolicChecker(time_limit_s=5) as checker:
        assert checker.equal("x^2+1", "1+x^2") is True
        child = checker._child
        assert child is not None
        child.kill()
        child.wait()
        assert checker.equal("x^2+1", "1+x^2") is True
        assert checker._child is child  # another would have been started to ask
        assert checker.equal("x^2-1", "1+x^2") is False
        assert checker._child is not child


@pytest.mark.skipif(installed, reason="math-verify is installed")
def test_without_math_verify_the_recipe_is_refused_with_the_command_that_helps() -> None:
    with pytest.raises(RecipeError) as error:
        resolve(["symbolic_correctness"], "boxed")
    assert "math-verify" in str(error.value)
    assert error.value.help is not None
    assert "grpo-portable[math]" in error.value.help


def test_the_child_that_cannot_start_scores_nothing_and_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, cannot = tmp_path / "started", tmp_path / "cannot"
    cannot.write_text(f"#!/bin/sh\necho x >> {started}\nexit 1\n")
    cannot.chmod(0o755)
    monkeypatch.setattr("grpo_portable.answers.symbolic.sys.executable", str(cannot))
    with SymbolicChecker(start_limit_s=5) as checker:
        assert [checker.equal("x", "\\pi") for _ in range(5)] == [None] * 5
    assert started.read_text().split() == ["x", "x"]
