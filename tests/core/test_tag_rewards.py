"""The tag rewards: published values on well-formed text, and every fault of the published form beside its fix."""

import math
from pathlib import Path

import published_tags as published
import pytest
import spent

from grpo_portable.rewards import resolve

PERFECT = "16 - 7 = 9, 9 * 2 = 18.<end_working_out><SOLUTION>18</SOLUTION>"
DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"


def pay(name: str, text: object, gold: object = "18") -> float | None:
    (reward,) = resolve([name], "tagged")
    return reward(prompts=["q"], completions=[text], gold=[gold])[0]


def tags(letter: str, text: object, gold: object = "18") -> float:
    parts = [pay(f"tags_{letter}_{part}", text, gold) for part in ("exact", "approximate", "answer", "number")]
    return math.fsum(part for part in parts if part is not None)


@pytest.mark.parametrize(
    ("text", "gold", "b", "c"),
    [
        (PERFECT, "18", 11.5, 13.0),
        ("<start_working_out>" + PERFECT, "18", 11.5, 13.0),  # the model opens the reasoning itself
        (PERFECT.replace("><S", ">\n<S") + "\n", "18", 11.5, 13.0),
        (PERFECT.replace(">18<", ">5<"), "18", 3.0 + 1.5 - 2.5 + 0.0, 3.0 + 1.5 - 2.5 - 1.5),
        (PERFECT.replace(">18<", ">none<"), "18", 3.0 + 1.5 - 4.5 + 0.0, 3.0 + 1.5 - 4.5 - 2.5),
        ("", "18", -3.0 - 2.0, -7.5),
        ("18", "18", -3.0 - 2.0, -7.5),
    ],
)
def test_tag_totals_on_well_formed_text(text: str, gold: str, b: float, c: float) -> None:
    assert tags("b", text, gold) == b
    assert tags("c", text, gold) == c


def test_the_published_form_agrees_on_well_formed_text() -> None:
    for text, gold in [(PERFECT, "18"), (PERFECT, "100"), (PERFECT.replace(">18<", ">none<"), "18"), ("", "18")]:
        assert tags("c", text, gold) == published.total(text, gold)


@pytest.mark.parametrize(
    ("value", "gold", "b", "c"),
    [
        ("100", "100", 5.0, 5.0),
        ("105", "100", 2.5, 2.0),
        ("95", "100", 2.5, 2.0),
        ("106", "100", -2.5, 2.0),
        ("110", "100", -2.5, 2.0),
        ("111", "100", -2.5, 1.5),
        ("120", "100", -2.5, 1.5),
        ("121", "100", -2.5, -2.5),
        ("-105", "-100", 2.5, 2.0),
        ("-100", "100", -2.5, -2.5),
        ("1", "0", -2.5, -2.5),
        ("0.0", "0", 5.0, 5.0),
    ],
)
def test_published_partial_credit_is_there_under_its_own_name(value: str, gold: str, b: float, c: float) -> None:
    text = f"r<end_working_out><SOLUTION>{value}</SOLUTION>"
    assert (pay("tags_b_answer_near", text, gold), pay("tags_c_answer_near", text, gold)) == (b, c)
    strict = 5.0 if b == 5.0 else -2.5
    assert (pay("tags_b_answer", text, gold), pay("tags_c_answer", text, gold)) == (strict, strict)


def solution(inside: str, after: str = "") -> str:
    return f"r<end_working_out><SOLUTION>{inside}</SOLUTION>{after}"


