"""Links and file names in the markdown pages lead to something that is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# a code span that is the path of a file
NAMED = re.compile(r"`((?:docs|doctor|grpo_portable|recipes|reports|tests)/[\w./-]*\.\w+)`")
HEADING = re.compile(r"^#+ +(.*)$", re.M)
FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def pages():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    found = listed.stdout.split() if listed.returncode == 0 else []
    return [ROOT / name for name in found] or sorted([*ROOT.glob("*.md"), *ROOT.glob("[dr]*/**/*.md")])


def anchors(page):
    """The headings of a page as GitHub names them."""
    titles = HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def missing(page):
    """What a page's links and code spans name that is not there."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link
    yield from (name for name in NAMED.findall(text) if not (ROOT / name).exists())


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(missing(page)) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A title, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-title-with-code) [c](https://x.y/z) ![d](none.png)\n[e](there.md#none) `docs/none.md`\n"
        "```\n[f](none.md)\n```\n"
    )
    assert list(missing(page)) == ["none.png", "there.md#none", "docs/none.md"]
