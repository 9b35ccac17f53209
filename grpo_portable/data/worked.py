"""A data set's worked answer as the model should write it: its working, then the final answer in the run's style.

Bootstrap and worked examples use it. GSM8K's calculator annotations and a reasoning model's thinking tags are taken out; an
answer that already stands in the style is kept as it is.
"""

from __future__ import annotations

import re

from grpo_portable.answers.extractor import CLOSE_SOLUTION, END_WORKING, OPEN_SOLUTION, START_WORKING
from grpo_portable.data.questions import Question

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K: <<3*4=12>>
_THINKING = re.compile(r"<(/?)(?:think|thinking|thought)>", re.I)
_BARE = re.compile(r"\s*(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is|:)?)?\s*\$*\s*[^\s=]+\s*\$*\s*\.?\s*", re.IGNORECASE)


def worked_answer(answer: str) -> str:
    """A worked answer without calculator annotations, otherwise as the data set has it."""
    return _CALCULATOR.sub("", answer).strip()


def working(question: Question) -> str:
    """The steps that lead to the answer, without the answer's own line; empty when the data set has none."""
    text = worked_answer(question.working or question.answer)
    text = _said_after_thinking(text)
    if "####" in text:
        text = text[: text.rindex("####")]
    text = text.strip()
    return "" if not question.working and (_BARE.fullmatch(text) or text == question.gold) else text


def target(question: Question, style: str, *, opened: bool = False) -> str:
    """What the model should write for a question in a style. `opened`: the prompt already ends inside the reasoning."""
    given = worked_answer(question.working or question.answer)
    if style == "gsm8k_marker" and "####" in given:
        return given
    steps = working(question)
    if style == "tagged":
        if END_WORKING in given and CLOSE_SOLUTION in given:
            return given.removeprefix(START_WORKING) if opened else given
        start = "" if opened else START_WORKING
        return f"{start}{steps}{END_WORKING}{OPEN_SOLUTION}{question.gold}{CLOSE_SOLUTION}"
    if style == "boxed":
        return given if "\\boxed" in given else _joined(steps, f"The answer is \\boxed{{{question.gold}}}.")
    return _joined(steps, f"#### {question.gold}" if style == "gsm8k_marker" else f"Answer: {question.gold}")


def _joined(steps: str, last: str) -> str:
    return f"{steps}\n{last}" if steps else last


def _said_after_thinking(text: str) -> str:
    """What a reasoning model says after its thinking; the thinking itself when it says nothing more."""
    tags = list(_THINKING.finditer(text))
    if not tags:
        return text
    last = tags[-1]
    after = text[last.end() :].strip() if last[1] else ""
    return after or _THINKING.sub("", text).strip()
