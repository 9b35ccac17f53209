"""Where questions come from: built in, a file, a folder with one file a split, or a data set of the hub → rows as objects.

Files: JSONL, JSON, CSV, TSV or Parquet, text also gzipped. Knows nothing of questions and golds (`questions.py`). Torch-free.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_portable.data.sources import recognise
from grpo_portable.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
BUILT_IN = "arithmetic"
BUILT_IN_TRAIN_COUNT = 4000
STREAM_BUFFER = 10_000  # rows among which a stream is shuffled
# a stream ends after so many rows for each that was wanted: a filter that nothing passes must end
LOOKED_AT_PER_ROW = 50


@dataclass
class Stream:
    """Rows that are read only as far as they are asked for; `first` looks ahead without taking."""

    rest: Iterator[Any]
    limit: int
    ahead: tuple[Any, ...] = ()

    def first(self, count: int) -> Sequence[Any]:
        if len(self.ahead) < count:
            self.ahead += tuple(islice(self.rest, count - len(self.ahead)))
        return self.ahead[:count]

    def __iter__(self) -> Iterator[Any]:
        taken = 0
        while taken < self.limit:
            if self.ahead:
                row, self.ahead = self.ahead[0], self.ahead[1:]
            else:
                try:
                    row = next(self.rest)
                except StopIteration:
                    return
            taken += 1
            yield row


Rows = Sequence[Any] | Stream


def rows_of(source: str, *, config: str = "", split: str = "train", limit: int = 0, seed: int = 0) -> Rows:
    """The rows of one split, as objects; None for a line that is no JSON. A set too large to be fetched is a Stream.

    DataError when the source is not there, cannot be read or cannot be had.
    """
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
    known = recognise(source)
    config = config or (known.config if known else "")
    if known and known.rows:
        return _stream(source, config, split, known.rows, limit, seed)
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
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"`{path}` cannot be read", because=str(error)) from error
    if suffix in (".csv", ".tsv"):
        return _table_rows(text, "\t" if suffix == ".tsv" else ",")
    if suffix == ".json" and re.match(r"\s*\[", text):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"`{path}` is not JSON", because=str(error)) from error
    return [_json_or_none(line) for line in text.split("\n") if line.strip()]


def _table_rows(text: str, delimiter: str) -> Sequence[Any]:
    # 131,072 characters otherwise: worked answers may be longer
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))


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


def _stream(source: str, config: str, split: str, count: int, limit: int, seed: int) -> Stream:
    """A large set's rows in a shuffled order that a seed fixes, read only as far as they are asked for."""
    if not limit:
        raise DataError(
            f"`{source}` holds {count:,} rows",
            because="it is read as a stream, and without a limit all of it would be fetched",
            help="set train_limit (eval_limit for held-out questions), for example 4000",
        )
    loaded = _data_set_rows(source, config, split, streaming=True)
    return Stream(iter(loaded.shuffle(seed=seed, buffer_size=STREAM_BUFFER)), 1000 + LOOKED_AT_PER_ROW * limit)


def _data_set_rows(source: str, config: str, split: str, *, streaming: bool = False) -> Any:
    """The rows of a data set of the hub, or of a folder in its layout. No code of a data set is ever run."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"`{source}` needs the package datasets", help="pip install 'grpo-portable[train]', or give a JSONL file"
        ) from error
    try:
        return datasets.load_dataset(source, config or None, split=split, **({"streaming": True} if streaming else {}))
    # `datasets` raises its own, pyarrow's, the hub client's and the network library's errors here: all mean "not to be had"
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(
            f"data set `{source}`" + (f" ({config})" if config else "") + f", split {split}, could not be loaded",
            because=first_line,
            help="without a network give a local file instead: --data questions.jsonl, one "
            '{"question": …, "answer": …} a line, or a folder with train.jsonl and test.jsonl',
        ) from error
