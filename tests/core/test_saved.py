"""Whether weights are as they were saved: by the manifest beside them, else by their own header."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_portable.run import manifest
from grpo_portable.run.saved import is_whole, torn

FILE = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter that says nothing of its weights beside them, as others' do."""
    save_file({"a": torch.arange(4.0)}, tmp_path / FILE)
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    return tmp_path


def cut(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("noted", "damage", "whole"),
    [
        (True, bytes, True),
        (True, cut, False),
        (True, flipped, False),
        (False, bytes, True),
        (False, cut, False),
        (False, flipped, True),  # nobody wrote down what it was
    ],
)
def test_weights_are_as_they_were_saved(folder: Path, noted: bool, damage: Any, whole: bool) -> None:
    if noted:
        manifest.write(folder, [folder / FILE])
    (folder / FILE).write_bytes(damage((folder / FILE).read_bytes()))
    assert is_whole(folder) is whole
    assert torn(folder) == (None if whole else folder / FILE)


def test_of_a_model_in_several_files_each_is_there(folder: Path) -> None:
    second = folder / "model-2.safetensors"
    save_file({"b": torch.ones(2)}, second)
    manifest.write(folder, [folder / FILE, second])
    assert is_whole(folder)
    second.unlink()
    assert torn(folder) == second and not is_whole(folder)


@pytest.mark.parametrize("other", ["[1, 2]", '{"name": "a web application"}', "no json"])
def test_a_manifest_of_another_kind_says_nothing(folder: Path, other: str) -> None:
    (folder / manifest.NAME).write_text(other)
    assert torn(folder) is None


@pytest.mark.parametrize(
    ("noted", "text", "whole"),
    [
        # who moves a base writes its place
        (True, json.dumps({"base_model_name_or_path": "mine", "r": 4}, indent=2), True),
        (True, '{"r": 5}', False),
        (True, '{"r": 4', False),
        (True, "[4]", False),
        (False, '{"r": 5}', True),  # nobody wrote down what it was
        (False, '{"r": 4', False),
        (False, "[4]", False),
    ],
)
def test_an_adapters_configuration_is_as_it_was_saved_but_for_its_bases_name(
    folder: Path, noted: bool, text: str, whole: bool
) -> None:
    config = folder / "adapter_config.json"
    if noted:
        manifest.write(folder, [folder / FILE, config])
    config.write_text(text)
    assert is_whole(folder) is whole
    assert torn(folder) == (None if whole else config)


@pytest.mark.parametrize("gone", [FILE, "adapter_config.json"])
def test_what_is_not_there_is_not_whole(folder: Path, gone: str) -> None:
    manifest.write(folder, [folder / FILE])
    (folder / gone).unlink()
    assert not is_whole(folder)
