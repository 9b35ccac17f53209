"""Answers that are compared but were made on different paths are said to be so; a run on one path says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_folders

from grpo_portable.report import page, paths
from grpo_portable.training import record


def spans(*pairs: tuple[str, int]) -> dict[str, Any]:
    return {"seconds": 1.0, "paths": [{"path": path, "from": number} for path, number in pairs]}


ONE = {name: spans(("bf16-hf", 0)) for name in ("base", "train", "tuned")}
FELL = {
    "base": spans(("fp8-vllm", 0)),
    "train": spans(("fp8-vllm", 0), ("bf16-hf", 39)),
    "tuned": spans(("bf16-hf", 0)),
}
MIXED = {**ONE, "base": spans(("fp8-vllm", 0), ("bf16-hf", 120))}


@pytest.mark.parametrize(
    ("stages", "against", "words"),
    [
        (ONE, "base", None),
        (FELL, "base", "`fp8-vllm` made the answers of the base model, `bf16-hf` those of the tuned one"),
        (MIXED, "base", "`bf16-hf` and `fp8-vllm` made the answers of the base model"),
        ({**FELL, "bootstrap": spans(("bf16-hf", 0))}, "bootstrap", None),
        (FELL, None, None),
        ({name: {"seconds": 1.0} for name in FELL}, "base", None),
        ({}, "base", None),
    ],
)
def test_the_warning(stages: dict, against: str | None, words: str | None) -> None:
    told = paths.warning({"stages": stages}, {"against": against})
    assert told is None if words is None else words in str(told)


def test_stages_in_words() -> None:
    assert paths.by_stage({"stages": ONE}) == ""
    assert (
        paths.by_stage({"stages": FELL})
        == "base on `fp8-vllm`; training on `fp8-vllm`, from step 40 on `bf16-hf`; tuned on `bf16-hf`"
    )
    assert "base on `fp8-vllm`, from answer 121 on `bf16-hf`" in paths.by_stage({"stages": MIXED})


def test_the_report_says_it_above_the_results(tmp_path: Path) -> None:
    run = run_folders.make_run(tmp_path / "run", n=40, steps=5)
    assert "change its path" not in page.write_report(run).read_text()
    run.update_json("run.json", stages=FELL)
    text = page.write_report(run).read_text()
    warning = "> **Warning:** The run had to change its path: `fp8-vllm` made"
    assert text.index(warning) < text.index("## What ran") < text.index("- **Change of path:** base on `fp8-vllm`")


@pytest.mark.parametrize(
    ("before", "there", "after"),
    [
        ([], 0, [("new", 0)]),
        ([("old", 0)], 7, [("old", 0), ("new", 7)]),
        ([("old", 0)], 0, [("new", 0)]),  # it made nothing, or what it made is made again
        ([("old", 0), ("new", 7)], 9, [("old", 0), ("new", 7)]),
        ([("old", 0), ("other", 7)], 7, [("old", 0), ("new", 7)]),
        ([("old", 0), ("new", 7)], 5, [("old", 0), ("new", 5)]),
    ],
)
def test_which_path_made_what(before: list, there: int, after: list) -> None:
    found = record.spans([{"path": path, "from": number} for path, number in before], "new", there)
    assert [(span["path"], span["from"]) for span in found] == after
