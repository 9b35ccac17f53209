"""A checkpoint is whole or not there, holds everything a step depends on, and reading it runs no code."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
import torch

from grpo_portable.training import checkpoint


def trained(steps: int = 3, optimizer_class: type = torch.optim.AdamW) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def write(root: Path, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> checkpoint.Checkpoint:
    weights = dict(model.named_parameters())
    state = {"schedule": {"last_epoch": number}, "seconds": 1.5}
    return checkpoint.write(
        root, number, weights=weights, optimizer=optimizer.state_dict(), state=state, trainer_state="{}"
    )


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_going_on_from_a_checkpoint_is_going_on(tmp_path: Path, optimizer_class: type) -> None:
    model, optimizer = trained(optimizer_class=optimizer_class)
    random.seed(5), numpy.random.seed(5)
    random.gauss(0, 1), numpy.random.normal()
    write(tmp_path, 3, model, optimizer)
    step(model, optimizer)
    drawn = (torch.randn(2).tolist(), random.random(), random.gauss(0, 1), numpy.random.normal(size=3).tolist())

    other, other_optimizer = trained(0, optimizer_class)
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert saved.step == 3
    assert len({file.stat().st_mode for file in saved.folder.iterdir()}) == 1  # by the umask, all of them
    other.load_state_dict(saved.weights())
    other_optimizer.load_state_dict(checkpoint.optimizer_state(saved))
    checkpoint.restore_random_states(saved)
    step(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    again = (torch.randn(2).tolist(), random.random(), random.gauss(0, 1), numpy.random.normal(size=3).tolist())
    assert again == drawn
    assert saved.state()["schedule"] == {"last_epoch": 3}


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    model, optimizer = trained()
    for number in (10, 20, 30):
        write(tmp_path, number, model, optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000020", "step-000030"]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.step == 30


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    model, optimizer = trained()
    write(tmp_path, 10, model, optimizer)
    torn = write(tmp_path, 20, model, optimizer).folder / file
    content = torn.read_bytes()
    if damage == "gone":
        torn.unlink()
    else:
        torn.write_bytes(content[: len(content) // 2] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    heard: list[Path] = []
    saved = checkpoint.newest(tmp_path, heard.append)
    assert saved is not None
    assert saved.step == 10
    assert heard == [tmp_path / "step-000020"]


def test_a_crash_while_writing_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    write(tmp_path, 10, model, optimizer)
    monkeypatch.setattr(checkpoint, "_sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 20, model, optimizer)
    monkeypatch.undo()
    # what is half written would keep the room that is missing
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert saved.step == 10
    assert write(tmp_path, 20, model, optimizer).step == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000020"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    model, optimizer = trained()
    (tmp_path / ".step-000010.part").mkdir()
    write(tmp_path, 20, model, optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000020"]


def test_there_is_no_checkpoint_in_an_empty_place(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") is None
    (tmp_path / "step-000010").mkdir()
    assert checkpoint.newest(tmp_path) is None


def test_only_numbers_and_text_are_stored(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = write(tmp_path, 10, model, optimizer).folder
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}
    for file in folder.glob("*.json"):
        json.loads(file.read_text())
