"""One page for each wall code: what it means, the rule and its source, what helps. `docs/walls.md` is made from them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from doctor.pages import CARDS, TORCH, Page
from doctor.pages_engines import ENGINES
from doctor.pages_stack import STACK

_WIDTH = 80
PAGES: Mapping[str, Page] = {**CARDS, **TORCH, **ENGINES, **STACK}
CODES: Mapping[str, str] = {code: page.title for code, page in PAGES.items()}
ROOMS: Mapping[str, Mapping[str, Page]] = {
    "Cards and FP8": CARDS,
    "torch, driver, CUDA": TORCH,
    "vLLM and version locks": ENGINES,
    "bitsandbytes and the rest": STACK,
}


def page(code: str) -> str:
    """The page of a wall as plain text, 80 columns. KeyError for an unknown code."""
    p = PAGES[code]
    parts = [
        f"{code}: {p.title}",
        "",
        _wrapped(f"Closes {p.closes}."),
        "",
        _wrapped(p.what),
        "",
        _wrapped(f"Rule: {p.rule}"),
        "",
        "What helps:",
    ]
    parts += [_wrapped(text, "  - ", "    ") for text in p.do]
    if p.dont:
        parts += ["", "What does not help:", _wrapped(p.dont, "  - ", "    ")]
    return "\n".join(parts)


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def markdown() -> str:
    """All pages as one Markdown document: `docs/walls.md`."""
    lines = [
        "# Walls",
        "",
        "Every wall `grpo-doctor` knows. Made by `python -m doctor.explain`; edit doctor/pages*.py instead.",
        "",
    ]
    for room, pages in ROOMS.items():
        lines += [f"## {room}", ""]
        for code, p in pages.items():
            lines += [
                f"### {code}",
                "",
                f"**{p.title[0].upper() + p.title[1:]}.** Closes {p.closes}.",
                "",
                p.what,
                "",
                f"*Rule:* {p.rule}",
                "",
            ]
            lines += [f"- {text}" for text in p.do]
            lines += [f"- Does not help: {p.dont}"] if p.dont else []
            lines += [""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
