"""Rewards that check the answer and its format with the evaluation's own extractor: the answer, and `#### n`.

Values are exact in binary: then a group whose rewards are equal has a spread of exactly zero.
"""

from __future__ import annotations

from typing import Any

from grpo_portable.answers import judge
from grpo_portable.answers.extractor import has_marker
from grpo_portable.rewards.setting import Reward, Setting, per_sample

CORRECT = 1.0
FORMAT = 0.25  # well below CORRECT: a right answer in no format beats a wrong one in the right format


def correctness(setting: Setting) -> Reward:
    """1.0 when the answer equals the gold answer exactly, else 0.0; None when the gold answer is no number."""

    def score(completion: Any, gold: Any) -> float | None:
        return _paid(judge.correct(completion, gold, setting.style)) if judge.is_number(gold, setting.style) else None

    return per_sample("correctness", score)


def marker_format(setting: Setting) -> Reward:
    """0.25 when the format is kept (one marker, last line, plain number, nothing behind it), else 0.0. Blind to the value."""

    def score(completion: Any, gold: Any) -> float:
        return FORMAT if has_marker(completion, setting.style) else 0.0

    return per_sample("marker_format", score)


def symbolic_correctness(setting: Setting) -> Reward:
    """`correctness`, and for gold answers that are no numbers equality by math-verify (extra `math`) under a time limit.

    1.0 or 0.0, as the evaluation judges; None when neither reader can read the gold answer or the time runs out. RecipeError
    without math-verify.
    """
    from grpo_portable.answers.symbolic import SymbolicChecker

    SymbolicChecker().require()

    def score(completion: Any, gold: Any) -> float | None:
        readable = isinstance(gold, str) or judge.is_number(gold, setting.style)
        return _paid(judge.correct(completion, gold, setting.style)) if readable else None

    return per_sample("symbolic_correctness", score)


def _paid(right: bool | None) -> float | None:
    return None if right is None else CORRECT if right else 0.0
