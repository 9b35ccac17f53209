"""Numbers are compared exactly, expressions by math-verify where it is installed; without it nobody says."""

from __future__ import annotations

import importlib.util

import pytest

from grpo_portable.answers import judge
from grpo_portable.scores import scoring

BOXED = "Therefore \\boxed{(3, \\frac{\\pi}{2})}."
GOLD = "\\left( 3, \\frac{\\pi}{2} \\right)"


def test_numbers_never_need_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_checker", lambda: None)
    assert judge.correct("so \\boxed{\\frac{14}{3}}", "14/3", "boxed") is True
    assert judge.correct("so 14/3", "14/3", "boxed") is False
    assert judge.lenient("so 14/3", "14/3", "boxed") is True
    assert judge.extracted("so \\boxed{18}", "18", "boxed") == "18"


def test_without_math_verify_an_expression_keeps_the_mark_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_checker", lambda: None)
    assert judge.correct(BOXED, GOLD, "boxed") is None
    record = {"id": "a", "question": "q", "gold": GOLD, "completion": BOXED, "correct": True, "lenient": True}
    graded = scoring.grade(record, "boxed")
    assert (graded.strict, graded.lenient, graded.reread) == (True, True, False)
    assert graded.extracted == "(3, \\frac{\\pi}{2})"
    assert scoring.grade({**record, "correct": False}, "boxed").strict is False
    assert scoring.grade({k: v for k, v in record.items() if k != "correct"}, "boxed").strict is False


def test_an_expression_is_asked_where_the_style_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Checker:
        def equal(self, answer: str, gold: str) -> bool:
            asked.append((answer, gold))
            return answer == gold

    monkeypatch.setattr(judge, "_checker", Checker)
    assert judge.correct("\\boxed{x+1}", "x+1", "boxed") is True
    assert judge.correct("#### x+1", "x+1", "boxed") is False
    assert judge.lenient("#### $x+1$", "x+1", "boxed") is True
    assert asked == [("x+1", "x+1"), ("", "x+1"), ("x+1", "x+1")]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("(3, \\frac{\\pi}{2})", GOLD, True),
        ("(3, \\pi)", GOLD, False),
        ("1 + x^2", "x^2+1", True),
        ("x^2-1", "x^2+1", False),
        ("\\text{Evelyn}", "\\text{Evelyn}", True),
    ],
)
def test_expressions_as_in_math_500(answer: str, gold: str, equal: bool) -> None:
    assert judge.correct(f"So \\boxed{{{answer}}}.", gold, "boxed") is equal
