"""Several processes, one a card, here on the CPU through gloo: what one process learns and answers, they learn and answer."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty
import pytest
import several
import tiny
import torch
import training
from faulty import adapter_hash, at_call, metrics

from grpo_portable import evaluate, worker
from grpo_portable.errors import Interrupted
from grpo_portable.rollout.protocol import Completion
from grpo_portable.run import folder as run_folder
from grpo_portable.run import processes
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.supervision import supervisor
from grpo_portable.supervision.ladder import EXIT
from grpo_portable.training import checkpoint, trainer

PATH = os.pathsep.join(str(folder) for folder in (Path(tiny.__file__).parent, Path(tiny.__file__).parents[1]))
recipe = functools.partial(faulty.recipe, rollout_rows=1)


def start(folder: Path, count: int, fault: Callable[[int], None] = lambda rank: None) -> list[int]:
    """Run a worker of `count` ranks on `folder`; their exit codes."""

    def work(rank: int) -> int:
        fault(rank)
        return worker.main([str(folder)])

    return several.forked(count, work, folder / "worker.log")


def log(folder: Path) -> str:
    return (folder / "worker.log").read_text()


# --- meeting


def test_processes_meet_and_hear_each_other(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        ticks: list[int] = []
        mine = replace(processes.join(cpu=True), tick=lambda: ticks.append(1))
        time.sleep(0.5 * rank)
        assert mine.gather(10 * rank) == [0, 10, 20]
        assert mine.any(rank == 2) and not mine.any(False)
        assert mine.as_main_says("first" if rank == 0 else "other") == "first"
        assert rank > 0 or len(ticks) > 5, "the first one waited a second and gave signs of life"
        return 0

    assert several.forked(3, work, tmp_path / "log") == [0, 0, 0], (tmp_path / "log").read_text()


def test_who_waits_for_a_process_that_is_gone_is_told(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mine = processes.join(cpu=True)
        mine.wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            mine.wait()
        except RuntimeError as error:
            from grpo_portable.supervision import failure

            assert failure.kind_of(error) == "collective", error
            return 3
        return 0

    assert several.forked(2, work, tmp_path / "log") == [3, -signal.SIGKILL], (tmp_path / "log").read_text()


# --- the same gradient


class Scripted:
    """An engine whose completions depend on the prompt alone, of many lengths; some end, some are cut off."""

    name = "scripted"

    def sync(self, policy: Any) -> None:
        """It has no weights."""

    def generate(self, prompts: Sequence[Any], n: int, sampling: Any) -> list[list[Completion]]:
        return [[self._one(list(prompt), k, sampling.max_tokens) for k in range(n)] for prompt in prompts]

    def _one(self, prompt: list[int], k: int, longest: int) -> Completion:
        draw = random.Random(f"{prompt} {k}")
        length = draw.randint(2, longest)
        tokens = tuple(draw.randrange(4, 90) for _ in range(length))
        return Completion(tokens, (-1.0,) * length, "length" if length == longest else "stop")

    def close(self) -> None:
        """Nothing is held."""


SIZES = {"prompts_per_step": 4, "group_size": 4, "micro_batch": 4}
LOSSES: list[dict[str, Any]] = [
    {"loss": "dapo"},
    {"loss": "grpo"},
    {"loss": "dr_grpo"},
    {"loss": "gspo"},
    {"loss": "cispo"},
    {"loss": "dapo", "mask_truncated": True, "beta": 0.1},
]


def gradient(folder: Path, changes: dict[str, Any], mine: processes.Processes = processes.ALONE) -> dict[str, Any]:
    made = training.make(folder, engine=Scripted(), processes=mine, **SIZES, **changes)
    return training.gradients(made)


@pytest.mark.parametrize("changes", LOSSES, ids=lambda changes: " ".join(map(str, changes.values())))
def test_two_processes_learn_what_one_with_twice_the_accumulation_learns(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    alone = gradient(tmp_path / "alone", changes)
    assert any(g.abs().max() > 1e-5 for g in alone.values())

    def work(rank: int) -> int:
        mine = processes.join(cpu=True)
        torch.save(gradient(tmp_path / f"rank-{rank}", changes, mine), tmp_path / f"{rank}.pt")
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    for rank in (0, 1):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert seen.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(seen[name], expected, rtol=2e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_weights_in_parts_give_the_gradient_of_whole_ones(tmp_path: Path, recomputed: bool) -> None:
    changes = {"loss": "dapo", "gradient_checkpointing": recomputed}
    alone = gradient(tmp_path / "alone", changes)

    def work(rank: int) -> int:
        from grpo_portable.models import shard

        mine = processes.join(cpu=True)
        made = training.make(
            tmp_path / f"rank-{rank}", engine=Scripted(), processes=mine, shard=True, **SIZES, **changes
        )
        assert shard.is_spread(made.model)
        held = sum(p.to_local().numel() for p in made.model.parameters() if hasattr(p, "to_local"))
        whole = sum(p.numel() for p in made.model.parameters() if hasattr(p, "to_local"))
        # two blocks' weights
        assert held == whole // 2 and whole == 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32)
        assert all(not hasattr(p, "to_local") for p in made.model.parameters() if p.requires_grad)
        torch.save(training.gradients(made), tmp_path / f"{rank}.pt")
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    for rank in (0, 1):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, expected in alone.items():
            torch.testing.assert_close(seen[name], expected, rtol=2e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_with_weights_in_parts_through_a_server(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes hold half of each block and sample from a server that holds all of it; the adapter loads on the base."""
    import standin_server
    import standin_vllm

    from grpo_portable.rollout import served, server_client

    standin_vllm.install(monkeypatch)
    monkeypatch.delenv(server_client.KEY, raising=False)
    monkeypatch.setattr(served, "PROBE_TOKENS", 16)
    folder = tmp_path / "run"
    with standin_server.serving(standin_server.Server(inputs / "model", context=256)) as url:
        wanted = recipe(inputs, backend="server", vllm_server=url, fsdp=True, bootstrap_epochs=0.5)
        run_folder.create(folder, replace(wanted, max_completion_tokens=24, max_prompt_tokens=64))
        assert start(folder, 2) == [0, 0], log(folder)
    assert [m["step"] for m in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [g["id"] for g in answers(folder, "tuned")] == [f"test-{i}" for i in range(1, 9)]
    from grpo_portable.models import policy

    loaded = policy.load(str(inputs / "model"), dtype="float32")
    back = policy.load_adapter(loaded.model, folder / "adapter")
    assert any(p.abs().max() > 0 for n, p in back.named_parameters() if "lora_B" in n)


# --- a whole run


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2))
    assert start(folder, 1) == [0], log(folder)
    return folder


