"""Two GPUs of one host: the command line trains on both, answers are those of one, and a process that dies costs a retry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

from grpo_portable.run.folder import open_run, read_lines  # noqa: E402

pytestmark = pytest.mark.gpu
SMALL = ["steps=12", "prompts_per_step=8", "group_size=8", "micro_batch=16", "rollout_rows=32", "eval_limit=300"]


def train(folder: Path, gpus: str, *more: str, disturb: Any = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "grpo_portable", "train", "arithmetic-embedded", "--auto", "--path", "bf16-hf"]
    words += ["--gpus", gpus, "--out", str(folder), *(w for setting in (*SMALL, *more) for w in ("--set", setting))]
    if disturb is not None:
        threading.Thread(target=disturb, daemon=True).start()
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "worker.log").read_text()[-3000:]
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as pool:  # a card each
        started = [pool.submit(train, folder / name, gpus) for name, gpus in (("one", "0"), ("other", "1"))]
        for run in started:
            run.result()
    train(folder / "two", "0,1")
    return {name: folder / name for name in ("one", "other", "two")}


def answers(folder: Path, stage: str) -> list[dict[str, Any]]:
    return list(read_lines(open_run(folder).generations(stage)))


def test_two_gpus_give_the_answers_of_one(runs: dict[str, Path]) -> None:
    assert answers(runs["other"], "base") == answers(runs["one"], "base"), "the cards themselves agree"
    assert answers(runs["two"], "base") == answers(runs["one"], "base")


def test_both_gpus_are_used(runs: dict[str, Path]) -> None:
    record = json.loads((runs["two"] / "run.json").read_text())
    assert record["processes"] == 2
    assert [m["step"] for m in read_lines(runs["two"] / "metrics.jsonl")] == list(range(1, 13))
    assert all(m["grad_norm"] is not None for m in read_lines(runs["two"] / "metrics.jsonl"))


def test_a_killed_process_is_a_retry(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill() -> None:
        while len(list(read_lines(folder / "metrics.jsonl"))) < 5:
            time.sleep(0.05)
        os.kill(json.loads((folder / "heartbeat-1").read_text())["pid"], signal.SIGKILL)

    train(folder, "0,1", "save_every=2", disturb=kill)
    told = [e for e in read_lines(folder / "events.jsonl") if e["kind"] in ("retry", "fallback")]
    assert [e["kind"] for e in told] == ["retry"] and "rank 1" in told[0]["error"]
    assert [m["step"] for m in read_lines(folder / "metrics.jsonl")] == list(range(1, 13))
