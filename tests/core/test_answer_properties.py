"""The extractor on any text: linear, never raising, canonical, never two numbers as one; and GSM8K's own golds."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import spent
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_portable.answers.extractor import extract, extract_lenient, has_marker, is_correct, parse_gold

STYLES = ("gsm8k_marker", "tagged", "boxed", "free")
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

PIECES = [
    "#",
    "####",
    "####\n",
    "#### 1",
    " ",
    "\n",
    "1",
    "18 ",
    ".",
    ",",
    "-",
    "- ",
    "*",
    "(",
    "\\frac",
    "\\boxed{",
    "{",
    "}",
    "\\",
    "$",
    "/",
    "1/",
    "<",
    "<<",
    '"#### ',
    "½",
    "<SOLUTION>",
    "</SOLUTION>",
    "<end_working_out><SOLUTION>",
    "<think>",
    "</think>",
    "<|im_end|>",
    "Question: ",
    "answer is ",
    "two ",
    "1,234,",
    "e9",
    "²",
]


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_text_takes_a_second_at_most(piece: str) -> None:
    """A pattern that backtracks takes minutes on 200,000 characters; the slowest piece took an eighth of a second."""
    body = piece * (200_000 // len(piece))
    for style, text in [
        ("gsm8k_marker", f"#### 18{body}x"),
        ("tagged", f"<end_working_out><SOLUTION>18{body}</SOLUTION>"),
        ("boxed", f"\\boxed{{{body}}}"),
        ("free", f"The answer is {body}"),
        ("free", body),
        ("gsm8k_marker", f"#### 18\n{body}"),
    ]:
        with spent.at_most(1):
            extract(text, style)
            is_correct(text, "18", style)


ODD = st.lists(
    st.sampled_from([*PIECES, "18", "0", "e", "x", "Answer:", "–", "−", "１", "\u2009", "'", "or", "million", "%"]),
    max_size=14,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=st.one_of(ODD, st.text(max_size=60)), style=st.sampled_from(STYLES))
def test_no_text_raises_and_what_is_read_is_canonical(text: str, style: str) -> None:
    for got in (extract(text, style), extract_lenient(text, style), parse_gold(text, style)):
        if got is not None:
            assert parse_gold(got, style) == got
            assert is_correct(f"#### {got}", got, "gsm8k_marker")
    has_marker(text, style)


@settings(max_examples=300, deadline=None)
@given(
    value=st.fractions(max_denominator=10**6),
    style=st.sampled_from(["#### {}", "#### ${}", "#### **{}**", "#### {} eggs.", "#### The answer is {}."]),
)
def test_every_rational_comes_back(value: Fraction, style: str) -> None:
    text = style.format(value)
    assert Fraction(extract(text, "gsm8k_marker") or "nan") == value
    assert not is_correct(text, str(value + Fraction(1, 10**9)), "gsm8k_marker")


@settings(max_examples=200, deadline=None)
@given(
    a=st.integers(-(10**12), 10**12),
    b=st.integers(-(10**12), 10**12),
    joint=st.sampled_from([" or ", ", ", " and ", "-", " to ", "; ", " = ", " + ", "*", ":"]),
)
def test_two_numbers_are_never_one(a: int, b: int, joint: str) -> None:
    text = f"{a}{joint}{b}"
    for completion, style in (
        (f"#### {text}", "gsm8k_marker"),
        (f"\\boxed{{{text}}}", "boxed"),
        (f"Answer: {text}", "free"),
    ):
        assert extract(completion, style) is None


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K beside the checkout")
def test_every_gsm8k_gold_reads_as_itself() -> None:
    rows = [
        json.loads(line)
        for part in ("train", "test")
        for line in (GSM8K / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 8792
    for row in rows:
        plain = row["answer"].rsplit("#### ", 1)[1].replace(",", "")
        assert parse_gold(row["answer"], "gsm8k_marker") == extract(row["answer"], "gsm8k_marker") == plain
        assert has_marker(row["answer"], "gsm8k_marker")
