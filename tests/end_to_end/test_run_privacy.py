"""A run's files tell nobody who made it: no home folder, no user, no host, no value of the environment, whatever went wrong."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

import faulty
import pytest
import tiny

from grpo_portable.report import page
from grpo_portable.run.folder import RunFolder
from grpo_portable.scores import scoring
from grpo_portable.training import trainer

USER, TOKEN, VALUE = "mira-private", "hf_" + "aBcDeFgHiJkLmNoPqRsT", "my-company-wandb-project"
KEY, HOST = "0f1e2d3c4b5a69788796a5b4c3d2e1f0", "gpu-box-07"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a model and questions in it, and an environment that holds secrets."""
    home = tmp_path / "home" / USER
    tiny.save(home / "models" / "tiny")
    tiny.questions_folder(home / "sums")
    for name, value in {
        "HOME": str(home),
        "HF_TOKEN": TOKEN,
        "WANDB_PROJECT": VALUE,
        "WANDB_API_KEY": KEY,
        "USER": USER,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", HOST, "6", "1", "x86_64")))
    monkeypatch.setattr(platform, "node", lambda: HOST)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    return home


def goes_wrong(home: Path) -> Any:
    """A crash whose text holds a path and a token, as errors of downloads do."""
    error = OSError(
        f"401 for url https://{USER}:secret@hub.example/x (token {TOKEN}, key {KEY}) on {HOST}; see {home}/.cache/log"
    )

    def put_in(folder: Path) -> None:
        print(f"a library says: reading {home}/models with {TOKEN}", flush=True)
        faulty.at_call(trainer.GrpoTrainer, "_note_rollout", 3, faulty.throw(error))

    return put_in


def texts(run: RunFolder) -> dict[str, str]:
    files = [f for f in run.path.rglob("*") if f.is_file() and f.suffix not in (".safetensors", ".png")]
    return {str(f.relative_to(run.path)): f.read_text(encoding="utf-8", errors="replace") for f in files}


def check(found: dict[str, str], home: Path) -> None:
    private = [str(home), USER, TOKEN, VALUE, KEY, HOST, "secret@"]
    for name, text in found.items():
        for secret in private:
            assert secret not in text, f"{name} holds {secret}: {text[max(0, text.find(secret) - 200) :][:400]}"


def test_no_file_of_a_run_names_anybody(home: Path, tmp_path: Path) -> None:
    inputs = {"model": str(home / "models" / "tiny"), "data": str(home / "sums"), "eval_data": str(home / "sums")}
    run = faulty.new_run(tmp_path / "run", faulty.recipe(home, **inputs))
    seen = faulty.supervised(run, goes_wrong(home))
    assert seen.told is None, seen.log
    assert [ending.kind for ending in seen.endings] == ["crash", "done"]
    scoring.score_run(run)
    page.write_report(run)
    found = texts(run)
    assert {"worker.log", "events.jsonl", "report.md", "run.json", "recipe.yaml", "scores.json"} <= found.keys()
    check(found, home)
    assert "~/models/tiny" in found["recipe.yaml"]
    assert "a library says: reading ~/models with hf_..." in found["worker.log"]
    assert "OSError" in found["events.jsonl"] and "401 for url" in found["events.jsonl"]
    assert os.environ["HF_TOKEN"] == TOKEN


def test_nor_does_a_run_that_stopped(home: Path) -> None:
    inputs = {"model": str(home / "models" / "tiny"), "data": str(home / "sums"), "eval_data": str(home / "sums")}
    run = faulty.new_run(home / "runs" / "one", faulty.recipe(home, **inputs))
    seen = faulty.supervised(run, goes_wrong(home), fallback=False)
    assert seen.told is not None
    assert str(run.path) in " ".join(seen.told.lines())  # on the screen the way on is whole
    found = texts(run)
    assert "Traceback" in found["failure.json"]
    check(found, home)
