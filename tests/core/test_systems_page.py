"""docs/systems.md says what is so: what it names exists, its numbers are those of the reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from doctor.explain import CODES
from grpo_portable import rewards
from grpo_portable.plan import catalogue
from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import read_lines

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "systems.md").read_text(encoding="utf-8")


def test_what_the_page_names_exists() -> None:
    names = {entry.name for entry in catalogue.entries()}
    for recipe in re.findall(r"train ([a-z0-9.-]+) --auto", PAGE) + re.findall(
        r"`((?:gsm8k|math|dapo)-[a-z0-9.-]+)`", PAGE
    ):
        assert recipe in names, recipe
    for code in re.findall(r"`([A-Z0-9]+(?:-[A-Z0-9]+)+)`", PAGE):
        assert code in CODES, code
    for file in re.findall(r"`((?:tests|recipes|doctor|grpo_portable)/[\w./-]+)`", PAGE):
        assert (ROOT / file).exists(), file
    for room in re.findall(r"`((?:\w+/)?\w+\.py)`", PAGE):
        assert any(
            (ROOT / place / room).exists() for place in ("grpo_portable", "tests/core", "tests/end_to_end", "doctor")
        ), room
    for reward in re.findall(r"`(tags_[bc]_\w+)`", PAGE):
        assert reward in rewards.NAMES, reward
    for field in (
        "context_tokens",
        "prompt_percentile",
        "fp8_scales",
        "rslora",
        "dora",
        "lora_targets",
        "chat_template",
    ):
        assert field in PAGE
        assert hasattr(Recipe(), field)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            "arithmetic-embedded-cpu",
            "embedded: {base:.1f} → {tuned:.1f} % (n {n:,}, {delta:+.1f} [{low:+.1f}, {high:+.1f}])",
        ),
        (
            "gsm8k-smollm2-135m-h200",
            "smollm2: {base:.1f} → {tuned:.1f} % (n {n:,}, {delta:+.1f} [{low:+.1f}, {high:+.1f}])",
        ),
    ],
)
def test_numbers_are_those_of_the_reports(report: str, line: str) -> None:
    scores = json.loads((ROOT / "reports" / report / "scores.json").read_text(encoding="utf-8"))
    low, high = (100 * bound for bound in scores["interval"])
    shares = {key: 100 * scores[key] for key in ("base", "tuned", "delta")}
    assert line.format(**shares, n=scores["n"], low=low, high=high) in PAGE
    steps = list(read_lines(ROOT / "reports" / report / "metrics.jsonl"))
    share = sum(s.get("rollout_s") or 0 for s in steps) / sum(s["step_s"] for s in steps)
    assert f"{100 * share:.0f} % of a step in smollm2" in PAGE or f"{100 * share:.0f} % in embedded" in PAGE


def test_the_bootstraps_format_rate_is_the_reports() -> None:
    stages = json.loads((ROOT / "reports/gsm8k-smollm2-135m-h200/scores.json").read_text(encoding="utf-8"))["stages"]
    before, after = (100 * stages[stage]["marker_rate"] for stage in ("base", "bootstrap"))
    assert f"format {before:.1f} → {after:.1f} %" in PAGE
