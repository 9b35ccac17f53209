"""Questions with gold answers that can be read: any source → a tuple of `Question`, with what was left out and why.

Rows come from `rows`, what is special about public sets from `sources`. Every gold answer goes through
`answers.extractor.parse_gold` here, so that a reward or an evaluation never meets one it cannot read. Rows are counted from 1.
Torch-free.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_portable.answers.extractor import answer_text, parse_gold
from grpo_portable.answers.markup import boxes
from grpo_portable.data.rows import Rows, Stream, rows_of
from grpo_portable.data.sources import Known, left_out, problem, recognise
from grpo_portable.errors import DataError

QUESTION_COLUMNS = ("question", "problem", "prompt", "input")
ANSWER_COLUMNS = ("answer", "expected_answer", "solution", "gold", "target", "label")
A_ROW = '{"question": "What is 2 + 3?", "answer": "5"}'
WORKING_COLUMNS = ("solution", "generated_solution", "rationale", "reasoning")


@dataclass(frozen=True)
class Question:
    """`gold` is canonical text as it is compared (an expression, if asked for); `answer` is the source's own text."""

    id: str
    question: str
    gold: str
    answer: str
    working: str = ""  # the worked solution, where it stands in a column of its own


@dataclass(frozen=True)
class Loaded:
    """`total` rows in the source; `skipped` holds (row number, reason) of the rows that were looked at and cannot be used."""

    questions: tuple[Question, ...]
    skipped: tuple[tuple[int, str], ...]
    total: int


def load_questions(
    source: str,
    *,
    config: str = "",
    split: str = "train",
    question_column: str = "auto",
    answer_column: str = "auto",
    style: str = "gsm8k_marker",
    limit: int = 0,
    seed: int = 0,
    symbolic: bool = False,
) -> Loaded:
    """The usable questions of one split, in the order of the source; at most `limit` of them (0: all), drawn by `seed`.

    `symbolic` keeps gold answers that are no numbers, as text. Public sets are read as `sources` knows them. Raises DataError
    when the source cannot be found or read, has no question or answer column, or holds no usable row.
    """
    rows = rows_of(source, config=config, split=split, limit=limit, seed=seed)
    reader = _reader(rows, source, question_column, answer_column, style, symbolic)
    kept: list[tuple[int, Question]] = []
    skipped: list[tuple[int, str]] = []
    seen: dict[str, int] = {}
    looked_at = 0
    for index, row in _in_order(rows, limit, seed):
        looked_at += 1
        read = reader.question(row, index + 1, split)
        if isinstance(read, Question) and reader.known is not None and reader.known.repeated:
            first = seen.setdefault(normalised(read.question), index + 1)
            read = read if first == index + 1 else f"the same problem as row {first}"
        if isinstance(read, str):
            skipped.append((index + 1, read))
        else:
            kept.append((index, read))
        if limit and len(kept) == limit:
            break
    if not kept:
        row_number, reason = min(skipped)
        raise DataError(
            f"none of the {len(skipped)} rows of `{source}` ({split}) can be used",
            because=f"row {row_number}: {reason}",
            help=f"check answer_style ({style}), question_column ({reader.question_column}) and "
            f"answer_column ({reader.answer_column})",
        )
    total = looked_at if isinstance(rows, Stream) else len(rows)
    return Loaded(tuple(q for _, q in sorted(kept, key=lambda pair: pair[0])), tuple(sorted(skipped)), total)


