"""Right or wrong, for every gold answer: numbers by the extractor, expressions by math-verify. For evaluation and scoring.

Numbers never go to math-verify. Without it, or when it finds no verdict in time, an expression's answer is None: not known.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import Any

from grpo_portable.answers import extractor
from grpo_portable.answers.symbolic import MAX_CHARACTERS, SymbolicChecker

_MARKS = r"[\s`]|\*\*|(?<!\\)\$"
_AROUND = re.compile(rf"\A(?:{_MARKS}|:|\\\[)+|(?:{_MARKS}|(?<!\\right)\.|\\\])+\Z")


def is_number(gold: Any, style: str) -> bool:
    """Whether a gold answer is compared as a number."""
    return extractor.read_gold(gold, style).value is not None


def correct(completion: Any, gold: Any, style: str) -> bool | None:
    """Whether the completion's answer, where the style wants it, equals the gold answer; None when nobody can say."""
    if is_number(gold, style) or not isinstance(gold, str):
        return extractor.is_correct(completion, gold, style)
    return _equal(extractor.answer_text(completion, style), gold)


def lenient(completion: Any, gold: Any, style: str) -> bool | None:
    """The same for an answer in any format."""
    if is_number(gold, style) or not isinstance(gold, str):
        return extractor.is_correct_lenient(completion, gold, style)
    return _equal(_any_text(completion, style), gold)


def extracted(completion: Any, gold: Any, style: str) -> str | None:
    """The answer that was read: a canonical number, or for an expression its text."""
    if is_number(gold, style):
        return extractor.extract(completion, style)
    return extractor.extract(completion, style) or _stripped(extractor.answer_text(completion, style))


def extracted_lenient(completion: Any, gold: Any, style: str) -> str | None:
    """The same for an answer in any format."""
    if is_number(gold, style):
        return extractor.extract_lenient(completion, style)
    return _stripped(_any_text(completion, style)) or extractor.extract_lenient(completion, style)


def _any_text(completion: Any, style: str) -> str | None:
    for way in dict.fromkeys((style, "gsm8k_marker", "tagged", "boxed", "free")):
        if text := _stripped(extractor.answer_text(completion, way)):
            return text
    return None


def _stripped(text: str | None) -> str | None:
    """An expression without what a sentence puts around it: math delimiters, bold, code, a colon before, a full stop behind."""
    text = (text or "").strip()
    return text if len(text) > MAX_CHARACTERS else _AROUND.sub("", text) or None


def _equal(answer: str | None, gold: str) -> bool | None:
    checker = _checker()
    return None if checker is None else checker.equal(_stripped(answer) or "", _stripped(gold) or "")


@cache
def _checker() -> SymbolicChecker | None:
    """One child process for all questions of this one; it ends with it, when its input closes."""
    return SymbolicChecker() if importlib.util.find_spec("math_verify") is not None else None
