"""The page of two cards, and the seconds the doctor counts with: those of the published reports."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from doctor.spread import MEASURED, Measured
from grpo_portable.bench.gpus import table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def room() -> Any:
    spec = importlib.util.spec_from_file_location("two_cards_page", ROOT / "reports/two-h200/page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(one: float, two: float) -> dict[str, Any]:
    """A report of steps of 1,000 tokens, half of each step a rollout."""
    on = [
        {
            "processes": count,
            "seconds": [seconds],
            "seconds_median": seconds,
            "tok_s": 1000 / seconds,
            "rollout_s": [seconds / 2],
            "rollout_tok_s": 2000 / seconds,
        }
        for count, seconds in ((1, one), (2, two))
    ]
    size = {"questions": 32, "group": 16, "longest_completion": 256}
    about = {"what": "step", "model": "qwen3-4b", "path": "bf16-hf", "device": "NVIDIA H200", "torch": "2.11.0"}
    return {**about, "step": size, "on": on, "times": round(one / two, 3), "rollout_times": round(one / two, 3)}


def test_a_report_becomes_a_page_and_a_line_to_paste(
    room: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    place, kept = tmp_path / "x2", tmp_path / "kept"
    place.mkdir(), kept.mkdir()
    monkeypatch.setattr(room, "HERE", kept)
    (place / "step.json").write_text(json.dumps(step(20.0, 10.8)))
    (place / "rollout.json").write_text("")  # a bench that did not get so far
    assert room.main(place) == 0
    line = capsys.readouterr().out.strip()
    seen = eval(line.rstrip(","), {"Measured": Measured})
    assert (seen.card, seen.one_s, seen.two_s) == ("H200", 20.0, 10.8) and seen.lost == pytest.approx(0.08)
    text = (kept / "report.md").read_text()
    assert "A whole step: 1.85 times as fast (1.8 were wanted)." in text  # 20 / 10.8 = 1.852
    assert "rollouts: 1.85 times as fast (1.9 were wanted, and missed)" in text
    assert table(step(20.0, 10.8)) in text and "SmolLM2" not in text


def test_answers_that_differ_are_counted(room: Any) -> None:
    text = room.page(step(20.0, 10.8), None, None, (), (b"a\nb\nc\n", b"a\nx\nc\n"))
    assert "2 of 3 are the same" in text


@pytest.mark.parametrize("seen", MEASURED, ids=lambda seen: seen.source)
def test_what_the_doctor_counts_with_is_what_was_measured(room: Any, seen: Measured) -> None:
    published = json.loads((ROOT / seen.source).read_text(encoding="utf-8"))
    assert eval(room.measured(published).rstrip(","), {"Measured": Measured}) == seen


def test_the_published_page_is_that_of_the_published_figures(room: Any) -> None:
    before = (room.HERE / "report.md").read_text(encoding="utf-8")
    found = {name: room.HERE / name for name in room.FILES}
    rollout = json.loads(found["rollout.json"].read_text()) if found["rollout.json"].is_file() else None
    compared = found["compare.txt"].read_text() if found["compare.txt"].is_file() else None
    runs = tuple(name for name in room.RUNS if (room.HERE / name).is_dir())
    assert room.page(json.loads(found["step.json"].read_text()), rollout, compared, runs, room.answers_kept()) == before