def normalised(question: str) -> str:
    """A question's text for comparison: compatibility forms folded, case and white space ignored."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def overlap(train: Sequence[Question], held_out: Sequence[Question]) -> tuple[tuple[str, str], ...]:
    """(training id, held-out id) of the held-out questions that also stand in the training data."""
    seen = {normalised(q.question): q.id for q in reversed(train)}
    return tuple((seen[key], q.id) for q in held_out if (key := normalised(q.question)) in seen)


def refuse_overlap(train: Sequence[Question], held_out: Sequence[Question], both: str | None = None) -> None:
    """Raise DataError when a held-out question is trained on: its score would show memory.

    `both`: the name of the one set that both were read from.
    """
    shared = overlap(train, held_out)
    if shared:
        first_train, first_held_out = shared[0]
        example = f"for example {first_held_out} is the same question as {first_train}"
        one = f"both are read from `{both}`: eval_data is the training data where no other is named"
        others = "name other questions: --set eval_data=FILE" if both else "choose another eval_data or eval_split"
        left = len({normalised(q.question) for q in train} - {normalised(q.question) for q in held_out})
        drop = f", or leave these out of the training, where {left:,} are left: --set on_overlap=drop" if left else ""
        raise DataError(
            f"{len(shared)} of the {len(held_out)} held-out questions also stand in the training data",
            because=one if both else example,
            help=others + drop,
        )


@dataclass(frozen=True)
class _Reader:
    """How the rows of one source become questions."""

    question_column: str
    answer_column: str
    working_column: str | None
    style: str
    symbolic: bool
    known: Known | None

    def question(self, row: Any, number: int, split: str) -> Question | str:
        """The row as a Question, or the reason why it cannot be used."""
        if not isinstance(row, Mapping):
            return _no_object(row)
        if reason := left_out(row, self.known):
            return reason
        text, answer = _text(_pick(row, self.question_column)), _pick(row, self.answer_column)
        if not text.strip():
            return f"column `{self.question_column}` is empty"
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            return f"column `{self.answer_column}` is empty"
        working = _text(_pick(row, self.working_column)) if self.working_column else ""
        torn = {self.question_column: text, self.answer_column: str(answer), self.working_column: working}
        if column := next((name for name, value in torn.items() if _torn(value)), None):
            return f"column `{column}` holds half a character (a lone surrogate)"
        gold = parse_gold(answer, self.style) or (expression(answer) if self.symbolic else None)
        if gold is None:
            return f"gold answer {_shortened(str(answer))!r} cannot be read" + (
                "" if self.symbolic else " as a number (the reward symbolic_correctness compares expressions)"
            )
        return Question(f"{split}-{number}", problem(text, self.known), gold, str(answer), working)


def _no_object(row: Any) -> str:
    """Why a row is none, or holds nothing."""
    if row is None:
        return "the line is not a JSON object"
    return "it is empty" if isinstance(row, Mapping) else f"the row is {type(row).__name__}, not an object"


def expression(answer: Any) -> str | None:
    """A gold answer that is no number as text: what stands in its last box, after its marker or label, or all of it."""
    if not isinstance(answer, str):
        return None
    found = boxes(answer)
    text = answer[slice(*found[-1])] if found else None
    text = text or answer_text(answer, "gsm8k_marker") or answer_text(answer, "free") or answer
    return text.strip().strip("$").strip() or None


def _in_order(rows: Rows, limit: int, seed: int) -> Iterator[tuple[int, Any]]:
    """(index, row): a stream as it comes, other rows in their order, or shuffled by seed when only some are wanted."""
    if isinstance(rows, Stream):
        yield from enumerate(rows)
        return
    order = list(range(len(rows)))
    if 0 < limit < len(rows):
        random.Random(f"questions {seed}").shuffle(order)
    for index in order:
        yield index, rows[index]


def _torn(text: str) -> bool:
    """Whether the text cannot be written as UTF-8: JSON escapes may hold one half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _shortened(text: str, limit: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else "… " + text[-limit:]


def _text(value: Any) -> str:
    """A question as text: the last user message when the column holds a conversation."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and isinstance(value[-1], Mapping):
        users = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
        return users[-1] if users and isinstance(users[-1], str) else ""
    return "" if value is None else str(value)


def _pick(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; `a.b` looks into a nested object."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _reader(rows: Rows, source: str, question: str, answer: str, style: str, symbolic: bool) -> _Reader:
    """Columns as named, else as the public set has them, else guessed; DataError lists what there is."""
    names: dict[str, None] = {}
    first = rows.first(100) if isinstance(rows, Stream) else [rows[i] for i in range(min(100, len(rows)))]
    for row in first:
        names.update(dict.fromkeys(str(k) for k in row) if isinstance(row, Mapping) else {})
    if not first:
        raise DataError(f"`{source}` holds no rows", help=f"a row looks like this: {A_ROW}")
    if not names:
        because = f"row 1: {_no_object(first[0])}"
        raise DataError(f"`{source}` holds no row that can be read", because=because, help=f"one a line: {A_ROW}")
    known = recognise(source, names)
    by_lower = {name.lower(): name for name in reversed(names)}
    found = []
    for wanted, of_set, guesses, kind in (
        (question, known.question if known else "", QUESTION_COLUMNS, "question"),
        (answer, known.answer if known else "", ANSWER_COLUMNS, "answer"),
    ):
        name: str | None = wanted
        if wanted == "auto" and of_set and of_set.split(".")[0] in names:
            name = of_set
        elif wanted == "auto":
            name = next((by_lower[k] for k in guesses if k in by_lower), None)
        if name is None or name.split(".")[0] not in names:
            raise DataError(
                f"`{source}` has no {kind} column" + (f" `{wanted}`" if wanted != "auto" else ""),
                because=f"its columns are {', '.join(names) or 'none'}",
                help=f"name it with {kind}_column"
                + (f", or call it {' or '.join(guesses[:2])}" if wanted == "auto" else ""),
            )
        found.append(name)
    working = next((by_lower[k] for k in WORKING_COLUMNS if k in by_lower and by_lower[k] not in found), None)
    return _Reader(found[0], found[1], working, style, symbolic, known)
