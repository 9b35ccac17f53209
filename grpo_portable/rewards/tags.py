"""The four tag rewards, `<start_working_out> … <end_working_out> <SOLUTION> … </SOLUTION>`, in both published sets of values.

Set b goes with a Qwen3-8B FP8 recipe, set c with a Llama-3.2 FP8 recipe (and the public notebooks before it). On
well-formed text they pay what was published: 11.5 and 13.0 for a perfect answer. What the published functions get
wrong is listed in docs/rewards.md, each with a test. The chat template may have opened the reasoning, so a completion
need not hold `<start_working_out>`. Every function is a find, a count or a read: linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from grpo_portable.answers.extractor import (
    CLOSE_SOLUTION,
    END_WORKING,
    OPEN_SOLUTION,
    answer_text,
    read,
    read_gold,
    spoken_text,
    tags_in_order,
)
from grpo_portable.rewards.setting import Reward, Setting, per_sample

TAGS = (END_WORKING, OPEN_SOLUTION, CLOSE_SOLUTION)


@dataclass(frozen=True)
class Values:
    """One published set. `near`: (largest relative distance, value), nearest first."""

    near: tuple[tuple[Fraction, float], ...]
    number_equal: float
    number_different: float
    number_missing: float
    ends_text: bool  # exact format: nothing may follow the solution
    exact: float = 3.0
    tag_once: float = 0.5
    tag_otherwise: float = -1.0
    answer_equal: float = 5.0
    answer_different: float = -2.5
    answer_unreadable: float = -4.5
    answer_missing: float = -2.0


B = Values(((Fraction(1, 20), 2.5),), number_equal=2.0, number_different=0.0, number_missing=0.0, ends_text=False)
C = Values(
    ((Fraction(1, 10), 2.0), (Fraction(1, 5), 1.5)),
    number_equal=3.5,
    number_different=-1.5,
    number_missing=-2.5,
    ends_text=True,
)


def exact_format(completion: Any, gold: Any, values: Values) -> float:
    """`exact` for reasoning that is not empty, its end tag, then one solution that is not empty, each tag once; else 0."""
    text = (spoken_text(completion) or "").rstrip()
    if not tags_in_order(text) or (values.ends_text and not text.endswith(CLOSE_SOLUTION)):
        return 0.0
    return values.exact


def approximate_format(completion: Any, gold: Any, values: Values) -> float:
    """For each of the three tags `tag_once` if it occurs once and in its place, else `tag_otherwise`.

    A tag is out of place when another stands on its wrong side; both solution tags are when nothing is between them.
    """
    text = spoken_text(completion) or ""
    at = [text.index(tag) if text.count(tag) == 1 else None for tag in TAGS]
    good = [_in_place(at, index) for index in range(len(TAGS))]
    if good[1] and good[2] and not text[(at[1] or 0) + len(OPEN_SOLUTION) : at[2]].strip():
        good[1] = good[2] = False
    return sum(values.tag_once if ok else values.tag_otherwise for ok in good)


def answer(completion: Any, gold: Any, values: Values, *, near: bool = False) -> float | None:
    """What the solution's number is worth; None when the gold answer cannot be read.

    `near` pays the published partial credit for wrong numbers close to the gold answer.
    """
    truth = read_gold(gold, "tagged").value
    if truth is None:
        return None
    if not (answer_text(completion, "tagged") or "").strip():
        return values.answer_missing
    value = read(completion, "tagged").value
    if value is None:
        return values.answer_unreadable
    if value == truth:
        return values.answer_equal
    if near:
        for distance, reward in values.near:
            if abs(value - truth) <= distance * abs(truth):
                return reward
    return values.answer_different


def number(completion: Any, gold: Any, values: Values) -> float | None:
    """The second look at the number: equal, different (also digits that state no one number), or none at all."""
    truth = read_gold(gold, "tagged").value
    if truth is None:
        return None
    inside = answer_text(completion, "tagged") or ""
    if not any(c.isdigit() for c in inside):
        return values.number_missing
    return values.number_equal if read(completion, "tagged").value == truth else values.number_different


def _in_place(at: list[int | None], index: int) -> bool:
    here = at[index]
    if here is None:
        return False
    return all(other is None or (other < here) == (i < index) for i, other in enumerate(at) if i != index)


def _makers() -> Mapping[str, Callable[[Setting], Reward]]:
    scores: dict[str, Callable[..., float | None]] = {
        "exact": exact_format,
        "approximate": approximate_format,
        "answer": answer,
        "answer_near": partial(answer, near=True),
        "number": number,
    }

    def maker(name: str, score: Callable[..., float | None], values: Values) -> Callable[[Setting], Reward]:
        return lambda setting: per_sample(name, partial(score, values=values))

    return {
        f"tags_{letter}_{part}": maker(f"tags_{letter}_{part}", score, values)
        for letter, values in (("b", B), ("c", C))
        for part, score in scores.items()
    }


MAKERS = _makers()