SPAM = "</SOLUTION><SOLUTION><end_working_out>"
# fault of the published form, reward it shows in, text, gold, what it paid, what is paid here
FAULTS = [
    ("gold 0 divides by zero: right", "answer", solution("0.0"), "0", -4.5, 5.0),
    ("gold 0 divides by zero: wrong", "answer", solution("5"), "0", -4.5, -2.5),
    ("commas in the answer", "answer", solution("1,234"), "1234", -4.5, 5.0),
    ("commas in the gold: answer", "answer", solution("1234"), "1,234", -4.5, 5.0),
    ("commas in the gold: number", "number", solution("1234"), "1,234", 0.0, 3.5),
    ("3.0 is 3", "answer", solution("3.0"), "3", 2.0, 5.0),
    ("white space in the solution", "answer", solution("\n18\n"), "18", 3.5, 5.0),
    ("a currency sign", "answer", solution("$18"), "18", -4.5, 5.0),
    ("a unit", "answer", solution("18 dollars"), "18", -4.5, 5.0),
    ("a box", "answer", solution("\\boxed{18}"), "18", -4.5, 5.0),
    ("a marker", "answer", solution("#### 18"), "18", -4.5, 5.0),
    ("a wrong number near the right one", "answer", solution("26"), "25", 2.0, -2.5),
    ("a wrong number not so near", "answer", solution("29"), "25", 1.5, -2.5),
    ("two negatives make a ratio", "answer", solution("-7.5"), "-7", 2.0, -2.5),
    ("a number behind the solution", "number", solution("none", " 18"), "18", 3.5, -2.5),
    ("an empty solution, then a number", "number", solution("", "18"), "18", 3.5, -2.5),
    ("a solution that is never closed", "number", "r<end_working_out><SOLUTION>18", "18", 3.5, -2.5),
    ("the first of a list", "number", solution("18 or 19 or 20"), "18", 3.5, -1.5),
    ("a numerator", "number", solution("1/2"), "1", 3.5, -1.5),
    ("the first of two solutions", "number", solution("18</SOLUTION><SOLUTION>5"), "18", 3.5, -1.5),
    ("a solution in the reasoning", "number", "Maybe <SOLUTION>18</SOLUTION>?<end_working_out>", "18", 3.5, -2.5),
    ("a minus that is not ASCII", "number", solution("−7"), "7", 3.5, -1.5),
    ("a malformed number", "number", solution("1.8.0"), "18", 0.0, -1.5),
    ("punctuation taken for a number", "number", solution("."), "18", 0.0, -2.5),
    ("digits of another script: answer", "answer", solution("１８"), "18", 2.0, -4.5),
    ("digits of another script: number", "number", solution("１８"), "18", 3.5, -1.5),
    ("an underscore", "answer", solution("1_8"), "18", 2.0, -4.5),
    ("an exponent", "answer", solution("1.8e1"), "18", 2.0, 5.0),
    ("not a number", "answer", solution("nan"), "18", -2.5, -4.5),
    ("an infinite answer", "answer", solution("1e400"), "18", -2.5, -4.5),
    ("text after the last line: format", "exact", solution("18", "\nAnd much more."), "18", 3.0, 0.0),
    ("text on the last line: answer", "answer", solution("18", " ok"), "18", -2.0, 5.0),
    ("two solutions: format", "exact", solution("5</SOLUTION><SOLUTION>18"), "18", 3.0, 0.0),
    ("two solutions: answer", "answer", solution("5</SOLUTION><SOLUTION>18"), "18", -4.5, 5.0),
    ("tags in any order", "approximate", SPAM, "18", 1.5, -3.0),
    ("an empty solution: tags", "approximate", solution(""), "18", 1.5, -1.5),
    ("no reasoning at all", "exact", "<end_working_out><SOLUTION>18</SOLUTION>", "18", 3.0, 0.0),
    ("another end token: format", "exact", solution("18", "<|im_end|>"), "18", 0.0, 3.0),
    ("another end token: answer", "answer", solution("18", "<|im_end|>"), "18", -2.0, 5.0),
    ("no end of working: answer", "answer", "r <SOLUTION>18</SOLUTION>", "18", -2.0, 5.0),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "part", "text", "gold", "was", "now"), FAULTS, ids=[row[0] for row in FAULTS])
def test_published_fault(fault: str, part: str, text: str, gold: str, was: float, now: float) -> None:
    one = {"exact": published.exact, "approximate": published.approximate}.get(part)
    two = {"answer": published.answer, "number": published.number}.get(part)
    assert (one(text) if one else two(text, gold) if two else None) == was, "what the published form pays"
    assert pay(f"tags_c_{part}", text, gold) == now
    assert was != now


@pytest.mark.parametrize("gold", [18, 18.0, None])
@pytest.mark.parametrize(
    "text", [None, "", [], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": PERFECT}]]
)
def test_types_that_make_the_published_form_raise(text: object, gold: object) -> None:
    with pytest.raises((AttributeError, TypeError, IndexError, KeyError)):
        published.answer(text[0]["content"], gold.strip())  # type: ignore[index,attr-defined]
    for part in ("exact", "approximate", "answer", "number"):
        value = pay(f"tags_c_{part}", text, gold)
        assert (value is None) == (gold is None and part in ("answer", "number"))


def test_format_is_linear_where_the_published_form_is_cubic() -> None:
    spam = "<end_working_out><SOLUTION>" * 120
    cubic = spent.by(lambda: published.exact(spam))
    assert cubic > 0.01  # 120 pairs; 500 take seconds, 1000 more than half a minute
    long = "<end_working_out><SOLUTION>" * 40_000  # a megabyte, 333 times as much
    with spent.at_most(2):  # the four together take a tenth of it
        for part in ("exact", "approximate", "answer", "number"):
            pay(f"tags_c_{part}", long)


def test_set_b_lets_text_follow_and_set_c_does_not() -> None:
    text = solution("18", " That is all.")
    assert (pay("tags_b_exact", text), pay("tags_c_exact", text)) == (3.0, 0.0)


@pytest.mark.parametrize("row", FAULTS, ids=[row[0] for row in FAULTS])
def test_every_fault_stands_in_the_docs(row: tuple) -> None:
    fault, part, _, _, was, now = row
    assert f"| {fault} | {part} | {was:+g} | {now:+g} |" in DOCS.read_text(encoding="utf-8")
