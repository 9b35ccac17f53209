"""Whole runs under the real supervisor on the two backends that are others': a vLLM server, and Unsloth. And what is left of a
run when one of them goes: the same path without it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import standin_server
import standin_unsloth
import standin_vllm
import tiny
from faulty import lost, new_run, recipe, supervised

from grpo_portable import fast
from grpo_portable.errors import UsageError
from grpo_portable.report import page
from grpo_portable.rollout import server
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.scores import scoring


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny.save(folder / "model", initializer_range=0.3)
    tiny.questions_folder(folder / "sums")
    return folder


@pytest.fixture
def served(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[standin_server.Server]:
    standin_vllm.install(monkeypatch)
    made = standin_server.Server(inputs / "model", context=512)
    made.llm.arguments["max_model_len"] = 512
    with standin_server.serving(made) as url:
        made.url = url  # type: ignore[attr-defined]
        yield made


def finished(made: RunFolder) -> str:
    """The report's text; nothing of the run is lost."""
    assert lost(made) == []
    scoring.score_run(made)
    return page.write_report(made).read_text()


def events(made: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(made.events_file) if event["kind"] == kind]


def on_a_server(inputs: Path, served: Any, **changes: Any) -> Any:
    return recipe(inputs, backend="server", vllm_server=served.url, max_prompt_tokens=64, **changes)


def test_a_run_whose_rollouts_come_from_a_server(inputs: Path, served: Any, tmp_path: Path) -> None:
    made = new_run(tmp_path / "run", on_a_server(inputs, served))
    assert supervised(made).told is None, (made.path / "worker.log").read_text()
    text, told = finished(made), made.read_json("run.json")
    assert told["engine"] == "vllm-server" and told["engine_details"]["url"] == served.url
    assert all(abs(line["sampler_kl"]) < 0.02 for line in read_lines(made.metrics_file))
    assert "rollouts by the vllm-server engine" in text
    assert served.adapters == {}  # it was taken off the server
    assert len(served.bodies("/v1/load_lora_adapter")) == 4 + 2  # one a step, one an evaluation


def test_without_the_server_the_run_goes_on_with_the_paths_own_engine(
    inputs: Path, served: Any, tmp_path: Path
) -> None:
    loads = 0

    def gone_at_the_third_step(handler: Any) -> bool:
        nonlocal loads
        loads += 1
        if loads > 3:
            handler.say(500, {"error": {"message": "EngineDeadError"}})
        return loads > 3

    served.faults["/v1/load_lora_adapter"] = gone_at_the_third_step
    made = new_run(tmp_path / "run", on_a_server(inputs, served))
    seen = supervised(made)
    assert seen.told is None and [ending.kind for ending in seen.endings] == ["engine", "done"]
    text = finished(made)
    (event,) = events(made, "fallback")
    assert (event["from"], event["to"]) == ("cpu (server)", "cpu") and "EngineDeadError" in event["message"]
    assert made.read_json("run.json")["engine"] == "portable" and made.recipe().backend == "plain"
    assert "`cpu (server)`" in text and "`cpu`" in text  # which steps were made with it


def test_a_wrong_server_stops_the_run_before_anything_is_made(inputs: Path, served: Any, tmp_path: Path) -> None:
    served.runtime_adapters = False
    made = new_run(tmp_path / "run", on_a_server(inputs, served))
    seen = supervised(made)
    assert isinstance(seen.told, UsageError) and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in str(seen.told.help)
    assert len(seen.endings) == 1 and not list(read_lines(made.generations("base")))


def test_a_key_is_in_no_file_of_the_run(
    inputs: Path, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.key = "key-of-the-server"
    monkeypatch.setenv("VLLM_API_KEY", served.key)
    made = new_run(tmp_path / "run", on_a_server(inputs, served, steps=1))
    assert supervised(made).told is None, (made.path / "worker.log").read_text()
    finished(made)
    for file in made.path.rglob("*"):
        assert not file.is_file() or served.key.encode() not in file.read_bytes(), file


def with_unsloth(folder: Path) -> None:
    """In a worker: Unsloth's stand-in, and a card."""
    standin_unsloth.install(pytest.MonkeyPatch())
    fast._card = lambda: (60.0, 80.0)


def unsloth_fails(folder: Path) -> None:
    with_unsloth(folder)
    standin_unsloth.FastLanguageModel.fault = NotImplementedError("Unsloth: no FP8 on this card")


def test_a_run_on_weights_that_unsloth_shares(inputs: Path, tmp_path: Path) -> None:
    wanted = recipe(
        inputs, path="bf16-vllm", backend="unsloth", bootstrap_epochs=1.0, bootstrap_limit=8, max_completion_tokens=24
    )
    made = new_run(tmp_path / "run", wanted)
    assert supervised(made, with_unsloth).told is None, (made.path / "worker.log").read_text()
    text, told = finished(made), made.read_json("run.json")
    assert told["engine_details"]["weights_shared"] and told["backend"] == "trl on Unsloth's kernels"
    assert "updates by trl on Unsloth" in text
    assert all(abs(line["sampler_kl"]) < 0.02 for line in read_lines(made.metrics_file))
    adapter = json.loads((made.adapter / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "model"


def test_where_unsloth_does_not_start_the_path_runs_without_it(inputs: Path, tmp_path: Path) -> None:
    made = new_run(tmp_path / "run", recipe(inputs, path="bf16-vllm", backend="unsloth"))
    seen = supervised(made, unsloth_fails)
    assert seen.told is None and [ending.kind for ending in seen.endings] == ["engine", "done"]
    text = finished(made)
    (event,) = events(made, "fallback")
    assert (event["from"], event["to"]) == ("bf16-vllm (unsloth)", "bf16-vllm")
    assert "no FP8 on this card" in event["message"] and "no FP8 on this card" in text
    assert made.read_json("run.json")["backend"] == "trl"


def test_a_run_that_began_on_shared_weights_can_be_evaluated_without_unsloth(inputs: Path, tmp_path: Path) -> None:
    made = new_run(tmp_path / "run", recipe(inputs, path="bf16-vllm", backend="unsloth", steps=2))
    assert supervised(made, with_unsloth).told is None
    other = new_run(tmp_path / "eval", recipe(inputs, path="bf16-vllm", backend="unsloth"))
    other.write_json("task.json", {"only": "evaluate", "adapter": str(made.adapter)})
    assert supervised(other).told is None, (other.path / "worker.log").read_text()
    tuned = [list(read_lines(run.generations("tuned"))) for run in (made, other)]
    assert [g["completion"] for g in tuned[0]] == [g["completion"] for g in tuned[1]]
    shutil.rmtree(other.path)


def test_limits_lie_within_each_other() -> None:
    from grpo_portable.supervision import supervisor

    assert server.ANSWER_LIMIT_S < supervisor.SILENCE_LIMIT_S  # a server that hangs is told by its name