@pytest.fixture(scope="module")
def together(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together") / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2))
    assert start(folder, 2) == [0, 0], log(folder)
    return folder


def answers(folder: Path, stage: str) -> list[dict[str, Any]]:
    return list(read_lines(RunFolder(folder).generations(stage)))


def test_several_processes_give_the_answers_of_one(alone: Path, together: Path) -> None:
    assert answers(together, "base") == answers(alone, "base")
    assert answers(together, "base-sampled") == answers(alone, "base-sampled")
    assert [g["id"] for g in answers(together, "tuned")] == [f"test-{i}" for i in range(1, 9)]
    assert not list((together / "generations").glob(".*"))


def test_a_run_of_several_processes_leaves_the_files_of_one(alone: Path, together: Path) -> None:
    def listed(folder: Path) -> set[str]:
        return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and "heartbeat" not in f.name}

    assert listed(together) == listed(alone)
    lines = list(read_lines(together / "metrics.jsonl"))
    assert [m["step"] for m in lines] == [1, 2, 3, 4]
    assert lines[0].keys() == next(iter(read_lines(alone / "metrics.jsonl"))).keys()
    assert log(together).count("step 1/4") == 1, "only the first one tells"
    assert json.loads((together / "run.json").read_text())["processes"] == 2


def test_two_processes_share_the_bootstrap_and_what_follows(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_folder.create(
        folder, recipe(inputs, bootstrap_epochs=1.0, bootstrap_batch=8, max_completion_tokens=24, steps=3)
    )
    assert start(folder, 2) == [0, 0], log(folder)
    assert [m["step"] for m in metrics(folder)] == [1, 2, 3]
    assert all(m["grad_norm"] > 0 and m["reward"] is not None for m in metrics(folder))
    assert sorted(f.name for f in (folder / "generations").iterdir()) == [
        "base.jsonl",
        "bootstrap.jsonl",
        "tuned.jsonl",
    ]
    for stage in ("base", "bootstrap", "tuned"):
        assert [g["id"] for g in answers(folder, stage)] == [f"test-{i}" for i in range(1, 9)]
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_metrics_are_of_the_whole_batch(tmp_path: Path) -> None:
    """Two questions of four completions each, one question a process: the line holds the means over all eight."""

    def work(rank: int) -> int:
        mine = processes.join(cpu=True)
        made = training.make(
            tmp_path / f"rank-{rank}", engine=Scripted(), processes=mine, steps=1, prompts_per_step=2, micro_batch=4
        )
        made.run = replace(made.run, rank=rank)
        made.start()
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    line = next(iter(read_lines(tmp_path / "rank-0" / "metrics.jsonl")))
    made = training.make(tmp_path / "asked", engine=Scripted(), steps=1, prompts_per_step=2, micro_batch=4)
    made.start()
    expected = next(iter(read_lines(tmp_path / "asked" / "metrics.jsonl")))
    assert not (tmp_path / "rank-1" / "metrics.jsonl").exists()
    for name in (
        "reward",
        "reward_std",
        "completion_tokens",
        "truncated",
        "entropy",
        "zero_spread",
        "sampler_kl",
        "loss",
    ):
        assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert line["rewards"] == pytest.approx(expected["rewards"])


# --- faults


def kill(rank: int, owner: Any, name: str, call: int) -> Callable[[int], None]:
    """A fault: SIGKILL of one rank as the `call`-th call of a function begins."""
    return lambda mine: at_call(owner, name, call, faulty.kill()) if mine == rank else None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(
    inputs: Path, together: Path, tmp_path: Path, rank: int
) -> None:
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2))
    began = time.monotonic()
    codes = start(folder, 2, kill(rank, trainer.GrpoTrainer, "_note_rollout", 4))
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] != 0
    assert time.monotonic() - began < 60
    assert checkpoint.newest(folder / "checkpoints").step >= 2
    assert start(folder, 2) == [0, 0], log(folder)
    assert same(folder, together)


