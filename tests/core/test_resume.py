"""Where a resumed run goes on: on the path it ended on, or, when asked, on the one it began with."""

import json
import subprocess
import sys

import pytest

from grpo_portable import launch, supervise
from grpo_portable.errors import UsageError
from grpo_portable.recipe import Recipe
from grpo_portable.run import create, open_run, read_lines

ANSWER = {"paths": {p: {"open": True, "fits": True} for p in ("fp8-vllm", "bf16-hf", "qlora-hf")}}
WORKER = """
import json, pathlib, sys
folder, broken = pathlib.Path(sys.argv[1]), sys.argv[2]
rung = json.loads((folder / "rung.json").read_text())
with open(folder / "began", "a") as began:
    began.write(f"{rung['path']} {rung['micro_batch']}\\n")
if rung["path"] == broken:
    (folder / "failure.json").write_text(json.dumps({"fact": "vLLM did not start", "phase": "starting"}))
    sys.exit(11)
(folder / "adapter").mkdir(exist_ok=True)
(folder / "generations" / "tuned.jsonl").touch()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that began on fp8-vllm and had to go down to bf16-hf with half the micro-batch."""
    recipe = Recipe(model="embedded", data="arithmetic", eval_data="arithmetic", path="fp8-vllm", micro_batch=8)
    made = create(tmp_path / "run", recipe)
    made.settle(rollout_rows=64, steps=1)
    made.write_json("plan.json", ANSWER)
    made.write_json("rung.json", {"path": "bf16-hf", "micro_batch": 4, "rollout_rows": 64})
    works(monkeypatch)
    return made


def works(monkeypatch, broken="none"):
    command = lambda run, *_: [sys.executable, "-c", WORKER, str(run.path), broken]  # noqa: E731
    monkeypatch.setattr(supervise, "worker_command", command)


def began(run):
    return (run.path / "began").read_text().split("\n")[:-1]


def test_a_resumed_run_stays_where_it_had_to_go(run, capsys):
    launch.resume(run.path, fallback=True)
    assert began(run) == ["bf16-hf 4"]
    told = capsys.readouterr().out
    assert "still path fp8-vllm → bf16-hf, micro_batch 8 → 4 (--retry-fast undoes it)" in told


def test_retry_fast_begins_on_the_first_path_again_and_says_so(run, capsys):
    launch.resume(run.path, fallback=True, retry_fast=True)
    assert began(run) == ["fp8-vllm 8"]
    (event,) = [e for e in read_lines(run.events_file) if e["kind"] == "resume"]
    assert event["message"] == "the run goes on as it began: path fp8-vllm → bf16-hf, micro_batch 8 → 4 is undone"
    assert json.loads((run.path / "rung.json").read_text())["path"] == "fp8-vllm"


def test_a_path_that_fails_again_is_left_again(run, monkeypatch):
    works(monkeypatch, broken="fp8-vllm")
    launch.resume(run.path, fallback=True, retry_fast=True)
    assert began(run) == ["fp8-vllm 8", "bf16-hf 8"]


def test_a_run_that_never_went_down_is_told_nothing(run, capsys):
    run.write_json("rung.json", {})
    launch.resume(run.path, fallback=True, retry_fast=True)
    assert began(run) == ["fp8-vllm 8"]
    assert "still" not in capsys.readouterr().out
    assert [e["message"] for e in read_lines(open_run(run.path).events_file)] == ["the run goes on"]


def test_retry_fast_needs_a_run_to_go_on_with():
    from typer.testing import CliRunner

    from grpo_portable import cli

    done = CliRunner().invoke(cli.app, ["train", "arithmetic-embedded", "--retry-fast"])
    assert isinstance(done.exception, UsageError) and "--resume" in str(done.exception.help)


def test_where_nothing_can_be_printed_the_run_goes_on_all_the_same(run):
    """A pipe that was closed, a log on a full disk: a run of hours must not end with it, nor seem to have failed."""
    script = f"""
import subprocess
import sys
from pathlib import Path
from grpo_portable import launch, supervise
supervise.worker_command = lambda run, *_: [sys.executable, "-c", {WORKER!r}, str(run.path), "none"]
launch.resume(Path({str(run.path)!r}), fallback=True)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert began(run) == ["bf16-hf 4"] and (run.path / "report.md").exists()
