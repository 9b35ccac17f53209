"""Where a resumed run goes on: on the path it ended on, or, when asked, on the one it began with."""

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_folders

from grpo_portable import export, launch
from grpo_portable.errors import RunFolderError, UsageError
from grpo_portable.recipe import Recipe
from grpo_portable.run import edited, saved, unfinished
from grpo_portable.run.folder import append_line, create, open_run, read_lines
from grpo_portable.supervision import supervisor

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
(folder / "adapter").mkdir(exist_ok=True)  # what a run leaves that asks nothing and has an adapter without tensors
(folder / "adapter" / "adapter_config.json").write_text('{"r": 4}')
(folder / "adapter" / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
(folder / "run.json").write_text(json.dumps({"data": {"eval": {"used": 0}}}))
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
    monkeypatch.setattr(supervisor, "worker_command", command)


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


def contents(run):
    """Every file of a run but its lock."""
    return {f: f.read_bytes() for f in run.path.rglob("*") if f.is_file() and f.name != "lock"}


@pytest.mark.parametrize(
    "resume",
    [
        lambda run: launch.resume(run.path, fallback=True),
        lambda run: launch.resume(run.path, fallback=True, retry_fast=True),
        lambda run: launch.resume(run.path, fallback=True, gpus=(0,)),
        lambda run: launch.resume_evaluation(run.path, base_too=True),
    ],
    ids=["as it was", "retry fast", "other GPUs", "the base too"],
)
@pytest.mark.parametrize("at_work", ["under a supervisor", "its supervisor was killed", "finishing"])
def test_a_run_that_is_at_work_is_left_as_it_is(run, finished, resume, at_work):
    """Else its own supervisor would begin its next worker, and its report, with what somebody else wrote there."""
    at = finished if at_work == "finishing" else run
    at.write_json("task.json", {"adapter": "a"})
    if at_work == "its supervisor was killed":
        worker = run_folders.asleep(at.path.resolve())
        at.write_json("heartbeat", {"doing": "update", "pid": worker.pid})
        held = contextlib.ExitStack()
        held.callback(worker.wait)
        held.callback(worker.kill)
    else:
        held = supervisor.alone(at)
    with held:
        before = contents(at)
        with pytest.raises(RunFolderError, match="is at work already") as refused:
            resume(at)
        assert contents(at) == before
    if at_work == "its supervisor was killed":
        assert "its command was killed" in refused.value.because
        assert f"`kill {worker.pid}` (it saves first), then go on with: grpo-portable" in refused.value.help


def test_a_run_whose_command_was_killed_says_so_once_it_goes_on(run):
    (run.path / "lock").write_text("process 77\n")  # nobody holds it: what a kill leaves
    launch.resume(run.path, fallback=True)
    launch.resume(run.path, fallback=True)
    told = [e["message"] for e in read_lines(run.events_file) if "killed" in e["message"]]
    assert told == ["its command (process 77) was killed: what its worker made and saved after that is kept"]
    assert told[0] in (run.path / "report.md").read_text()


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


PUBLISHED = Path(__file__).parents[2] / "reports" / "arithmetic-embedded-cpu"


@pytest.fixture
def finished(tmp_path):
    """A whole run of the built-in model, as it was published."""
    shutil.copytree(PUBLISHED, tmp_path / "done", ignore=shutil.ignore_patterns("charts", "report.md"))
    return open_run(tmp_path / "done")


def test_a_finished_run_says_so_with_its_report_and_how_to_train_longer(finished, monkeypatch, capsys):
    works(monkeypatch)
    launch.resume(finished.path, fallback=True)
    told = capsys.readouterr().out
    steps = finished.recipe().steps
    assert not (finished.path / "began").exists(), "no worker is needed"
    assert "this run is finished" in told and f"report: {finished.path / 'report.md'}" in told
    assert f"grpo-portable train {finished.recipe_file} --set steps={2 * steps} --out NEW" in told
    assert (finished.path / "report.md").exists()


def test_a_run_without_its_report_gets_it_from_a_resume(finished, capsys):
    """Its command was killed, and its worker made everything by itself; an older report is of fewer answers."""
    for left in (lambda file: None, lambda file: os.utime(file, (1, 1))):
        left(finished.path / "report.md")
        launch.resume(finished.path, fallback=True)
        assert "only its report is to be written" in capsys.readouterr().out
        assert "# GRPO on" in (finished.path / "report.md").read_text() and (finished.path / "scores.json").exists()
    launch.resume(finished.path, fallback=True)
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_resume_that_is_refused_says_how_to_begin_anew_and_which_run_waits(run, monkeypatch):
    refused = {"kind": "user", "fact": "model `m` cannot be read", "phase": "starting"}
    quits = f"import pathlib, sys; pathlib.Path(sys.argv[1], 'failure.json').write_text({json.dumps(refused)!r}); sys.exit(2)"
    monkeypatch.setattr(supervisor, "worker_command", lambda run, *_: [sys.executable, "-c", quits, str(run.path)])
    other = create(run.path.with_name("other"), run.recipe())
    with (
        pytest.raises(UsageError, match="cannot be read") as told,
        launch._ways_on(unfinished.Taken(run, "", (other,))),
    ):
        supervisor.supervise(run)
    assert told.value.help == (
        f"put that right and resume; or begin anew: grpo-portable train {run.word}/recipe.yaml --set KEY=VALUE; "
        f"or go on with another: grpo-portable train --resume --out {other.word}"
    )
    run_folders.write_answers(run, "base", ["right"])  # of what is made nothing should be thrown away
    with pytest.raises(UsageError) as told:
        launch.resume(run.path, fallback=True)
    assert told.value.help == "put that right and resume"


def test_of_a_finished_evaluation_no_steps_are_told(finished, monkeypatch, capsys):
    finished.write_json("task.json", {"only": "evaluate", "adapter": str(finished.adapter), "base_too": True})
    works(monkeypatch)
    launch.resume(finished.path, fallback=True)
    told = capsys.readouterr().out
    assert "this run is finished" in told and "steps" not in told


def cut(file):
    file.write_bytes(file.read_bytes()[:-20])


def unpacked(run, stage):
    """The stage's answers as a run has them that was not packed up."""
    file = run.generations(stage)
    file.write_bytes(gzip.decompress(file.with_name(f"{stage}.jsonl.gz").read_bytes()))
    return file


def longer(run):
    run.settle(eval_samples=run.recipe().eval_samples + 1)


@pytest.mark.parametrize(
    ("harm", "missing"),
    [
        (lambda run: cut(run.adapter / "adapter_model.safetensors"), "its adapter is torn"),
        (lambda run: (run.adapter / "adapter_model.safetensors").write_bytes(b"1234567"), "its adapter is torn"),
        (lambda run: (run.adapter / "adapter_model.safetensors").unlink(), "its adapter is torn"),
        (lambda run: (run.adapter / "adapter_config.json").write_text("{"), "its adapter is torn"),
        (lambda run: shutil.rmtree(run.adapter), "it has no adapter yet"),
        (lambda run: cut(unpacked(run, "tuned")), "tuned has 299 of 300 answers"),
        (lambda run: cut(unpacked(run, "base")), "base has 299 of 300 answers"),
        (longer, "base-sampled has 1200 of 1500 answers"),
        (lambda run: run.update_json("run.json", data={}), "it does not say how many questions it asks"),
    ],
    ids=["weights", "header", "no weights", "config", "no adapter", "tuned", "base", "samples", "questions"],
)
def test_everybody_says_the_same_of_a_run_that_lost_something(finished, harm, missing, monkeypatch):
    """Resume, the supervisor once its worker says that it is done, and an export where it needs what is gone."""
    assert saved.missing(finished) == ()
    harm(finished)
    assert missing in saved.missing(finished)

    def quits(run, *_):
        """The command of a worker that notes its start, makes nothing and exits with 0."""
        return [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write('1')", str(run.path / "began")]

    monkeypatch.setattr(supervisor, "worker_command", quits)
    with pytest.raises(supervisor.RunFailed, match=missing):
        launch.resume(finished.path, fallback=False)
    assert (finished.path / "began").read_text() == "1"
    if "adapter" in missing:
        with pytest.raises(RunFolderError, match=missing):
            export.export(finished, to="adapter")


def test_a_bootstrap_that_is_lost_once_the_run_is_trained_is_not_asked_for(finished):
    finished.settle(bootstrap_epochs=1.0)  # no folder and no answers of one: the worker passes it over
    assert saved.missing(finished) == ()
    shutil.rmtree(finished.adapter)
    assert "bootstrap has 0 of 300 answers" in saved.missing(finished)


@pytest.mark.parametrize(
    "more",
    [
        lambda run: run.settle(eval_samples=0),
        lambda run: append_line(unpacked(run, "tuned"), {"id": "of-another-set", "correct": True}),
    ],
    ids=["fewer samples", "other questions"],
)
def test_more_answers_than_are_asked_for_leave_nothing_to_do(finished, more):
    more(finished)
    assert saved.missing(finished) == ()


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ({"adapter": None}, ["base"]),
        ({"adapter": "a"}, ["tuned"]),
        ({"adapter": "a", "base_too": True}, ["base", "tuned"]),
    ],
)
def test_an_evaluation_is_finished_with_the_answers_it_was_asked_for(finished, task, asked, monkeypatch, capsys):
    shutil.rmtree(finished.adapter)
    finished.write_json("task.json", {"only": "evaluate", **task})
    for stage in {"base", "tuned"} - set(asked):
        finished.generations(stage).with_name(f"{stage}.jsonl.gz").unlink()
    works(monkeypatch)
    launch.resume_evaluation(finished.path, base_too=False)
    assert "this run is finished" in capsys.readouterr().out and not (finished.path / "began").exists()
    finished.generations(asked[-1]).with_name(f"{asked[-1]}.jsonl.gz").unlink()
    assert saved.missing(finished)


