"""One run in one process, killed wherever it hurts and started again: the same adapter, metrics and answers, bit for bit.

Workers are forked from this process, which has torch in memory already, so that a run takes a second and a fault can be put
anywhere in it. One test starts the real thing through accelerate.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty
import pytest
import tiny
from faulty import at_call, kill

from grpo_portable import evaluate, session, worker
from grpo_portable.run import folder as run_folder
from grpo_portable.run.folder import read_lines
from grpo_portable.scores import scoring, verdict
from grpo_portable.supervision import ladder, ranks_command, supervisor
from grpo_portable.supervision.ladder import EXIT
from grpo_portable.training import checkpoint, trainer

KILLED = -signal.SIGKILL
recipe = functools.partial(faulty.recipe, steps=5, rollout_rows=1)


def start(folder: Path, fault: Callable[[], None] = lambda: None) -> int:
    """Run a worker on `folder` in a fork of this process, with `fault` put in first; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            sys.stdout = sys.stderr = (folder / "worker.log").open("a", buffering=1)
            fault()
            code = worker.main([str(folder)])
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before(owner: Any, name: str, call: int) -> Callable[[], None]:
    """A fault: SIGKILL as the `call`-th call of a function begins."""
    return lambda: at_call(owner, name, call, kill())


def outcome(folder: Path) -> dict[str, Any]:
    return faulty.outcome(run_folder.RunFolder(folder))


@pytest.fixture(scope="session")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_folder.create(folder, recipe(inputs))
    assert start(folder) == 0, (folder / "worker.log").read_text()
    return folder


def test_a_run_leaves_every_file_a_report_needs(whole: Path, inputs: Path) -> None:
    made = outcome(whole)
    assert [m["step"] for m in made["metrics"]] == [1, 2, 3, 4, 5]
    assert [len(g) for g in made["generations"].values()] == [8, 8]
    assert sorted(made["generations"]) == ["base.jsonl", "tuned.jsonl"]
    record = json.loads((whole / "run.json").read_text())
    assert record["model"] == "model"
    assert (record["path"], record["engine"], record["dtype"], record["quantization"]) == (
        "cpu",
        "portable",
        "float32",
        None,
    )
    assert record["trainable_parameters"] + 26_000 > record["total_parameters"] > record["trainable_parameters"] > 0
    held = record["held_gib"]
    assert set(held) == {"policy", "trained", "engine_weights", "engine_kv_cache"}
    assert held["policy"] == round(4 * (record["total_parameters"] - record["trainable_parameters"]) / 2**30, 4)
    assert record["data"]["train"]["used"] == 24
    assert len({part.pop("sha256") for part in record["data"].values()}) == 2
    assert record["data"]["eval"] == {
        "source": "sums",
        "split": "test",
        "total": 8,
        "used": 8,
        "skipped": 0,
        "over_length": 0,
        "over_percentile": 0,
        "longest_prompt_tokens": 11,
    }
    assert set(record["stages"]) == {"base", "train", "tuned"}
    assert all(stage["paths"] == [{"path": "cpu", "from": 0}] for stage in record["stages"].values())
    assert record["versions"]["trl"]
    assert record["prompt"]["example"] == "1 plus 51?\n"
    assert record["peak_memory_gib"] > 0
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "model"
    for file in whole.rglob("*.json*"):
        assert str(inputs) not in file.read_text(), f"{file.name} names a path of this machine"


# kills in a rollout, an update, the last evaluation, and while a checkpoint or the adapter is written: in fault_table
FAULTS = {
    "base evaluation, in its second chunk": kill_before(evaluate, "append_line", 6),
    "first rollout": kill_before(trainer.GrpoTrainer, "_note_rollout", 1),
    "after the update": kill_before(trainer, "append_line", 4),
    "before a checkpoint": kill_before(trainer.GrpoTrainer, "save_now", 2),
    "checkpoint renamed": kill_before(checkpoint, "_folders", 3),
    "after the last step": kill_before(trainer.GrpoTrainer, "save_now", 3),
}


@pytest.mark.parametrize("moment", FAULTS)
def test_killed_and_started_again_is_as_if_nothing_had_happened(
    whole: Path, inputs: Path, tmp_path: Path, moment: str
) -> None:
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs))
    assert start(folder, FAULTS[moment]) == KILLED, (folder / "worker.log").read_text()
    assert start(folder) == 0, (folder / "worker.log").read_text()
    assert outcome(folder) == outcome(whole)


def test_killed_again_and_again(whole: Path, inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs))
    deaths = 0
    while start(folder, kill_before(trainer.GrpoTrainer, "_clip_grad_norm", 3)) == KILLED:
        deaths += 1
        assert deaths < 5
    assert deaths == 2  # two steps a life, saved every two
    assert outcome(folder) == outcome(whole)


