"""The extractor: the handed cases, and one table a rule."""

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_portable.answers import extract, extractor, is_correct
from grpo_portable.answers.extractor import (
    extract_lenient,
    has_marker,
    is_correct_lenient,
    parse_gold,
)
from grpo_portable.answers.markup import balanced

CASES = json.loads((Path(__file__).parent / "answer_cases.json").read_text(encoding="utf-8"))


def same(got: str | None, wanted: str | None) -> bool:
    return got is wanted if got is None or wanted is None else Fraction(got) == Fraction(wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_handed_case(case: dict) -> None:
    got = extract(case["completion"], case["format"])
    assert same(got, case["expected_extracted"]), f"{got!r}: {case['why']}"
    assert is_correct(case["completion"], case["gold"], case["format"]) is case["expected_correct"], case["why"]


# by rule: what stands after the marker, and the number it states; null when it states none or more than one
PHRASES = json.loads((Path(__file__).parent / "answer_phrases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("phrase", "value"), [case for cases in PHRASES.values() for case in cases])
def test_phrase_reads_alike_in_every_style(phrase: str, value: str | None) -> None:
    assert same(extract(f"9 * 2\n#### {phrase}", "gsm8k_marker"), value)
    if "####" not in phrase:
        assert same(extract(f"r<end_working_out><SOLUTION>{phrase}</SOLUTION>", "tagged"), value)
    if "####" not in phrase and balanced(phrase):
        assert same(extract(f"so \\boxed{{{phrase}}}.", "boxed"), value)


MARKER = [
    ("#### 18\nThat is the answer.", "18"),
    ("#### 18!", "18"),
    ("<!-- #### 18 -->", None),
    ("<Think>#### 5</Think>#### 18", "18"),
    ("<THINK>#### 18", None),
    ("[THINK]#### 5[/THINK]#### 18", "18"),
    ("[THINK]#### 18", None),
    ("#### 5\nNo.\n#### 18", "18"),
    ("####\n18", "18"),
    ("####\n\n$18", "18"),
    ("####\n\\[x = 18\\]", "18"),
    ("####\nso \\(18\\)", None),
    ("#### Answer:\n18", "18"),
    ("#### Final Answer\n\\boxed{18}", "18"),
    ("####\n18 eggs are left", None),
    ("####\nThere are 18", None),
    ("**#### 18**", "18"),
    ("**####** 18", "18"),
    ("So #### 18", "18"),
    ("#### 18 #### 5", "5"),
    ("##### 18", None),
    ("### 18", None),
    ("######## 18", None),
    ("#### 18\n##### Note", "18"),
    ("#### 18\n#### ", "18"),  # a marker that states nothing takes nothing back
    ("#### 18\n\n#### ####\n#### \n####", "18"),
    ("#### \n####", None),
    ("#### 5\n####\n18 eggs are left", None),  # this one states something, in words
    ("#### 1000\n#### 1000\n#### 10", "1000"),  # the length limit cut the third repetition
    ("#### 20\n#### 20\n##", "20"),
    ("#### 120\n#### 12", "12"),  # said once, it may be a correction
    ("#### 18\n#### 18\n#### 19", "19"),
    ("#### 18\n#### 18\n#### 1<|im_end|>", "1"),  # ended by the model itself, so nothing was cut
    ("# # # # 18", None),
    ("＃＃＃＃ 18", None),
    ("18", None),
    ('I will end with "#### 5".\nSo 18.', None),
    ('#### 18\nThe format was "#### 5".', "18"),
    ("#### 18\nThe format was “#### 5”.", "18"),
    ("#### 18\nThe format was '#### 5'.", "18"),
    ("#### 18\nI write `#### 5` as asked.", "18"),
    ("`#### 18`", "18"),
    ("```\n#### 18\n```", "18"),
    ('a 5" pipe: #### 18', "18"),
    ("#### 1. Eggs\n9\n#### 2. Money\n#### 18", "18"),
    ("#### 1. Eggs\n#### 2. Money", None),
    ("Give #### <answer>\n", None),
    ("#### 18 Question: what is 3 + 4?", "18"),
    ("#### 18Question: what is 3 + 4?", "18"),
]


@pytest.mark.parametrize(("text", "value"), MARKER)
def test_marker(text: str, value: str | None) -> None:
    assert same(extract(text, "gsm8k_marker"), value)


ENDS = [
    "<|im_end|>",
    "</s>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<eos>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
    "<pad>",
]


@pytest.mark.parametrize("end", ENDS)
def test_nothing_after_the_first_end_token_counts(end: str) -> None:
    assert extract(f"#### 18{end}\n#### 5", "gsm8k_marker") == "18"
    assert extract(f"{end}#### 18", "gsm8k_marker") is None
    assert extract(f"r<end_working_out><SOLUTION>18</SOLUTION>{end}<SOLUTION>5</SOLUTION>", "tagged") == "18"
    assert has_marker(f"#### 18{end}", "gsm8k_marker")


TEXTS = [
    ("<think>#### 5</think>\n#### 18", "18"),
    ("#### 5\n</think>\n#### 18", "18"),  # the template opened the block
    ("<thinking>#### 5</thinking>#### 18", "18"),
    ("<think>Maybe #### 18", None),
    ("<think>#### 18</think>", None),
    ("<think>a</think> b <think>#### 18", None),
    ("#### 18<|im_start|>user\n#### 5", "18"),
    ("<|im_start|>assistant\n#### 18", "18"),
    ("#### 18\n\nQuestion: 3 + 4?\nAnswer: #### 7", "18"),
    ("#### 18\n### Question 2:\n#### 7", "18"),
    ("#### 18\n**Question:** 3 + 4?\n#### 7", "18"),
    ("#### 18\nQ2: 3 + 4?\n#### 7", "18"),
    ("#### 18\nProblem: 3 + 4?\n#### 7", "18"),
    ("#### 18\nHuman: 3 + 4?\n#### 7", "18"),
    ("#### 18\nNext question\n#### 7", "18"),
    ("9 * 2 = 18.\nQuestion: 3 + 4?\n#### 7", None),
    ("Question: 9 * 2?\nAnswer: #### 18", "18"),  # the question said again is not a new one
    ("The question is how many.\nQuestions like this need 9 * 2.\n#### 18", "18"),
    ("<think>Question: how many?\n</think>\n#### 18", "18"),
]


@pytest.mark.parametrize(("text", "value"), TEXTS)
def test_text_before_extraction(text: str, value: str | None) -> None:
    assert same(extract(text, "gsm8k_marker"), value)


TAGGED = [
    ("<start_working_out>r<end_working_out><SOLUTION>18</SOLUTION>", "18"),
    ("r<SOLUTION>18</SOLUTION>", "18"),  # a wrong format is not a wrong answer
    ("<start_working_out>r<SOLUTION>18</SOLUTION>", None),  # still reasoning
    ("Maybe <SOLUTION>18</SOLUTION>.<end_working_out>", None),
    ("r<end_working_out><SOLUTION>5</SOLUTION><SOLUTION>18", "5"),
    ("r<end_working_out>a<end_working_out><SOLUTION>18</SOLUTION>", "18"),
    ("r<end_working_out></SOLUTION>18<SOLUTION>", None),
    ("r<end_working_out><SOLUTION> </SOLUTION>", None),
    ("r<end_working_out><SOLUTION>9 * 2 =\n18</SOLUTION>", None),
    ("r<end_working_out><SOLUTION>\\boxed{18}</SOLUTION>", "18"),
    ("r<end_working_out><SOLUTION>#### 18</SOLUTION>", "18"),
    ("r<end_working_out><SOLUTION>The answer is 18.</SOLUTION>", "18"),
    ("r<end_working_out><solution>18</solution>", None),
    ("#### 18", None),
]


@pytest.mark.parametrize(("text", "value"), TAGGED)
def test_tagged(text: str, value: str | None) -> None:
    assert same(extract(text, "tagged"), value)


BOXED = [
    ("\\boxed{3!}", None),  # in a formula it is a factorial
    ("\\boxed{18}!", "18"),
    ("\\boxed{18\\!}", "18"),
    ("\\boxed {18}", "18"),
    ("\\\\boxed{18}", "18"),  # as JSON writes a backslash
    ("5 \\\\\\boxed{18}", "18"),  # a line break, then the box
    ("\\boxed{5} and \\boxed{18}", "18"),
    ("\\boxed{5} and \\boxed{18", "5"),
    ("\\boxed{\\fbox{18}}", "18"),
    ("\\boxed{a {b} 18}", None),
    ("\\boxed{\\{18\\}}", "18"),
    ("{ \\boxed{18}", "18"),
    ("} \\boxed{18}", "18"),
    ("\\boxed 18", None),
    ("boxed{18}", None),
    ("\\boxed{\\text{eighteen}}", None),
    ("\\boxed{18 \\; \\mathrm{km/h}}", "18"),
    ("\\boxed{x = \\frac{3}{4}}", "0.75"),
    ("18", None),
]


@pytest.mark.parametrize(("text", "value"), BOXED)
def test_boxed(text: str, value: str | None) -> None:
    assert same(extract(text, "boxed"), value)


FREE = [
    ("The answer is 18", "18"),
    ("The answer is 18!", "18"),
    ("The answer is 17? No, 18.", None),
    ("The answer is 17. No, wait: 18.", None),
    ("The answer is 17. Or 18.", None),
    ("The answer is 18. No cookies are left.", "18"),
    ("The answer is 18. She has 5 left.", "18"),
    ("The answer is 18 because 9 * 2 = 18", "18"),
    ("The final answer is: $\\boxed{18}$.", "18"),
    ("The answer would be 18.", "18"),
    ("**Answer:** 18", "18"),
    ("**Answer**: 18", "18"),
    ("Answer:\n18", "18"),
    ("Answer:\n$$x = 18$$", "18"),
    ("Answer:\n$5$ or $18$", None),
    ("Answer: 18\nExplanation: 9 * 2", "18"),
    ("Answer: x = 5", "5"),
    ("Answer: 12 = 5", None),
    ("Answer: unknown, maybe\n18", None),
    ("The answer is not 18", None),
    ("The answer is 3.5 hours.", "3.5"),
    ("The answer is Rs. 18.", "18"),
    ("Is the answer 5? The answer is 18!", "18"),
    ("Answer: 5\nAnswer: 18", "18"),
    ("It costs 5 and sells for 18 dollars.", "18"),
    ("9 * 2 = 18", "18"),
    ("so \\(9 \\times 2 = 18\\)", "18"),
    ("9 * $2 = $<<9*2=18>>18", "18"),
    ("5\n18\n", "18"),
    ("so it took 1 1/2 hours", "1.5"),
    ("it is now -4", "-4"),
    ("5 - 9 = -4", "-4"),
    ("it weighs 1.5e3 grams", "1500"),
    ("it weighs 2E-1", "0.2"),
    ("in room 1e3f", None),
    ("from 5 to -4", None),
    ("she has 5 or 18", None),
    ("18-20", None),
    ("9 * 2", None),
    ("3, 4, 18", None),
    ("worth 2 million", None),
    ("at 3:30", None),
    ("on 12/25/2024", None),
    ("somewhere between 18 and $20", None),
]


@pytest.mark.parametrize(("text", "value"), FREE)
def test_free(text: str, value: str | None) -> None:
    assert same(extract(text, "free"), value)


COMPLETIONS = [
    (None, None),
    ("", None),
    ("   \n", None),
    ([], None),
    ([{}], None),
    (["#### 18"], None),
    (18, None),
    (b"#### 18", None),
    ({"role": "assistant", "content": "#### 18"}, "18"),
    ([{"content": "#### 18"}], "18"),
    ([{"role": "user", "content": "#### 18"}], None),
    ([{"role": "assistant", "content": "#### 18"}, {"role": "user", "content": "#### 5"}], "18"),
    ([{"role": "assistant", "content": "#### 5"}, {"role": "assistant", "content": None}], None),
    (
        [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "#### "}, {"type": "image"}, {"type": "text", "text": "18"}],
            }
        ],
        "18",
    ),
    ([{"role": "assistant", "content": {"text": "#### 18"}}], None),
    (({"role": "assistant", "content": "#### 18"},), "18"),
]