def test_more_steps_for_a_finished_run_are_refused_before_it_is_called_finished(finished, capsys):
    finished.update_json("run.json", recipe_values=edited.values(finished.recipe()))
    finished.recipe_file.write_text(finished.recipe_file.read_text().replace("\nsteps: ", "\nsteps: 9"))
    with pytest.raises(RunFolderError, match="the training is done") as refused:
        launch.resume(finished.path, fallback=True)
    assert "--out NEW" in str(refused.value.help) and "finished" not in capsys.readouterr().out


def test_where_nothing_can_be_printed_the_run_goes_on_all_the_same(run):
    """A pipe that was closed, a log on a full disk: a run of hours must not end with it, nor seem to have failed."""
    script = f"""
import subprocess
import sys
from pathlib import Path
from grpo_portable import launch
from grpo_portable.supervision import supervisor
supervisor.worker_command = lambda run, *_: [sys.executable, "-c", {WORKER!r}, str(run.path), "none"]
launch.resume(Path({str(run.path)!r}), fallback=True)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert began(run) == ["bf16-hf 4"] and (run.path / "report.md").exists()


@pytest.mark.parametrize("trains", [True, False])
def test_an_old_folder_whose_task_cannot_be_read_stands_in_nobodys_way(tmp_path, monkeypatch, trains):
    monkeypatch.chdir(tmp_path)
    for age, (name, task) in enumerate((("new", "{}" if trains else '{"only": "evaluate"}'), ("old", "["))):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("")
        (folder / "task.json").write_text(task)
        os.utime(folder / "recipe.yaml", (1e9 - age, 1e9 - age))
    assert unfinished.newest(trains=trains).path.name == "new"