def test_a_smaller_micro_batch_after_a_crash_goes_on_with_the_same_groups(
    whole: Path, inputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs))
    assert start(folder, kill_before(trainer.GrpoTrainer, "_note_rollout", 4)) == KILLED
    (folder / "rung.json").write_text(json.dumps({"micro_batch": 2, "rollout_rows": 3}))
    assert start(folder) == 0
    ours, theirs = outcome(folder)["metrics"], outcome(whole)["metrics"]
    assert [m["reward"] for m in ours] == [m["reward"] for m in theirs]
    assert [m["grad_norm"] for m in ours] == pytest.approx([m["grad_norm"] for m in theirs], rel=1e-4)


@pytest.fixture
def bootstrapped(inputs: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    changes = {
        "bootstrap_epochs": 2.0,
        "bootstrap_batch": 4,
        "bootstrap_learning_rate": 2e-2,
        "max_completion_tokens": 24,
    }
    run_folder.create(folder, recipe(inputs, steps=2, beta=0.01, eval_samples=2, **changes))
    yield folder


def test_the_bootstrap_teaches_the_format_and_is_not_done_twice(bootstrapped: Path) -> None:
    assert start(bootstrapped, kill_before(trainer.GrpoTrainer, "_note_rollout", 1)) == KILLED
    taught = hashlib.sha256((bootstrapped / "bootstrap" / "adapter_model.safetensors").read_bytes()).hexdigest()
    log = (bootstrapped / "worker.log").read_text()
    assert "bootstrap step 12/12" in log
    assert start(bootstrapped) == 0, (bootstrapped / "worker.log").read_text()
    assert (bootstrapped / "worker.log").read_text().count("bootstrap step 12/12") == 1
    assert hashlib.sha256((bootstrapped / "bootstrap" / "adapter_model.safetensors").read_bytes()).hexdigest() == taught
    made = outcome(bootstrapped)
    names = ["base-sampled.jsonl", "base.jsonl", "bootstrap-sampled.jsonl", "bootstrap.jsonl"]
    assert sorted(made["generations"]) == [*names, "tuned-sampled.jsonl", "tuned.jsonl"]
    assert len(made["generations"]["tuned-sampled.jsonl"]) == 16
    assert made["metrics"][0]["kl"] == pytest.approx(0, abs=1e-6)  # against the bootstrapped adapter, not the base
    assert set(run_folder.RunFolder(bootstrapped).read_json("run.json")["stages"]) == {
        "base",
        "bootstrap",
        "train",
        "tuned",
    }


def shares(*found: float) -> Callable[[], None]:
    """What the bootstrap's probes find, in turn."""

    def put_in() -> None:
        left = list(found)
        worker.bootstrap.format_share = lambda *_: left.pop(0)

    return put_in


@pytest.mark.parametrize(
    ("found", "steps"),
    [((0.95,), 0), ((0.0, 0.5, 0.95), 8), ((0.0, 0.1, 0.2, 0.3), 12)],
    ids=["at once", "early", "never"],
)
def test_the_bootstrap_ends_once_the_format_is_kept(inputs: Path, tmp_path: Path, found: tuple, steps: int) -> None:
    folder = tmp_path / "run"
    probed = {"bootstrap_probe": 4, "bootstrap_probe_every": 4, "bootstrap_format_share": 0.9}
    taught = {"bootstrap_epochs": 2.0, "bootstrap_batch": 4, "max_completion_tokens": 24, "steps": 1}
    run_folder.create(folder, recipe(inputs, **taught, **probed))
    assert start(folder, shares(*found)) == 0, (folder / "worker.log").read_text()
    noted = json.loads((folder / "run.json").read_text())["bootstrap"]
    assert noted == {"steps": steps, "planned": 12, "format_share": found[-1]}
    messages = [e["message"] for e in read_lines(folder / "events.jsonl") if e["kind"] == "bootstrap"]
    assert messages == (
        [f"it ended after step {steps} of 12: 95 % of the probe's answers keep the format"] if steps < 12 else []
    )


def test_evaluation_alone(inputs: Path, whole: Path, tmp_path: Path) -> None:
    for name, adapter, stage in (("base", None, "base"), ("tuned", whole / "adapter", "tuned")):
        folder = tmp_path / name
        run_folder.create(folder, recipe(inputs))
        task = {"only": "evaluate", "adapter": None if adapter is None else str(adapter)}
        (folder / "task.json").write_text(json.dumps(task))
        assert start(folder) == 0, (folder / "worker.log").read_text()
        ours = list(read_lines(folder / "generations" / f"{stage}.jsonl"))
        assert ours == list(read_lines(whole / "generations" / f"{stage}.jsonl"))
        assert not (folder / "adapter").exists()


def test_an_adapter_and_its_base_are_asked_in_one_evaluation(inputs: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    made = run_folder.create(folder, recipe(inputs))
    made.write_json("task.json", {"only": "evaluate", "adapter": str(whole / "adapter"), "base_too": True})
    assert start(folder) == 0, (folder / "worker.log").read_text()
    for stage in ("base", "tuned"):
        ours = list(read_lines(folder / "generations" / f"{stage}.jsonl"))
        assert ours == list(read_lines(whole / "generations" / f"{stage}.jsonl")), stage
    scores, of_the_run = scoring.score_run(made), scoring.score_run(run_folder.open_run(whole))
    assert {**scores, "subject": None} == {**of_the_run, "subject": None}
    assert verdict.sentence(scores).startswith("The adapter ")


def test_the_run_is_told_what_the_data_settled(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{{ m.content }}{% endfor %}"
    changes = {
        "context_tokens": 40,
        "max_prompt_tokens": 32,
        "max_completion_tokens": 39,
        "steps": 1,
        "chat_template": template,
    }
    run_folder.create(
        folder,
        recipe(inputs, system_prompt="Add.", eval_split="train", on_overlap="drop", eval_limit=2, **changes),
        "why",
    )
    assert start(folder) == 0, (folder / "worker.log").read_text()
    assert (folder / "recipe.yaml").read_text().startswith("# why\n")
    settled = run_folder.RunFolder(folder).recipe()
    assert settled.max_completion_tokens == 40 - len("Add.\n\n1 plus 1?\n")
    told = " ".join(e["message"] for e in read_lines(folder / "events.jsonl"))
    for words in ("2 training questions are also held out", "no system", "answers have room for"):
        assert words in told
    assert json.loads((folder / "run.json").read_text())["data"]["train"]["used"] == 22


def breaking(owner: Any, name: str, error: BaseException) -> Callable[[], None]:
    def put_in() -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise error

        setattr(owner, name, broken)

    return put_in


def poisoned() -> None:
    see = trainer.NonFiniteGuard.see
    trainer.NonFiniteGuard.see = lambda self, bad, step: see(self, "the loss", step)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("changes", "fault", "kind", "words", "doing"),
    [
        ({"model": "/nowhere"}, None, "user", "is not there", "loading"),
        ({"rewards": ("corectness",)}, None, "user", "no reward is called", "training"),
        ({"data": "/nowhere.jsonl"}, None, "user", "is not there", "reading"),
        ({"lora_targets": "q_projection"}, None, "user", "does not fit", "loading"),
        ({"max_prompt_tokens": 2}, None, "user", "longer than max_prompt_tokens", "loading"),
        ({"eval_split": "train"}, None, "user", "also stand in the training data", "reading"),
        ({"rewards": ("tiny:nothing",)}, None, "reward", "could not be scored", "rewards of step 1"),
        (
            {},
            breaking(session, "open_engine", RuntimeError("CUDA out of memory. Tried")),
            "oom",
            "out of memory",
            "starting",
        ),
        ({}, breaking(trainer.GrpoTrainer, "_note_rollout", MemoryError()), "oom", "MemoryError", "rollout of step 1"),
        ({}, breaking(session, "open_engine", OSError(28, "No space left on device")), "disk", "No space", "starting"),
        ({}, breaking(session, "open_engine", ValueError("surprise")), "crash", "ValueError: surprise", "starting"),
        ({}, poisoned, "nonfinite", "3 updates in a row", "update of step 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_a_failure_is_told_by_kind_words_and_phase(
    inputs: Path, tmp_path: Path, changes: dict, fault: Any, kind: str, words: str, doing: str
) -> None:
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, **changes))
    assert start(folder, fault or (lambda: None)) == EXIT.get(kind, 1), (folder / "worker.log").read_text()
    told = json.loads((folder / "failure.json").read_text())
    assert told["kind"] == kind
    assert words in told["fact"]
    assert doing in told["doing"]
    assert told["traceback_tail"]
    assert not (folder / "adapter").exists()


def test_through_the_launcher_sigterm_saves_first(whole: Path, inputs: Path, tmp_path: Path) -> None:
    made = run_folder.create(tmp_path / "run", recipe(inputs, steps=400, save_every=1000))
    rung = ladder.Rung("cpu", 4, 1)
    environment = {**ranks_command.environment(rung), "PYTHONPATH": str(Path(tiny.__file__).parent)}
    with (made.path / "worker.log").open("wb") as log:
        process = subprocess.Popen(supervisor.worker_command(made, rung, 1), stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + 120
            while len(list(read_lines(made.metrics_file))) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(json.loads((made.path / "heartbeat").read_text())["pid"], signal.SIGTERM)
            assert process.wait(60) != 0
        finally:
            process.kill()
            process.wait()
    assert made.read_json("failure.json")["kind"] == "interrupted"
    saved = checkpoint.newest(made.checkpoints)
    assert saved is not None
    assert [m["step"] for m in read_lines(made.metrics_file)] == list(range(1, saved.step + 1))
    assert faulty.metrics(made.path)[0]["reward"] == outcome(whole)["metrics"][0]["reward"]