@pytest.mark.parametrize(("completion", "value"), COMPLETIONS)
def test_completions_of_every_type(completion: object, value: str | None) -> None:
    assert extract(completion, "gsm8k_marker") == value


GOLDS = [
    ("18", "18"),
    (18, "18"),
    (18.0, "18"),
    (0.1, "0.1"),
    (1e22, "1" + "0" * 22),
    (Decimal("1.50"), "1.5"),
    (Fraction(8, 3), "8/3"),
    ("1,234", "1234"),
    ("-3", "-3"),
    ("−3", "-3"),
    ("$18", "18"),
    ("50%", "50"),
    ("\\frac{8}{3}", "8/3"),
    ("$\\boxed{7}$", "7"),
    ("9 * 2 = <<9*2=18>>18\n#### 1,800", "1800"),
    ("Thus the answer is \\boxed{18}.", "18"),
    ("r<end_working_out><SOLUTION>18</SOLUTION>", "18"),
    ("Answer: 18", "18"),
    ("5 or 18", None),
    ("nan", None),
    (float("nan"), None),
    (float("inf"), None),
    (1e300, None),
    (10**400, None),
    (10**5000, None),
    (Fraction(1, 10**5000), None),
    (True, None),
    (None, None),
    ("", None),
    ("x + 1", None),
    ([18], None),
    (1 + 2j, None),
]


