"""What kind of failure an error is: by its class, its own words and the modules it came through."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from grpo_portable.errors import EngineError, Interrupted, NonFiniteError, RewardError, UsageError
from grpo_portable.supervision import failure, ladder
from grpo_portable.supervision.phase import Doing, Phase

FULL = OSError(28, "No space left on device")


def came_through(module: str, file: str, error: BaseException) -> BaseException:
    """The error as it is caught when a function of `module`, which lies in `file`, raised it."""
    room = types.ModuleType(module)
    exec(compile("def fail(error): raise error", file, "exec"), room.__dict__)
    try:
        room.fail(error)
    except type(error) as caught:
        return caught
    raise AssertionError


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UsageError("x"), "user"),
        (EngineError("died"), "engine"),
        (EngineError("HIP out of memory"), "oom"),
        (NonFiniteError("x"), "nonfinite"),
        (RewardError("x"), "reward"),
        (Interrupted("x"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (MemoryError(), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "engine"),
        (RuntimeError("device-side assert"), "crash"),
        (KeyError("CUDA error"), "crash"),
        (ModuleNotFoundError("No module named 'httpx2'"), "import"),
        (ImportError("libcudart.so.13: cannot open shared object file"), "import"),
        (FULL, "disk"),
        (OSError(122, "Disk quota exceeded"), "disk"),
        (OSError(27, "File too large"), "disk"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "disk"),
        (SystemExit(1), "crash"),
    ],
    ids=repr,
)
def test_an_error_is_of_one_kind(error: BaseException, kind: str) -> None:
    assert failure.kind_of(error) == kind


@pytest.mark.parametrize(
    ("module", "file", "kind"),
    [
        ("trl.trainer.grpo", "/home/me/env/lib/trl/trainer/grpo.py", "crash"),
        ("trl.trainer.grpo", "/home/me/vllm-env/lib/trl/trainer/grpo.py", "crash"),
        ("grpo_portable.rollout.vllm", "/src/unsloth/grpo_portable/rollout/vllm.py", "crash"),
        ("vllm.v1.engine.core", "/home/me/env/lib/vllm/v1/engine/core.py", "engine"),
        ("flashinfer.jit", "core.py", "engine"),
        ("UnslothGRPOTrainer", "/tmp/cache/x.py", "engine"),
    ],
)
def test_an_engine_is_known_by_its_modules_and_not_by_its_folders(module: str, file: str, kind: str) -> None:
    assert failure.kind_of(came_through(module, file, KeyError("x"))) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ImportError("cannot import name 'LLM' from 'vllm'"), "import"),
        (RuntimeError("EngineCore: CUDA error: no kernel image"), "engine"),
        (RuntimeError("vllm: CUDA out of memory"), "oom"),
        (OSError(28, "No space left on device", "vllm.log"), "disk"),
    ],
    ids=repr,
)
def test_an_error_is_of_the_same_kind_whether_it_was_caught_or_read_in_a_log(error: Exception, kind: str) -> None:
    caught = came_through("vllm.v1.engine.core", "core.py", error)
    read = ladder.classify(1, {}, f"{type(error).__name__}: {error}", Doing(Phase.STARTING))
    assert (failure.kind_of(caught), read.kind) == (kind, kind)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (raised_from(RuntimeError("the data set could not be built"), FULL), "disk"),
        (raised_from(ValueError("x"), raised_from(KeyError("y"), MemoryError())), "oom"),
        (raised_from(RuntimeError("transformers could not be loaded"), ImportError("x")), "import"),
        (raised_from(RewardError("x"), MemoryError()), "reward"),  # it says itself what it is
        (raised_from(ValueError("x"), KeyError("y")), "crash"),
    ],
    ids=repr,
)
def test_what_an_error_was_raised_from_counts_where_it_says_nothing_itself(error: BaseException, kind: str) -> None:
    assert failure.kind_of(error) == kind


def test_errors_that_name_each_other_end() -> None:
    one, two = ValueError("x"), KeyError("y")
    one.__cause__, two.__cause__ = two, one
    assert failure.kind_of(one) == "crash"


def test_a_file_that_may_not_be_written_is_the_disks_in_the_runs_folder_alone(tmp_path: Path) -> None:
    locked = PermissionError(13, "Permission denied", str(tmp_path / "run.json"))
    assert failure.kind_of(locked, tmp_path) == "disk"
    assert failure.kind_of(locked, tmp_path / "other") == "crash"
