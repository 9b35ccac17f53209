"""Questions with gold answers that can be read: any source → a tuple of `Question`, with what was left out and why.

Sources: `arithmetic` (the built-in problems), a JSONL, JSON, CSV, TSV or Parquet file (also gzipped text), a folder with
one file a split, or a data set of the hub. Every gold answer goes through `answers.parse_gold` here, so that a reward or
an evaluation never meets one it cannot read. Rows are counted from 1. Torch-free.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.answers import parse_gold
from grpo_portable.errors import DataError

QUESTION_COLUMNS = ("question", "problem", "prompt", "input")
ANSWER_COLUMNS = ("answer", "expected_answer", "solution", "gold", "target", "label")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
BUILT_IN = "arithmetic"
BUILT_IN_TRAIN_COUNT = 4000


@dataclass(frozen=True)
class Question:
    """`gold` is canonical text as `answers` compares it; `answer` is the source's own text, working included."""

    id: str
    question: str
    gold: str
    answer: str


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
) -> Loaded:
    """The usable questions of one split, in the order of the source; at most `limit` of them (0: all), drawn by `seed`.

    Raises DataError when the source cannot be found or read, has no question or answer column, or holds no usable row.
    """
    rows = _rows(source, config, split, limit)
    if len(rows) == 0:
        raise DataError(f"`{source}` ({split}) holds no rows")
    question_column, answer_column = _columns(rows, source, question_column, answer_column)
    order = list(range(len(rows)))
    if 0 < limit < len(rows):
        random.Random(f"questions {seed}").shuffle(order)
    kept: list[tuple[int, Question]] = []
    skipped: list[tuple[int, str]] = []
    for index in order:
        if limit and len(kept) == limit:
            break
        read = _question(rows[index], index + 1, split, question_column, answer_column, style)
        if isinstance(read, str):
            skipped.append((index + 1, read))
        else:
            kept.append((index, read))
    if not kept:
        row, reason = min(skipped)
        raise DataError(
            f"none of the {len(skipped)} rows of `{source}` ({split}) can be used",
            because=f"row {row}: {reason}",
            help=f"check answer_style ({style}), question_column ({question_column}) and answer_column ({answer_column})",
        )
    return Loaded(tuple(q for _, q in sorted(kept)), tuple(sorted(skipped)), len(rows))


def normalised(question: str) -> str:
    """A question's text for comparison: compatibility forms folded, case and white space ignored."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def overlap(train: Sequence[Question], held_out: Sequence[Question]) -> tuple[tuple[str, str], ...]:
    """(training id, held-out id) of the held-out questions that also stand in the training data."""
    seen = {normalised(q.question): q.id for q in reversed(train)}
    return tuple((seen[key], q.id) for q in held_out if (key := normalised(q.question)) in seen)


def refuse_overlap(train: Sequence[Question], held_out: Sequence[Question]) -> None:
    """Raise DataError when a held-out question is trained on: its score would show memory."""
    shared = overlap(train, held_out)
    if shared:
        first_train, first_held_out = shared[0]
        raise DataError(
            f"{len(shared)} of the {len(held_out)} held-out questions also stand in the training data",
            because=f"for example {first_held_out} is the same question as {first_train}",
            help="choose another eval_data or eval_split, or remove these rows from the training data",
        )


def _question(
    row: Any, number: int, split: str, question_column: str, answer_column: str, style: str
) -> Question | str:
    """The row as a Question, or the reason why it cannot be used."""
    if not isinstance(row, Mapping):
        return "the line is not a JSON object" if row is None else f"the row is {type(row).__name__}, not an object"
    question, answer = _text(_pick(row, question_column)), _pick(row, answer_column)
    if not question.strip():
        return f"column `{question_column}` is empty"
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return f"column `{answer_column}` is empty"
    gold = parse_gold(answer, style)
    if gold is None:
        return f"gold answer {_shortened(str(answer))!r} cannot be read"
    return Question(f"{split}-{number}", question, gold, str(answer))


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


def _columns(rows: Sequence[Any], source: str, question: str, answer: str) -> tuple[str, str]:
    """The two columns' names, guessed where `auto`; DataError lists what there is."""
    names: dict[str, None] = {}
    for index in range(min(100, len(rows))):
        row = rows[index]
        names.update(dict.fromkeys(str(k) for k in row) if isinstance(row, Mapping) else {})
    found = []
    for wanted, known, kind in ((question, QUESTION_COLUMNS, "question"), (answer, ANSWER_COLUMNS, "answer")):
        by_lower = {name.lower(): name for name in reversed(names)}
        name = wanted if wanted != "auto" else next((by_lower[k] for k in known if k in by_lower), None)
        if name is None or name.split(".")[0] not in names:
            raise DataError(
                f"`{source}` has no {kind} column" + (f" `{wanted}`" if wanted != "auto" else ""),
                because=f"its columns are {', '.join(names) or 'none'}",
                help=f"name it with {kind}_column"
                + (f", or call it {' or '.join(known[:2])}" if wanted == "auto" else ""),
            )
        found.append(name)
    return found[0], found[1]


def _rows(source: str, config: str, split: str, limit: int) -> Sequence[Any]:
    if source == BUILT_IN:
        from grpo_portable.embedded import problems

        default = BUILT_IN_TRAIN_COUNT if split == "train" else problems.REPORT_COUNT
        return problems.generate(split, max(default, limit), problems.REPORT_SEED)
    path = Path(source).expanduser()
    if path.is_file():
        return _file_rows(path)
    if path.is_dir():
        file = next((f for s in SUFFIXES for f in (path / f"{split}{s}", path / f"{split}{s}.gz") if f.is_file()), None)
        return _file_rows(file) if file else _data_set_rows(source, config, split)
    if _suffix(path) in SUFFIXES or source.startswith((".", "/", "~")):
        raise DataError(f"data file `{source}` is not there", help="check the path; hub data sets are named owner/name")
    return _data_set_rows(source, config, split)


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _file_rows(path: Path) -> Sequence[Any]:
    suffix = _suffix(path)
    if suffix not in SUFFIXES:
        raise DataError(f"`{path}` is of a kind that is not known", help=f"give one of {', '.join(SUFFIXES)}")
    try:
        if suffix == ".parquet":
            return _parquet_rows(path)
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix.lower() == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` cannot be read", because=str(error)) from error
    if suffix in (".csv", ".tsv"):
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ","))
    if suffix == ".json" and re.match(r"\s*\[", text):
        try:
            return json.loads(text)
        except ValueError as error:
            raise DataError(f"`{path}` is not JSON", because=str(error)) from error
    return [_json_or_none(line) for line in text.split("\n") if line.strip()]


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _parquet_rows(path: Path) -> Sequence[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"`{path}` needs pyarrow to be read",
            help="install the training packages: pip install 'grpo-portable[train]'",
        ) from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"`{path}` is not a Parquet file", because=str(error)) from error


def _data_set_rows(source: str, config: str, split: str) -> Sequence[Any]:
    """The rows of a data set of the hub, or of a folder in its layout. No code of a data set is ever run."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"`{source}` needs the package datasets", help="pip install 'grpo-portable[train]', or give a JSONL file"
        ) from error
    try:
        return datasets.load_dataset(source, config or None, split=split)
    # `datasets` raises its own, pyarrow's, the hub client's and the network library's errors here: all mean "not to be had"
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"data set `{source}`" + (f" ({config})" if config else "") + f", split {split}, could not be loaded",
            because=first_line,
            help="without a network give a local file instead: --data questions.jsonl, one "
            '{"question": …, "answer": …} a line, or a folder with train.jsonl and test.jsonl',
        ) from error
