"""A step of ours beside a step of TRL's: the same amount of work is asked of both, and both are measured."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from doctor import memory
from doctor.shapes import shape_of
from grpo_portable.bench import child
from grpo_portable.bench import step as room
from grpo_portable.bench.checkpoint import TO_COME, alternating, outline, write
from grpo_portable.bench.memory import against_ledger
from grpo_portable.bench.step import bench_step, main, table
from grpo_portable.plan import catalogue
from grpo_portable.plan.settle import Settled
from grpo_portable.recipe import load
from grpo_portable.run.stops import as_interrupts

SMALL = [
    "path=cpu",
    "prompts_per_step=2",
    "group_size=4",
    "micro_batch=8",
    "rollout_rows=8",
    "eval_limit=4",
    "train_limit=32",
    "optimizer=adamw",
    "eval_data=arithmetic",
    "max_completion_tokens=24",
]


def test_both_sides_make_the_steps_they_are_asked_for():
    recipe = load(catalogue.find("arithmetic-embedded"), SMALL)
    report = bench_step(Settled(recipe, (), memory.settle(shape_of("embedded"), "cpu", 8.0)), steps=2)
    assert report["ours"]["memory"]["ledger_over_device"] > 0.5 and report["ours"]["memory"]["device_peak_gib"] < 8
    for side in ("ours", "trl"):
        assert len(report[side]["seconds"]) == 2 and all(s > 0 for s in report[side]["seconds"])
        assert 8 <= report[side]["tokens_a_step"] <= 8 * 24
    ratio = report["trl"]["seconds_median"] / report["ours"]["seconds_median"]
    assert abs(report["times_faster"] - ratio) <= 0.01 + 0.01 * ratio
    assert "TRL's default" in table(report)


def test_a_side_that_fails_has_its_error_and_the_other_its_figures(tmp_path):
    recipe = load(catalogue.find("arithmetic-embedded"), [*SMALL, "rewards=[no_such_module:reward]"])
    report = bench_step(Settled(recipe, ()), steps=1, sides=("ours",))
    assert "no_such_module" in report["ours"]["error"] and report["times_faster"] is None
    assert "no_such_module" in table(report)
    assert report["ours"]["memory"]["device_peak_gib"] > 0.1  # what was held until then
    killed = child.run(
        [sys.executable, "-c", "import os; print('the last word', flush=True); os._exit(9)"], tmp_path, 60
    )
    assert killed == {"error": "exit code 9: the last word"}


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({"steps": 5, "limit_s": 1800.0}, "loading, then 5 steps, the first to warm up (at most 30 min) ..."),
        ({"seconds_median": 1.234, "error": "it ended early"}, "1.23 s a step"),
        ({"error": "exit code 9"}, "exit code 9"),
    ],
)
def test_a_reader_sees_a_line_when_a_side_begins_and_when_it_ends(capsys, figures, line):
    room.progress({"side": "trl", **figures})
    assert capsys.readouterr().err == f"TRL's default without vLLM: {line}\n"


def test_ratios_of_the_ledger_to_what_was_measured():
    parts = {"weights": 7.5, "activations": 1.5, "context": 1.0}
    found = against_ledger(parts, {"load": 7.0, "rollout": 8.0, "update": 9.0}, 12.5)
    assert found["ledger_sum_gib"] == 10.0 and found["ledger_over_device"] == 0.8  # 10 / 12.5
    assert found["ledger_over_allocated"] == 1.0  # torch does not see the context: 9 / 9
    assert against_ledger(None, {}, None)["ledger_over_device"] is None


def test_the_ledger_is_taken_at_the_lengths_that_occur():
    recipe = replace(load(catalogue.find("arithmetic-embedded"), SMALL), max_completion_tokens=100)
    shape = shape_of("embedded")
    settled = memory.settle(shape, "cpu", 8.0, memory.Sizes(prompt_tokens=1000, completion_tokens=100))
    short = room._ledger(recipe, settled, 27)
    # 128 positions rather than 1,152 (multiples of 64, one more than the longest row): the cache is a ninth
    assert short["kv_cache"] * 9 == pytest.approx(settled.ledger["kv_cache"])


def test_a_closed_path_is_told_before_weights_are_written(capsys):
    assert main(["--shape", "qwen3-4b", "--path", "mlx"]) == 2  # 7.5 GiB of weights
    told = capsys.readouterr().err
    assert "mlx" in told and "weights" not in told


def test_a_step_is_planned_for_the_model_that_is_written(tmp_path):
    outline("tiny", tmp_path)
    planned = shape_of(str(tmp_path))
    write("tiny", tmp_path)
    assert planned is not None and planned == shape_of(str(tmp_path))
    assert not any((tmp_path / name).exists() for name in TO_COME)
    assert (tmp_path / "model.safetensors").stat().st_size > 0


def test_a_command_that_is_ended_leaves_neither_folder_nor_child():
    command = [sys.executable, "-m", "grpo_portable", "bench", "step", "--shape", "tiny", "--path", "cpu"]
    asked = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in asked.stderr if "are written into" in line)
        folder = line.partition("are written into ")[2].partition(" ")[0]
        assert Path(folder).is_dir()
        asked.terminate()
        asked.communicate(timeout=90)
    finally:
        asked.kill()
    assert asked.returncode == 130 and not Path(folder).exists()
    assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and folder in _words(pid)]


def _words(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:  # it has gone
        return ""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_wish_to_end_counts_and_an_ignored_one_stays_ignored(sent):
    cleared = False
    before = signal.signal(sent, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), as_interrupts():
            try:
                signal.raise_signal(sent)
            finally:
                signal.raise_signal(signal.SIGTERM if sent == signal.SIGHUP else signal.SIGHUP)
                cleared = True
        assert cleared and signal.getsignal(sent) is signal.SIG_DFL
        signal.signal(sent, signal.SIG_IGN)
        with as_interrupts():
            signal.raise_signal(sent)
    finally:
        signal.signal(sent, before)


def test_every_group_of_a_shape_is_learnt_from():
    assert alternating(["a"] * 4) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "words", [[], ["arithmetic-embedded", "--shape", "tiny"], ["--shape", "none"], ["x", "--sides", "a"]]
)
def test_a_command_that_cannot_be_meant_is_refused(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err
