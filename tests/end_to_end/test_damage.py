"""Kills at random moments, and files of a run that something else has damaged: told, made again, or the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty
import pytest
from fault_table import in_step
from faulty import kill, lost, new_run, outcome, recipe, supervised

from grpo_portable import export
from grpo_portable.errors import Interrupted, ModelError, RunFolderError
from grpo_portable.eval_task import eval_task
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.training import saving, trainer

KILLS = int(os.environ.get("KILLS", "3"))  # `KILLS=60 pytest tests/end_to_end/test_damage.py -k random -s` for more
SEED = int(os.environ.get("KILLS_SEED", "0"))


def made_recipe(inputs: Path) -> Any:
    taught = {"bootstrap_epochs": 2.0, "bootstrap_batch": 4, "max_completion_tokens": 24}
    return recipe(inputs, steps=6, eval_samples=2, **taught)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, float]:
    """A run that nothing happened to, and the seconds it took."""
    made, began = new_run(tmp_path_factory.mktemp("whole") / "run", made_recipe(inputs)), time.monotonic()
    assert supervised(made).told is None, (made.path / "worker.log").read_text()
    return made, time.monotonic() - began


@pytest.fixture(scope="module")
def halfway(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was killed in its sixth step, and left."""
    made = new_run(tmp_path_factory.mktemp("halfway") / "run", made_recipe(inputs))
    seen = supervised(made, lambda folder: in_step(6, trainer.GrpoTrainer, "_note_rollout", kill()), fallback=False)
    assert seen.told is not None and not made.adapter.exists()
    return made


# --- kills


def saves_often(folder: Path) -> None:
    saving.OVERDUE_S = 0.05


def descendants(pid: int) -> list[int]:
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def some_time(made: RunFolder, put_in: faulty.PutIn, seconds: float, everything: bool) -> str | None:
    """Supervise for so long, then kill the newest process, or everything; what it was doing, or None: the run was done."""
    supervisor = os.fork()
    if supervisor == 0:
        code = 1
        try:
            with (made.path / "supervisor.log").open("a") as out, contextlib.redirect_stderr(out):
                code = int(supervised(made, put_in, every_time=True).told is not None)
        finally:
            os._exit(code)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        ended, status = os.waitpid(supervisor, os.WNOHANG)
        if ended:
            assert status == 0, (made.path / "supervisor.log").read_text()
            return None
        time.sleep(0.002)
    workers = descendants(supervisor)
    doing = str(made.read_json("heartbeat").get("doing") or "starting")
    victims = [supervisor, *workers] if everything or not workers else workers[-1:]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    faulty.until_free(made)  # a worker that was just being started works on by itself
    return doing


def test_killed_at_random_moments_the_run_is_the_same(
    inputs: Path, whole: tuple[RunFolder, float], tmp_path: Path
) -> None:
    undisturbed, seconds = whole
    draw, kills, runs = random.Random(SEED), 0, 0
    while kills < KILLS:
        made = new_run(tmp_path / f"run-{runs}", made_recipe(inputs))
        put_in, runs = (saves_often if draw.random() < 0.5 else lambda folder: None), runs + 1
        for _ in range(3):
            doing = some_time(made, put_in, draw.uniform(0.05, seconds), draw.random() < 0.5)
            if doing is None:
                break
            kills += 1
            print(f"kill {kills}: {doing}")
        seen = supervised(made, put_in, every_time=True)
        assert seen.told is None, f"{seen.told}\n{seen.log}"
        assert lost(made) == [] and outcome(made) == outcome(undisturbed)
        shutil.rmtree(made.path)


# --- damage


def copy_of(run: RunFolder, folder: Path) -> RunFolder:
    shutil.copytree(run.path, folder)
    return RunFolder(folder)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def flip(file: Path) -> None:
    """One bit of the last tensor, as a bad disk does."""
    content = bytearray(file.read_bytes())
    content[-10] ^= 4
    file.write_bytes(content)


def other_rank(file: Path) -> None:
    """A configuration that can be read, and is another."""
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 1}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("adapter/adapter_model.safetensors", cut),
        ("adapter/adapter_model.safetensors", flip),
        ("adapter/adapter_config.json", Path.unlink),
        ("adapter/adapter_config.json", other_rank),
        ("generations/base.jsonl", cut),
    ],
    ids=["weights cut", "a bit flipped", "configuration gone", "another configuration", "answers cut"],
)
def test_what_a_finished_run_has_lost_is_made_again(
    whole: tuple[RunFolder, float], tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    made = copy_of(whole[0], tmp_path / "run")
    damage(made.path / name)
    seen = supervised(made)
    assert seen.told is None, seen.log
    assert [ending.kind for ending in seen.endings] == ["done"]
    assert outcome(made) == outcome(whole[0]) and lost(made) == []
    told = [e["message"] for e in read_lines(made.events_file)]
    assert name.startswith("generations/") or "adapter/ is torn; it is made again from what was made before it" in told


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("adapter_model.safetensors", cut),
        ("adapter_model.safetensors", flip),
        ("adapter_config.json", cut),
        ("adapter_config.json", other_rank),
    ],
)
def test_a_torn_adapter_is_neither_asked_nor_exported(
    whole: tuple[RunFolder, float], tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    made = copy_of(whole[0], tmp_path / "run")
    eval_task(None, model=None, data=None, adapter=made.path)
    damage(made.adapter / name)
    with pytest.raises(ModelError, match="torn"):
        eval_task(None, model=None, data=None, adapter=made.path)
    with pytest.raises(RunFolderError, match="torn"):
        export.export(made, to="adapter")


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_torn_bootstrap_is_made_again(
    whole: tuple[RunFolder, float], halfway: RunFolder, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    made = copy_of(halfway, tmp_path / "run")
    damage(made.bootstrapped / "adapter_model.safetensors")
    seen = supervised(made)
    assert seen.told is None, seen.log
    assert outcome(made) == outcome(whole[0])
    assert "bootstrap/ is torn; it is made again from what was made before it" in seen.events("resume")[0]["message"]


def test_lines_that_metrics_have_lost_are_told(
    whole: tuple[RunFolder, float], halfway: RunFolder, tmp_path: Path
) -> None:
    made = copy_of(halfway, tmp_path / "run")
    first, *_ = made.metrics_file.read_text().splitlines()
    made.metrics_file.write_text(f'{first}\n{{"step": "x"}}\n{{"ste')
    seen = supervised(made)
    assert seen.told is None, seen.log
    messages = [e["message"] for e in seen.events("resume")]
    assert "metrics.jsonl has lost the lines of 3 steps, from step 2 on" in messages
    assert [m["step"] for m in read_lines(made.metrics_file)] == [1, 5, 6]
    assert outcome(made)["adapter"] == outcome(whole[0])["adapter"]


def test_an_interrupt_that_another_handler_took_does_not_pass_for_the_end(
    inputs: Path, whole: tuple[RunFolder, float], tmp_path: Path
) -> None:
    """A library may put a handler of its own in place of ours: then nobody knows of a wish to stop."""
    made = new_run(tmp_path / "run", made_recipe(inputs))
    seen = supervised(
        made, lambda folder: in_step(4, trainer.GrpoTrainer, "_note_rollout", faulty.throw(KeyboardInterrupt()))
    )
    assert isinstance(seen.told, Interrupted) and not made.adapter.exists()
    supervised(made, watched=seen)
    assert seen.told is None and lost(made) == [] and outcome(made) == outcome(whole[0])
