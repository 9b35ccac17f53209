"""The doctor counts memory without torch, so it keeps copies of numbers and conditions of what runs. Here they meet."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from doctor import memory  # noqa: E402
from grpo_portable.rollout import decoder  # noqa: E402
from grpo_portable.updates import quick  # noqa: E402


def test_prompt_tokens_at_once() -> None:
    assert memory.PREFILL_TOKENS == decoder.PREFILL_TOKENS


@pytest.mark.parametrize("longest", [1, 63, 64, 127, 768, 832, 4096])
def test_positions_that_a_row_is_given(longest: int) -> None:
    assert decoder.capacity_for(longest) == -(-(longest + 1) // memory.KV_BUCKET) * memory.KV_BUCKET


def test_the_tile_of_the_loss() -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert (memory.LOSS_ROWS, memory.LOSS_COLUMNS) == (
        chunked_logprob.TOKEN_CHUNK_SIZE,
        utils._CHUNKED_LOGPROB_CHUNK_SIZE,
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spread", [1, 2])
def test_who_learns_with_few_kernels(device: str, shared: bool, spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "is_spread", lambda model: spread > 1)
    trainer = quick.QuickUpdates()
    trainer.model, trainer.own_layers = torch.nn.Linear(2, 2), shared
    trainer.accelerator = SimpleNamespace(device=torch.device(device))
    few = not isinstance(trainer._kernels(), contextlib.nullcontext)
    assert memory._few_kernels(memory.Setting("bf16", device=device, shared=shared, spread=spread)) == few
