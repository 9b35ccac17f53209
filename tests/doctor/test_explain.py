"""Pages: one for each code, readable at 80 columns, and docs/walls.md made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor.explain import CODES, PAGES, ROOMS, markdown, page


@pytest.mark.parametrize("code", CODES)
def test_a_page_says_what_why_and_what_helps(code: str) -> None:
    text = page(code)
    assert text.splitlines()[0] == f"{code}: {CODES[code]}"
    assert "\nCloses " in text and "\nRule: " in text and "\nWhat helps:\n  - " in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text


def test_codes_are_stable_in_form_and_told_once() -> None:
    assert all(code == code.upper() and " " not in code and "-" in code for code in CODES)
    assert sum(len(pages) for pages in ROOMS.values()) == len(PAGES)
    assert len(set(CODES.values())) == len(CODES)


def test_an_unknown_code_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        page("NO-SUCH-WALL")


def test_the_document_is_made_from_the_pages() -> None:
    document = Path(__file__).parents[2] / "docs" / "walls.md"
    assert document.read_text() == markdown(), "run: python -m doctor.explain > docs/walls.md"
