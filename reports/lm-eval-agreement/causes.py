"""Why lm-evaluation-harness and answers/extractor.py read different numbers in the same answer: one name a cause."""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_portable.answers import extractor
from grpo_portable.answers.phrases import Reading

# cause → (what it is, why ours holds)
CAUSES = {
    "spelling": (
        "The same number, written another way",
        "lm-eval compares strings (`18.00` is not `18`), ours exact rationals.",
    ),
    "several-markers": (
        "Several markers: lm-eval takes the first, ours the last",
        "A text with a second `####` line has changed its mind or does not stop. Which counts is a choice; ours is the last, "
        "as in verl and verifiers: paying the first would pay for a guess that the text takes back. In a text that counts on "
        "(`#### 1`, `#### 2`, ...) until the length limit neither is an answer.",
    ),
    "repetition": (
        "A repetition that the length limit cut: lm-eval reads the cut number",
        "After `#### 1000` many times, `#### 10` is the start of one more. Ours reads the last whole one.",
    ),
    "fraction": (
        "A fraction: lm-eval reads its numerator or its denominator",
        "`#### 1/3` states 1/3. No pattern of lm-eval's holds a `/`: strict reads 1, flexible 3, and either would be paid for.",
    ),
    "ratio": (
        "A ratio or a time: lm-eval reads one side",
        "`1:1` and `5:05` state no single number. The side that is read can be the gold by chance only.",
    ),
    "said-before": (
        "An answer that is marked or put in words, and text after it",
        "`The answer is 2.` states the answer, and a number later in the text does not replace it. Flexible takes the last "
        "number of the text, whatever was said before.",
    ),
    "malformed": (
        "A numeral that is none",
        "In `36,00000` the commas do not group by three. lm-eval deletes them and reads 3600000; ours does not guess.",
    ),
    "unknown": ("A multiple of an unknown", "`2x` is not 2."),
    "calculation": (
        "A calculation without a result, mostly one that the length limit cut: lm-eval reads an operand",
        "`648 x 2 =` and `1 + 4 + 2` state no number. The operand that is read can be the gold by chance only.",
    ),
    "sentence": (
        "A last number in a sentence that states no answer",
        "`multiplying 5 by 2, which` names two numbers on the way to a third; a bound or a denial (`less than 9`) states none.",
    ),
}

_WELL_FORMED = re.compile(r"-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?[.,]?")
_OPERATOR = re.compile(r"[0-9a-z%).]\s?[-+*/×=]\s?(?:[$(0-9]|\Z)|\sx(?:\s|\Z)", re.I)


def cause(filter_: str, text: str, ours: Reading, theirs: str, their_number: Fraction | None) -> str:
    """The name of the cause, from the text around the number that lm-eval reads (its first marker's, or the last)."""
    strict = filter_ == "strict-match"
    if ours.value is not None and ours.value == their_number:
        return "spelling"
    at = text.find(f"#### {theirs}") + 5 if strict else text.rfind(theirs)
    around = text[max(0, at - 2) : at + len(theirs) + 2]
    if strict and ours.value is not None and text.count("####") > 1:
        return "several-markers"
    if re.search(r"[0-9]:[0-9]", around):
        return "ratio"
    if ours.value is not None:
        if ours.value.denominator != 1 and "/" in around:
            return "fraction"
        return "repetition" if extractor.ended_text(text) != text else "said-before"
    if not _WELL_FORMED.fullmatch(theirs):
        return "malformed"
    if re.match(r"[a-wyz]|x(?!\s?[0-9])", text[at + len(theirs) :]):
        return "unknown"
    line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return "calculation" if _OPERATOR.search(line) else "sentence"
