"""Several runs side by side: hand-computed medians, differences against the first run, and what makes rows unlike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_folders
from typer.testing import CliRunner

from grpo_portable.cli import app
from grpo_portable.errors import UsageError
from grpo_portable.report.side_by_side import side_by_side
from grpo_portable.run.folder import RunFolder, append_line
from grpo_portable.scores import stats


def made(folder: Path, rewards: list[float], answers: list[str], on: str = "bf16-hf", **recipe: object) -> RunFolder:
    """A run whose steps have the rewards given, take 1, 2, ... seconds and roll out for a quarter of that."""
    run = run_folders.make_run(folder, n=0, steps=0, stages=(), **recipe)
    for step, reward in enumerate(rewards, 1):
        times = {"step_s": float(step), "rollout_s": step / 4, "update_s": 3 * step / 4, "tokens_per_s": 100.0 * step}
        append_line(run.metrics_file, {"step": step, "reward": reward, "sampler_kl": 0.002 * step, **times})
    run_folders.write_answers(run, "base", ["wrong"] * len(answers))
    run_folders.write_answers(run, "tuned", answers)
    run.update_json("run.json", path=on)
    return run


@pytest.fixture
def three(tmp_path: Path) -> list[RunFolder]:
    wrong = ["wrong"] * 10
    return [
        made(tmp_path / "bf16", [1.0, 2.0, 3.0], ["right"] * 4 + ["wrong"] * 6 + wrong),
        made(tmp_path / "fp8", [1.5, 2.5, 4.5], ["right"] * 10 + wrong, on="fp8-vllm", fp8_scales="tensor"),
        made(tmp_path / "nf4", [1.0, 2.0], ["right"] * 4 + ["wrong"] * 6 + wrong, on="qlora-hf"),
    ]


def test_the_median_step_not_the_mean(three: list[RunFolder]) -> None:
    """Steps of 1, 2 and 3 s; a fourth of 90 s moves the median to 2.5 and would move the mean to 24."""
    assert side_by_side(three).rows[0].step_s == 2.0
    append_line(three[0].metrics_file, {"step": 4, "reward": 3.0, "step_s": 90.0, "rollout_s": 1.0})
    row = side_by_side(three).rows[0]
    assert (row.step_s, row.rollout_s, row.tokens_per_s) == (2.5, 0.625, 200.0)


def test_answers_and_rewards_are_set_against_the_first_run(three: list[RunFolder]) -> None:
    first, fp8, nf4 = side_by_side(three).rows
    assert first.against is None and first.reward_against is None
    pair = stats.paired_counts(4, 6, 0, 10)
    assert fp8.against == {"n": 20, "delta": 0.3, "interval": list(pair.interval), "p": pair.p}
    # gaps of 0.5, 0.5, 1.5: mean 5/6, standard error of the mean 1/3
    assert fp8.reward_against["delta"] == pytest.approx(5 / 6)
    assert fp8.reward_against["interval"] == pytest.approx([5 / 6 - stats.Z / 3, 5 / 6 + stats.Z / 3])
    assert nf4.reward_against == {"n": 2, "delta": 0.0, "interval": [0.0, 0.0]}
    assert (fp8.before, fp8.after, fp8.n, fp8.format_rate) == (0.0, 0.5, 20, 1.0)
    assert fp8.sampler_kl == pytest.approx(0.004)


def test_rewards_of_other_questions_are_not_paired(three: list[RunFolder], tmp_path: Path) -> None:
    other = made(tmp_path / "seed", [1.0, 2.0, 3.0], ["right"] * 20, seed=1)
    found = side_by_side([*three, other])
    assert found.rows[3].reward_against is None
    assert found.notes == ("the recipes differ in seed: rows differ by more than the path",)


def test_a_run_that_left_its_path_is_named(three: list[RunFolder]) -> None:
    assert side_by_side(three).notes == ()
    spans = [{"path": "fp8-vllm", "from": 0}, {"path": "bf16-hf", "from": 2}]
    three[1].update_json("run.json", stages={"train": {"seconds": 6.0, "paths": spans}})
    assert side_by_side(three).notes == ("`fp8` changed its path on the way (bf16-hf, fp8-vllm): its row is a mixture",)


def test_what_truncation_does_to_the_sampler_kl_is_named(three: list[RunFolder], tmp_path: Path) -> None:
    other = made(tmp_path / "cut", [1.0, 2.0], ["right"] * 20, min_p=0.1)
    notes = side_by_side([*three, other]).notes
    assert notes[0].startswith("the recipes differ in min_p:")
    assert notes[1].startswith("cut: unlikely tokens are not drawn")


def test_memory_is_what_the_run_counted(three: list[RunFolder]) -> None:
    held = {"policy": 0.25, "trained": 0.07, "engine_weights": 0.15, "engine_kv_cache": 1.5}
    three[1].update_json(
        "run.json", held_gib=held, peak_memory_gib=5.5, engine_details={"weights": "FP8, one scale a tensor"}
    )
    row = side_by_side(three).rows[1]
    assert (row.policy_gib, row.engine_gib, row.kv_gib, row.peak_gib) == (0.25, 0.15, 1.5, 5.5)
    text = side_by_side(three).to_text()
    line = next(line for line in text.splitlines() if "FP8, per tensor" in line)
    assert [cell.strip() for cell in line.split("|")[3:-1]] == ["0.25", "0.15", "1.50", "5.50"]


def test_names_tell_the_runs_apart(tmp_path: Path) -> None:
    runs = [made(tmp_path / place / "run", [1.0, 2.0], ["right"] * 3) for place in ("a", "b", "c")]
    assert [row.name for row in side_by_side(runs).rows] == ["a/run", "b/run", "c/run"]


def test_a_run_without_steps_or_answers_keeps_its_row(three: list[RunFolder], tmp_path: Path) -> None:
    bare = run_folders.make_run(tmp_path / "bare", n=0, steps=0, stages=())
    row = side_by_side([*three, bare]).rows[3]
    assert (row.step_s, row.after, row.against, row.reward_end) == (None, None, None, None)


def test_the_command_takes_any_number_of_runs_and_draws(three: list[RunFolder], tmp_path: Path) -> None:
    chart, paths = tmp_path / "curves.png", [str(run.path) for run in three]
    told = CliRunner().invoke(app, ["compare", *paths, "--json", "--chart", str(chart)])
    assert told.exit_code == 0
    found = json.loads(told.stdout)
    assert [row["name"] for row in found["rows"]] == ["bf16", "fp8", "nf4"]
    assert found["curves"]["nf4"] == [[1, 2], [1.0, 2.0]]
    assert chart.read_bytes().startswith(b"\x89PNG")
    two = CliRunner().invoke(app, ["compare", *paths[:2]])
    assert "answers more of 20 questions rightly" in two.stdout


def test_without_matplotlib_the_tables_are_still_told(
    three: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = CliRunner().invoke(app, ["compare", *(str(run.path) for run in three), "--chart", str(tmp_path / "c.png")])
    assert "| strict accuracy" in told.stdout
    assert isinstance(told.exception, UsageError)


def test_the_tables_fit_a_terminal_whatever_the_runs_are_called(tmp_path: Path) -> None:
    runs = []
    for number in range(7):
        run = made(tmp_path / f"dapo-llama-3.2-1b-fp8-2026113{number}-053012", [1.0, 2.0, 3.0], ["right"] * 300)
        held = {"policy": 12.25, "trained": 0.07, "engine_weights": 10.15, "engine_kv_cache": 21.5}
        details = {"weights": "FP8, one scale a 128x128 block", "start_s": 123.4}
        run.update_json("run.json", held_gib=held, peak_memory_gib=65.5, engine_details=details)
        runs.append(run)
    text = side_by_side(runs).to_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "g: dapo-llama-3.2-1b-fp8-20261136-053012" in text
    assert "| a    |" in text or "| a " in text
    three_short = side_by_side(runs[:1] + [made(tmp_path / n, [1.0], ["right"]) for n in ("x", "y")])
    assert "c: y" in three_short.to_text()


def test_windows_of_reward_stand_in_columns(three: list[RunFolder]) -> None:
    lines = side_by_side(three).to_text().splitlines()
    line = next(line for line in lines if line.startswith("| 1-3"))
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["2.000", "2.833", "1.500"]
