"""One card beside several: the same global batch, measured in processes of its own; here two processes on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import several

from grpo_portable.bench import child, gpus
from grpo_portable.bench.shapes import Workload
from grpo_portable.plan import catalogue
from grpo_portable.recipe import load
from grpo_portable.supervision.ladder import Rung

ONE, TWO = Rung("cpu", 4, 4), Rung("cpu", 4, 4, processes=2)
SMALL = ["path=cpu", "prompts_per_step=2", "group_size=4", "micro_batch=4", "rollout_rows=4", "eval_limit=4"]
SMALL += ["train_limit=32", "optimizer=adamw", "eval_data=arithmetic", "max_completion_tokens=24"]
LAUNCHED = child.run


def in_forks(
    command: Sequence[str], folder: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`bench.child.run` of ranks that are forks of this process, which has torch in memory already."""
    at = len(command) - 1 - list(reversed(command)).index("-m")
    module, *words = command[at + 1 :]

    def work(rank: int) -> int:
        os.environ.update(environment or {})
        sys.argv = [module, *words]
        return int(importlib.import_module(module).main())

    codes = several.forked(ranks_of(command), work, folder / "side.log")
    return {"error": f"exit codes {codes}: {(folder / 'side.log').read_text()[-2000:]}"} if any(codes) else {}


def ranks_of(command: Sequence[str]) -> int:
    return int(command[command.index("--num_processes") + 1])


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("bench.rank", "bench.side", "training.trainer"):  # once, rather than in every fork
        importlib.import_module(f"grpo_portable.{room}")
    monkeypatch.setattr(child, "run", in_forks)


def test_a_rollout_on_one_and_on_two(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is started as `bench rollout` does it."""
    monkeypatch.setattr(child, "run", lambda c, *rest: (in_forks if ranks_of(c) > 1 else LAUNCHED)(c, *rest))
    work = Workload(prompts=4, group=2, prompt_tokens=8, new_tokens=16, rows=4, lora_rank=4)
    report = gpus.bench_rollout("tiny", "portable", work, [ONE, TWO], repeats=2)
    assert [seen["processes"] for seen in report["on"]] == [1, 2], report
    for seen in report["on"]:
        assert len(seen["seconds"]) == 2
        middle = sum(seen["seconds"]) / 2
        assert abs(seen["tok_s"] - 4 * 2 * 16 / middle) < 0.01 * seen["tok_s"], "all tokens of both, by the slower one"
    assert report["times"] == round(report["on"][1]["tok_s"] / report["on"][0]["tok_s"], 3)
    assert "times as fast" in gpus.table(report)


def test_a_step_on_one_and_on_two(forked: None) -> None:
    recipe = load(catalogue.find("arithmetic-embedded"), SMALL)
    report = gpus.bench_step([(ONE, recipe), (TWO, recipe)], steps=2)
    assert [len(seen.get("seconds", [])) for seen in report["on"]] == [2, 2], report
    assert report["times"] == round(report["on"][0]["seconds_median"] / report["on"][1]["seconds_median"], 3)
    for seen in report["on"]:
        assert all(0 < part < whole for part, whole in zip(seen["rollout_s"], seen["seconds"], strict=True))
        assert seen["rollout_tok_s"] > seen["tok_s"] > 0
    first, last = (seen["rollout_tok_s"] for seen in report["on"])
    assert report["rollout_times"] == round(last / first, 3)
    assert "2 x 4 completions" in gpus.table(report)


def test_reports_of_the_same_work_are_one_table() -> None:
    """1000 tokens a second on one and 1950 on two: 1.95 times as fast; the order of the files does not matter."""
    same: dict[str, Any] = {"what": "rollout", "shape": "tiny", "engine": "portable", "device": "cpu", "torch": "2"}
    same["workload"] = {"prompts": 2, "group": 2, "new_tokens": 8}
    one = {**same, "on": [{"gpus": [0], "processes": 1, "seconds": [2.0], "tok_s": 1000.0}], "times": 1.0}
    two = {**same, "on": [{"gpus": [0, 1], "processes": 2, "seconds": [1.0], "tok_s": 1950.0}], "times": 1.0}
    report = gpus.joined([two, one])
    assert report["times"] == 1.95 and "1.95 times as fast" in gpus.table(report)
    with pytest.raises(ValueError, match="workload"):
        gpus.joined([one, {**two, "workload": {"prompts": 4}}])


def test_a_number_of_gpus_that_fails_has_its_error_and_the_other_its_figures(forked: None) -> None:
    recipe = load(catalogue.find("arithmetic-embedded"), SMALL)
    report = gpus.bench_step([(ONE, recipe), (replace(TWO, processes=3), recipe)], steps=1)
    assert "error" in report["on"][1] and report["on"][0]["seconds_median"] > 0
    assert report["times"] is None
    assert report["on"][1]["error"] in gpus.table(report)


@pytest.mark.parametrize("as_json", [False, True])
def test_json_is_written_only_where_it_is_asked_for(
    forked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(gpus, "Rung", lambda *_, **__: ONE)  # in place of the GPU
    asked = "rollout --gpus 0 --shape tiny --prompts 2 --group 2 --prompt-tokens 8 --new-tokens 8 --rows 4 --repeats 1"
    assert gpus.main([*asked.split(), *(["--json"] if as_json else [])]) == 0
    told = capsys.readouterr()
    assert ("{" in told.out, "{" in told.err) == (as_json, as_json)
    assert as_json or ("GPUs" in told.out and told.err.startswith("1 GPU: "))


@pytest.mark.slow
def test_a_time_limit_ends_every_process_and_keeps_the_steps_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """More steps than fit into the limit, by two processes: those that were made count, and neither process is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recipe = load(catalogue.find("arithmetic-embedded"), SMALL)
    (seen,) = gpus.bench_step([(TWO, recipe)], steps=10**5, limit_s=60.0)["on"]
    assert seen["error"] == "it did not end within 60 s"
    said = capfd.readouterr().err
    assert len(seen["seconds"]) >= 2 and seen["seconds_median"] > 0, said
    assert not [pid for pid, words in _commands() if str(tmp_path).encode() in words]
    told = json.loads(next(line for line in said.splitlines() if line.startswith('{"gpus"')))
    assert told["seconds"] == seen["seconds"], "said as it ended"


def _commands() -> Iterator[tuple[str, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield folder.name, (folder / "cmdline").read_bytes()


def test_of_a_process_that_ran_out_of_time_the_limit_is_told_else_its_own_error() -> None:
    seen = {"seconds": [1.0], "error": "Interrupted: saved"}
    late, failed = {"error": "it did not end within 5 s"}, {"error": "exit code 1: the last line"}
    assert child.with_figures(late, seen) == {"seconds": [1.0], "error": "it did not end within 5 s"}
    assert child.with_figures(failed, seen)["error"] == "Interrupted: saved"
    assert child.with_figures(failed, {}) == failed and child.with_figures({}, {"seconds": []}) == {"seconds": []}


def test_what_ignores_the_wish_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.5)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    began = time.monotonic()
    assert child.run([sys.executable, "-c", deaf], tmp_path, 2.0) == {"error": "it did not end within 2 s"}
    assert time.monotonic() - began < 20
