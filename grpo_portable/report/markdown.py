"""Markdown pieces that any text can be put into: tables, code spans, shortened text. Values → lines, nothing is read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """A pipe table, padded so that it reads as plain text too; columns in `right` are right-aligned."""
    cells = [[_cell(text) for text in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    return [
        "| "
        + " | ".join(t.rjust(w) if i in right else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in (cells[0], rule, *cells[1:])
    ]


def letters(names: Sequence[str], most: int) -> tuple[list[str], list[str]]:
    """Names as they are while none is longer than `most`; else a, b, ... for columns, and the lines that say whose they are."""
    if max(map(len, names), default=0) <= most:
        return list(names), []
    short = [chr(ord("a") + i) if i < 26 else f"r{i + 1}" for i in range(len(names))]
    return short, [f"{letter}: {name}" for letter, name in zip(short, names, strict=True)]


def wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Lines broken at `width` columns; rows of tables stay whole, and what follows a list's dash is indented."""
    broken: list[str] = []
    for line in lines:
        if line.startswith("|") or len(line) <= width:
            broken.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            broken += textwrap.wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return broken


def code(text: str) -> str:
    """A code span of any text: line ends become `⏎`, the fence is longer than any run of backticks inside."""
    flat = re.sub(r"\s*\n\s*", " ⏎ ", text.strip()) or " "
    fence = "`" * (max((len(run) for run in re.findall(r"`+", flat)), default=0) + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def block(text: str) -> list[str]:
    """A fenced block of any text, its own line ends kept."""
    fence = "`" * max(3, max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return [fence, *text.rstrip("\n").split("\n"), fence]


def folded(title: str, lines: Iterable[str]) -> list[str]:
    """Lines behind a title that opens on a click; all of it is there where HTML is not shown."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def plain(text: str) -> str:
    """Text from outside as one line that no markdown or HTML in it can change."""
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", " ".join(text.split()))


def shorten(text: str, most: int, keep_end: bool = False) -> str:
    """At most about `most` characters; `keep_end` cuts out the middle instead of the end, where answers stand."""
    text = text.strip()
    if len(text) <= most:
        return text
    if not keep_end:
        return text[: most - 1].rstrip() + "…"
    head = most // 3
    return f"{text[:head].rstrip()} … {text[len(text) - (most - head - 3) :].lstrip()}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
