"""Where several processes meet while they learn: once a step, unless what TRL gathers of a micro-batch is read."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import several
import torch
import training
from test_several import SIZES, Scripted, recipe, supervised

from grpo_portable.run import folder as run_folder
from grpo_portable.run import processes
from grpo_portable.run.folder import read_lines
from grpo_portable.supervision import supervisor


def test_who_waits_is_not_ended_before_who_hangs_is_found(tmp_path: Path) -> None:
    """The supervisor names the process that gives no sign of life; a limit of a collective ends the one that waits for it."""
    silence = supervisor.Limits().silence_s

    def work(rank: int) -> int:
        mine = processes.join(cpu=True)
        group: Any = torch.distributed.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() >= 2 * silence
        mine.wait()  # the first process holds the others' meeting place: it may not leave while they join
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_process_that_hangs_is_found_and_the_run_goes_on(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the real supervisor: the second process is stopped while the first one waits for it and gives signs of life."""
    folder = tmp_path / "run"
    run_folder.create(folder, recipe(inputs, steps=8))

    def stop() -> None:
        while len(list(read_lines(folder / "metrics.jsonl"))) < 3:
            time.sleep(0.02)
        os.kill(json.loads((folder / "heartbeat-1").read_text())["pid"], signal.SIGSTOP)

    threading.Thread(target=stop, daemon=True).start()
    supervised(folder, monkeypatch, limits=supervisor.Limits(start_s=120, silence_s=30, stop_s=10))
    told = [e for e in read_lines(folder / "events.jsonl") if e["kind"] in ("retry", "fallback")]
    assert [e["kind"] for e in told] == ["retry"] and "hung" in told[0]["message"]
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == list(range(1, 9))


def until(file: Path) -> None:
    ends = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < ends, f"{file.name} did not come"
        time.sleep(0.01)


def test_processes_meet_once_in_an_update(tmp_path: Path) -> None:
    """Each has two micro-batches; one that has not begun its first keeps nobody waiting before gradients meet."""
    quick_is_through = tmp_path / "through"

    def work(rank: int) -> int:
        made = training.make(
            tmp_path / f"rank-{rank}", engine=Scripted(), processes=processes.join(cpu=True), **SIZES, steps=1
        )
        compute, passes = made._compute_loss, []

        def computed(*given: Any) -> Any:
            if rank == 1 and not passes:
                until(quick_is_through)
            loss = compute(*given)
            passes.append(loss)
            if rank == 0 and len(passes) == 2:
                quick_is_through.touch()
            return loss

        made._compute_loss = computed
        training.gradients(made)
        assert len(passes) == 2
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()


def test_a_process_leaves_out_what_teaches_nothing_without_the_others(tmp_path: Path) -> None:
    """Four groups, a micro-batch each, two a process; the first and the last group's rewards are all the same.

    The first process learns from its second group alone. The second one computes both: its last pass is where gradients meet.
    """
    changes = {"loss": "bnpo", "scale_rewards": "none"}  # bnpo: micro-batches in the order of the groups

    def made(folder: Path, mine: processes.Processes) -> tuple[Any, list[int]]:
        def reward(completions: list[Any], id: list[str], **_: Any) -> list[float]:
            return [0.0 if one in same else float(i % 2) for i, one in enumerate(id)]

        here = training.make(folder, engine=Scripted(), rewards=[reward], processes=mine, **SIZES, **changes)
        step = [row["id"] for rank in range(mine.count) for row in _rows_of(here, rank)]
        same = {step[0], step[-1]}
        passes: list[int] = []
        compute = here._compute_loss
        here._compute_loss = lambda *given: (passes.append(1), compute(*given))[1]
        return here, passes

    def _rows_of(here: Any, rank: int) -> list[dict[str, Any]]:
        mine, here.processes = here.processes, replace(here.processes, rank=rank)
        rows: list[dict[str, Any]] = here._rows_of(0)
        here.processes = mine
        return rows

    alone, passes = made(tmp_path / "alone", processes.ALONE)
    expected = training.gradients(alone)
    assert len(passes) == 2 and any(g.abs().max() > 1e-5 for g in expected.values())

    def work(rank: int) -> int:
        mine = processes.join(cpu=True)
        here, passes = made(tmp_path / f"rank-{rank}", mine)
        torch.save({**training.gradients(here), "passes": torch.tensor(len(passes))}, tmp_path / f"{rank}.pt")
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    for rank, computed in enumerate((1, 2)):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert seen.pop("passes") == computed
        assert seen.keys() == expected.keys()
        for name, gradient_of_one in expected.items():
            torch.testing.assert_close(
                seen[name], gradient_of_one, rtol=2e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_divergence_from_the_reference_is_of_all_processes(tmp_path: Path) -> None:
    """Read in metrics.jsonl, so gathered. Of the third step, when the policy has left its reference."""
    sizes: dict[str, Any] = {"steps": 3, "prompts_per_step": 2, "micro_batch": 4, "beta": 0.1}

    def work(rank: int) -> int:
        made = training.make(tmp_path / f"{rank}", engine=Scripted(), processes=processes.join(cpu=True), **sizes)
        made.run = replace(made.run, rank=rank)
        made.start()
        return 0

    assert several.forked(2, work, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    training.make(tmp_path / "alone", engine=Scripted(), **sizes).start()
    seen, expected = (list(read_lines(tmp_path / name / "metrics.jsonl"))[2]["kl"] for name in ("0", "alone"))
    # a mean of means: the micro-batches of two processes are others than those of one; the first process's own is 18 % off
    assert seen == pytest.approx(expected, rel=0.05) and expected > 1e-6