@pytest.mark.parametrize(("raw", "value"), GOLDS, ids=range(len(GOLDS)))
def test_gold_goes_through_the_same_reader(raw: object, value: str | None) -> None:
    assert parse_gold(raw, "gsm8k_marker") == value
    assert is_correct("#### 18", raw, "gsm8k_marker") is (value == "18")


EXACT = [
    ("8/3", "2 2/3", True),
    ("0.5", "1/2", True),
    ("1/3", "0.333333", False),
    ("9007199254740993", "9007199254740992", False),
    ("0.1", "0.1000000000000000055", False),
    ("50", "0.5", False),
    ("0.5", "50%", False),
    ("5", "500", False),
    ("18", "18.0000000001", False),
    ("-7", "7", False),
    (0.3, "0.3", True),
]


@pytest.mark.parametrize(("gold", "answer", "equal"), EXACT)
def test_comparison_is_of_exact_rationals(gold: object, answer: str, equal: bool) -> None:
    assert is_correct(f"#### {answer}", gold, "gsm8k_marker") is equal


LENIENT = [
    ("She makes 18 dollars.", "18"),
    ("The answer is 18 (step 3).", "18"),
    ("So \\boxed{18}, in 3 steps", "18"),
    ("#### 18\nChecked 3 times.", "18"),
    ("#### 5 or 18\nso 18", "18"),
    ("r<end_working_out><SOLUTION>18</SOLUTION> 3", "18"),
    ("<think>18", None),
    ("no number", None),
]