def test_evaluation_goes_on_with_another_number_of_processes(inputs: Path, alone: Path, tmp_path: Path) -> None:
    """What one of two processes had asked before the other was killed is kept, and one process asks the rest."""
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2, steps=1))
    assert start(folder, 2, kill(1, evaluate, "answered", 3))[1] == -signal.SIGKILL
    kept = len(evaluate.shares(RunFolder(folder).generations("base")))
    assert kept >= 1
    assert start(folder, 1) == [0], log(folder)
    assert answers(folder, "base") == answers(alone, "base")
    assert answers(folder, "base-sampled") == answers(alone, "base-sampled")


@pytest.mark.parametrize("then", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(inputs: Path, tmp_path: Path, then: int) -> None:
    """After two steps by 3 - `then` processes the others make the rest: each step is there once, and all are learned from."""
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs))
    first = 3 - then
    start(folder, first, kill(0, trainer.GrpoTrainer, "_note_rollout", 3))
    saved = checkpoint.newest(folder / "checkpoints")
    assert saved is not None and saved.step == 2
    assert start(folder, then) == [0] * then, log(folder)
    assert [m["step"] for m in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    whole = tmp_path / "whole"
    run_folder.create(whole, recipe(inputs))
    assert start(whole, first) == [0] * first
    assert metrics(folder)[:2] == metrics(whole)[:2]
    assert metrics(folder)[2] != metrics(whole)[2], "each process draws from its own stream"


def same(one: Path, other: Path) -> bool:
    assert metrics(one) == metrics(other)
    assert adapter_hash(one) == adapter_hash(other)
    return answers(one, "tuned") == answers(other, "tuned")


def test_the_first_to_fail_is_the_one_that_is_told(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs))

    def fault(rank: int) -> None:
        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        if rank == 1:
            trainer.GrpoTrainer._note_rollout = full

    codes = start(folder, 2, fault)
    assert codes[1] == EXIT["oom"] and codes[0] != 0
    failure = json.loads((folder / "failure.json").read_text())
    assert (failure["kind"], failure["rank"]) == ("oom", 1)
    assert failure["phase"] == "rollout"


