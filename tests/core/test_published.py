"""What is published under reports/ comes from the answers beside it, and README's numbers from what is published."""

import json
import re
import shutil
from pathlib import Path

import pytest

from grpo_portable.report import page as report_page
from grpo_portable.report.compare import compare
from grpo_portable.report.side_by_side import side_by_side
from grpo_portable.run.folder import open_run, read_lines
from grpo_portable.scores import scoring, windows

ROOT = Path(__file__).parents[2]
RUNS = sorted(file.parent for file in (ROOT / "reports").rglob("recipe.yaml"))
ROW = re.compile(r"^\|.*\[report\]\((reports/[\w./-]+)\).*$", re.M)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_scores_and_page_come_from_the_saved_answers(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("adapter", "charts"))
    run = open_run(tmp_path / "run")
    scores = scoring.score_run(run)
    assert scores == json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    steps, events = windows.steps_in_order(read_lines(run.metrics_file)), list(read_lines(run.events_file))
    drawn = {file.stem: file for file in (folder / "charts").iterdir()}
    assert report_page.page(run, scores, steps, events, drawn) == (folder / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["systems", "two-h200"])
def test_the_comparisons_of_a_page_are_what_compare_prints(folder):
    page = ROOT / "reports" / folder / "report.md"
    blocks = [
        b for b in re.findall(r"^```\n(.*?)\n```$", page.read_text(encoding="utf-8"), re.M | re.S) if "\nb: " in b
    ]
    assert len(blocks) == {"systems": 2, "two-h200": 1}[folder]
    for text in blocks:
        runs = [open_run(page.parent / name) for name in re.findall(r"^[a-z]: ([\w-]+)$", text, re.M)]
        assert (compare(*runs) if len(runs) == 2 else side_by_side(runs)).to_text().strip() == text


def rows():
    found = list(ROW.finditer((ROOT / "README.md").read_text(encoding="utf-8")))
    return [(row[0], ROOT / row[1]) for row in found]


def result(row):
    """The numbers in the last cell of a table's row, without signs of Markdown."""
    return NUMBER.findall(row.rstrip(" |").rpartition("|")[2].replace("*", ""))


def test_readme_has_a_table_of_what_was_measured():
    assert len(rows()) >= 3 and all(len(result(row)) >= 3 for row, _ in rows())


@pytest.mark.parametrize(("row", "page"), rows())
def test_a_number_of_the_readme_stands_in_the_report_it_links(row, page):
    known = set(NUMBER.findall(page.read_text(encoding="utf-8").replace("*", "")))
    known |= {number.lstrip("+") for number in known}
    assert [number for number in result(row) if number not in known] == []