@pytest.mark.parametrize(("text", "value"), LENIENT)
def test_lenient_forgives_the_format_only(text: str, value: str | None) -> None:
    assert same(extract_lenient(text), value)
    assert is_correct_lenient(text, "18") is (value == "18")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_what_is_right_strictly_is_right_leniently(case: dict) -> None:
    if is_correct(case["completion"], case["gold"], case["format"]):
        assert is_correct_lenient(case["completion"], case["gold"], case["format"])


FORMAT = [
    ("gsm8k_marker", "9 * 2 = 18\n#### 18", True),
    ("gsm8k_marker", "#### -1,234.5\n", True),
    ("gsm8k_marker", "#### 1/2", True),
    ("gsm8k_marker", "####18", False),
    ("gsm8k_marker", "#### $18", False),
    ("gsm8k_marker", "#### 18 eggs", False),
    ("gsm8k_marker", "#### 18\nDone.", False),
    ("gsm8k_marker", "#### 18\nCheck.\n#### 18", False),
    ("gsm8k_marker", "#### 5 #### 18", False),
    ("gsm8k_marker", "So #### 18", False),
    ("gsm8k_marker", "##### 18", False),
    ("gsm8k_marker", "#### ", False),
    ("gsm8k_marker", "#### <answer>", False),
    ("gsm8k_marker", "#### 18\nQuestion: 3 + 4?", False),
    ("gsm8k_marker", "<think>#### 5</think>\n#### 18", True),
    ("gsm8k_marker", "<think>#### 18", False),
    ("gsm8k_marker", "", False),
    ("tagged", "r<end_working_out><SOLUTION>18</SOLUTION>", True),
    ("tagged", "<start_working_out>r<end_working_out>\n<SOLUTION>\n18\n</SOLUTION>\n", True),
    ("tagged", "<end_working_out><SOLUTION>18</SOLUTION>", False),
    ("tagged", "r<end_working_out><SOLUTION></SOLUTION>", False),
    ("tagged", "r<end_working_out><SOLUTION>18</SOLUTION> more", False),
    ("tagged", "r<end_working_out><SOLUTION>5</SOLUTION><SOLUTION>18</SOLUTION>", False),
    ("tagged", "<SOLUTION>18</SOLUTION>r<end_working_out>", False),
    ("tagged", "r<end_working_out><start_working_out><SOLUTION>18</SOLUTION>", False),
    ("boxed", "So \\boxed{18}.", True),
    ("boxed", "\\boxed{5}\n\\boxed{18}", False),
    ("boxed", "\\boxed{18}\nDone.", False),
    ("boxed", "\\boxed{18", False),
    ("free", "The answer is 18.", True),
    ("free", "Answer: 5\nAnswer: 18", False),
    ("free", "It is 18.", False),
]


@pytest.mark.parametrize(("style", "text", "kept"), FORMAT)
def test_format_is_judged_apart_from_the_value(style: str, text: str, kept: bool) -> None:
    assert has_marker(text, style) is kept


def test_why_there_is_no_answer() -> None:
    assert extractor.read("#### 5 or 18", "gsm8k_marker").reason == "several numbers"
    assert extractor.read("18", "gsm8k_marker").reason == "no marker"
    assert extractor.read("<think>18", "gsm8k_marker").reason == "thinking that is never closed"
    assert extractor.read("#### 18", "gsm8k_marker") == (Fraction(18), "")