@pytest.mark.parametrize(
    ("rank", "during", "saved"), [(0, "_generate_single_turn", 1), (1, "_clip_grad_norm", 2)], ids=["rollout", "update"]
)
def test_a_wish_to_stop_that_one_rank_hears_stops_all_after_the_same_step(
    inputs: Path, together: Path, tmp_path: Path, rank: int, during: str, saved: int
) -> None:
    """In the second step: its rollout is dropped, its update is finished."""
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2))

    def fault(mine: int) -> None:
        original = getattr(trainer.GrpoTrainer, during)

        def stopped(made: Any, *arguments: Any, **options: Any) -> Any:
            if mine == rank and made.state.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(made, *arguments, **options)

        setattr(trainer.GrpoTrainer, during, stopped)

    assert start(folder, 2, fault) == [EXIT["interrupted"]] * 2, log(folder)
    assert checkpoint.newest(folder / "checkpoints").step == saved
    assert start(folder, 2) == [0, 0], log(folder)
    assert same(folder, together)


# --- through the supervisor and accelerate


def supervised(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv(supervisor.CPU_PROCESSES, "2")
    made = run_folder.open_run(folder)
    made.write_json("plan.json", {"paths": {"cpu": {"open": True, "fits": True}}})
    supervisor.supervise(made, **options)


KILLER = """
import json, os, pathlib, signal, threading, time
folder = pathlib.Path(os.environ["KILL_IN"])
def watch():
    while sum(1 for _ in open(folder / "metrics.jsonl")) < 3 if (folder / "metrics.jsonl").exists() else True:
        time.sleep(0.01)
    os.kill(json.loads((folder / "heartbeat-1").read_text())["pid"], signal.SIGKILL)
watch()
"""


def test_a_killed_rank_is_a_retry_under_the_real_supervisor(
    inputs: Path, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import sys

    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2))
    killer = subprocess.Popen([sys.executable, "-c", KILLER], env={**os.environ, "KILL_IN": str(folder)})
    try:
        supervised(folder, monkeypatch)
    finally:
        killer.kill()
        killer.wait()
    told = [e for e in read_lines(folder / "events.jsonl") if e["kind"] in ("retry", "fallback")]
    assert [e["kind"] for e in told] == ["retry"], log(folder)
    assert "rank 1" in told[0]["error"] and "SIGKILL" in told[0]["error"]
    assert same(folder, together)


@pytest.mark.slow
def test_a_stop_saves_in_all_ranks_under_the_real_supervisor(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, steps=4000, save_every=4000))

    def stop() -> None:
        while len(list(read_lines(folder / "metrics.jsonl"))) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted):
        supervised(folder, monkeypatch)
    saved = checkpoint.newest(folder / "checkpoints")
    assert saved is not None and saved.step == len(metrics(folder))
    assert json.loads((folder / "failure.json").read_text())["kind"] == "interrupted"


def test_two_nodes_of_one_process_each_here_on_one_host(inputs: Path, together: Path, tmp_path: Path) -> None:
    """What the Slurm script starts on each node: two launchers, told apart by --machine_rank alone."""
    import subprocess
    import sys

    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, eval_samples=2))
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    words = [
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--cpu",
    ]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(several.free_port())]
    worker_words = ["-m", "grpo_portable.worker", str(folder)]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "grpo_portable.ranks", *words, "--machine_rank", str(rank), *worker_words],
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        assert [launcher.wait(240) for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert same(folder, together)
