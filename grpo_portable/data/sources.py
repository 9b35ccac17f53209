"""Public question sets by name, with what one must know to read them: configuration, columns, which rows count, what repeats.

A set is recognised by the last part of its name (hub id or folder), else by its columns, so that a local copy is read as the
hub's. What a recipe names itself always wins. Knows nothing of how files are read (`questions.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Known:
    """One public set. Empty text: nothing special.

    `kept` maps a column to the one value of the rows that count. `wrapped` finds the problem (group 1) inside a prompt that
    carries instructions of its own. `repeated`: a problem stands there several times, once a solution. `rows`: so many that it
    is read as a stream and only as far as a limit asks.
    """

    name: str
    config: str = ""
    split: str = "train"
    question: str = ""
    answer: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)
    wrapped: re.Pattern[str] | None = None
    repeated: bool = False
    rows: int = 0
    columns: frozenset[str] = frozenset()  # what else a local copy is known by; empty: by its name alone


KNOWN = (
    # gold on the last line after `#### `, with commas; calculator annotations <<3*4=12>> inside the working
    Known("openai/gsm8k", config="main", question="question", answer="answer"),
    # prompt is the bare problem; the gold is a number, in some copies after `Answer: ` and between dollar signs
    Known(
        "open-r1/DAPO-Math-17k-Processed",
        config="en",
        question="prompt",
        answer="solution",
        columns=frozenset({"prompt", "solution", "reward_model", "source_prompt"}),
    ),
    # the set before it: each problem a hundred times, in a message with instructions for an answer line of its own
    Known(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        question="prompt",
        answer="reward_model.ground_truth",
        wrapped=re.compile(
            r"\A.{0,60}math problem step by step\..{0,240}?\n\n(.*?)\s*\n\nRemember to put your answer.*\Z", re.S
        ),
        repeated=True,
    ),
    # 3.2 million solutions of 306 thousand problems; only rows with an answer found in the forum have a gold to trust
    Known(
        "nvidia/OpenMathReasoning",
        split="cot",
        question="problem",
        answer="expected_answer",
        kept={"problem_type": "has_answer_extracted"},
        repeated=True,
        rows=3_200_000,
        columns=frozenset({"problem", "expected_answer", "generated_solution", "problem_type"}),
    ),
    # LaTeX golds, a third of them no numbers; one split
    Known(
        "HuggingFaceH4/MATH-500",
        split="test",
        question="problem",
        answer="answer",
        columns=frozenset({"problem", "answer", "solution", "subject", "level"}),
    ),
)


def recognise(source: str, columns: Collection[str] = ()) -> Known | None:
    """The public set a source is, or is a copy of; None for any other."""
    name = re.split(r"[/\\]", source.rstrip("/\\"))[-1].casefold()
    for known in KNOWN:
        if known.name.split("/")[1].casefold() == name:
            return known
    return next((known for known in KNOWN if known.columns and known.columns <= set(columns)), None)


def left_out(row: Mapping[str, Any], known: Known | None) -> str | None:
    """Why a row of the set does not count, None when it does."""
    for column, wanted in (known.kept if known else {}).items():
        if column in row and row[column] != wanted:
            return f"{column} is {row[column]!s}, not {wanted}"
    return None


def problem(text: str, known: Known | None) -> str:
    """The problem without instructions that the set wraps around it."""
    found = known.wrapped.match(text) if known and known.wrapped else None
    return found[1] if found else text
