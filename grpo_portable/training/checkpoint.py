"""Checkpoints: everything a training step depends on, written so that a crash leaves the old one or the new one, never a part.

    checkpoints/step-000010/   weights.safetensors    what is trained, by parameter name
                               optimizer.safetensors  the optimizer's tensors, `<parameter>/<name>`
                               random.safetensors     torch's, CUDA's and numpy's generator states
                               state.json             step, schedule, the optimizer's numbers, Python's generator, seconds
                               trainer_state.json     the record transformers keeps
                               manifest.json          size and SHA-256 of each file, written last

A folder is filled under a hidden name, flushed to disk and renamed. A folder whose manifest does not match its files is
torn; the newest whole one is used instead. Safetensors and JSON only: reading a checkpoint can run no code.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file

from grpo_portable.run import manifest
from grpo_portable.run.folder import usual_modes

KEPT = 2
_NAME = re.compile(r"step-(\d{6,})")
_STEP_DOWN = "/"  # between the keys of nested state: 8-bit optimizers keep theirs one level down


@dataclass(frozen=True)
class Checkpoint:
    step: int
    folder: Path

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "weights.safetensors")

    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text(encoding="utf-8"))


def write(
    root: Path,
    step: int,
    *,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    trainer_state: str,
) -> Checkpoint:
    """Write the checkpoint of `step` under `root` and drop all but the newest two. `optimizer` is its state_dict()."""
    final, part = root / f"step-{step:06d}", root / f".step-{step:06d}.part"
    for left in root.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _fill(part, step, weights, optimizer, state, trainer_state)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # on a full disk it would keep the room that is missing
        raise
    if final.exists():  # a torn one of the same step, or the same step saved again
        shutil.rmtree(final)
    part.rename(final)
    _sync(root)
    for old in _folders(root)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return Checkpoint(step, final)


def _fill(
    part: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    trainer_state: str,
) -> None:
    """The files of a checkpoint, on the disk when this returns."""
    numbers, tensors = _split(optimizer)
    python_state, random_tensors = _random_states()
    save_file({k: v.detach().contiguous() for k, v in weights.items()}, part / "weights.safetensors")
    save_file(tensors, part / "optimizer.safetensors")
    save_file(random_tensors, part / "random.safetensors")
    record = {**state, "step": step, "optimizer": numbers, "python_random": python_state}
    (part / "state.json").write_text(json.dumps(record), encoding="utf-8")
    (part / "trainer_state.json").write_text(trainer_state, encoding="utf-8")
    usual_modes(part)
    files = sorted(part.iterdir())
    manifest.write(part, files)
    for file in (*files, part / manifest.NAME, part):
        _sync(file)


def newest(root: Path, on_torn: Callable[[Path], None] = lambda folder: None) -> Checkpoint | None:
    """The newest whole checkpoint under `root`, None when there is none; `on_torn` hears of the torn ones passed over."""
    for folder in _folders(root):
        if _whole(folder):
            return Checkpoint(int(_NAME.fullmatch(folder.name)[1]), folder)  # type: ignore[index]
        on_torn(folder)
    return None


def optimizer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state_dict that was given to `write`."""
    numbers = checkpoint.state()["optimizer"]
    tensors = load_file(checkpoint.folder / "optimizer.safetensors")
    state = numbers["state"]
    for key, tensor in tensors.items():
        *path, name = key.split(_STEP_DOWN)
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[name] = tensor
    return {"state": {int(k): v for k, v in state.items()}, "param_groups": numbers["param_groups"]}


def restore_random_states(checkpoint: Checkpoint) -> None:
    """Put every generator of this process where it stood when the checkpoint was written."""
    kind, internal, gauss = checkpoint.state()["python_random"]
    random.setstate((kind, tuple(internal), gauss))
    tensors = load_file(checkpoint.folder / "random.safetensors")
    torch.set_rng_state(tensors["torch"])
    position = tensors["numpy_position"].tolist()
    numpy.random.set_state(
        (
            "MT19937",
            tensors["numpy"].numpy().astype(numpy.uint32),
            position[0],
            position[1],
            tensors["numpy_gauss"].item(),
        )
    )
    cuda = [tensors[key] for key in sorted(tensors) if key.startswith("cuda")]
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)


def _random_states() -> tuple[Any, dict[str, torch.Tensor]]:
    state: Any = numpy.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = state
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_position": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda{i:03d}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return random.getstate(), tensors


def _split(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An optimizer's state_dict as JSON numbers and named tensors."""
    tensors: dict[str, torch.Tensor] = {}

    def numbers_of(place: Mapping[Any, Any], path: str) -> dict[str, Any]:
        numbers = {}
        for key, value in place.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{path}{key}"] = value.contiguous()
            else:
                deeper = f"{path}{key}{_STEP_DOWN}"
                numbers[str(key)] = numbers_of(value, deeper) if isinstance(value, Mapping) else value
        return numbers

    return {
        "state": numbers_of(optimizer["state"], ""),
        "param_groups": optimizer["param_groups"],
    }, _unshared(tensors)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Safetensors refuses tensors that share memory; an 8-bit optimizer shares its quantisation map between parameters."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[key] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result


def _folders(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, newest first."""
    found = [(int(m[1]), f) for f in root.glob("step-*") if f.is_dir() and (m := _NAME.fullmatch(f.name))]
    return [folder for _, folder in sorted(found, reverse=True)]


def _whole(folder: Path) -> bool:
    known = manifest.known(folder)
    try:
        return bool(known) and all(manifest.fingerprint(folder / name) == held for name, held in known.items())
    except (OSError, ValueError):
        return False


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():  # some filesystems cannot flush a folder; a file must reach the disk
            raise
    finally:
        os.close(handle)
