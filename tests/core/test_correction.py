"""Importance ratios between sampler and trainer: by hand, and against TRL's own correction with its extra forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import training
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_portable.errors import EngineError
from grpo_portable.rollout.protocol import Completion, Sampling
from grpo_portable.run.folder import read_lines
from grpo_portable.training.correction import Gap, SamplerCorrection, sums_apart, truncated_ratios


def test_ratios_by_hand() -> None:
    trainer = torch.tensor([[math.log(0.5), math.log(0.9), math.log(0.2), -1.0, -3.0]])
    sampler = torch.tensor([[math.log(0.25), math.log(0.3), math.log(0.8), math.nan, -1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    # 0.5 / 0.25 is at the limit, 0.9 / 0.3 above it, 0.2 / 0.8 below 1; no number and no token change nothing
    assert truncated_ratios(trainer, sampler, mask).tolist() == [pytest.approx([2.0, 2.0, 0.25, 1.0, 1.0])]
    assert truncated_ratios(trainer, sampler, mask, limit=3.5)[0, 1].item() == pytest.approx(3.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=20))
def test_ratios_are_bounded_and_only_where_there_are_tokens(rows: list[tuple[float, float, bool]]) -> None:
    trainer, sampler, mask = (torch.tensor([[row[i] for row in rows]]) for i in range(3))
    ratios = truncated_ratios(trainer, sampler, mask.long())
    assert ((ratios >= 0) & (ratios <= 2)).all() and (ratios[~mask] == 1).all()
    kept = mask & (trainer - sampler < math.log(2))
    torch.testing.assert_close(ratios[kept], (trainer - sampler)[kept].exp())


def test_the_gap_by_hand() -> None:
    assert Gap().metrics() == {}
    trainer = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -1.0, -1.0]])
    sampler = torch.tensor([[-1.5, -1.0, 0.0], [-0.5, math.nan, -2.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    gap = Gap(*sums_apart(trainer, sampler, mask, truncated_ratios(trainer, sampler, mask)).tolist())
    # tokens: -0.5, 1, 0, (no number), -1; one ratio, e**1, is above 2
    assert gap.tokens == 4
    assert gap.metrics() == {"sampler_kl": pytest.approx(-0.125), "ratio_cut": 0.25}


def test_summing_the_gap_waits_for_no_number() -> None:
    with FakeTensorMode():  # its tensors have no values to read
        tokens = torch.zeros(2, 3)
        assert sums_apart(tokens, tokens, tokens, tokens).shape == (3,)


def test_the_gap_is_read_once_a_step(tmp_path: Path) -> None:
    made = training.make(tmp_path, steps=2)  # of three micro-batches
    taken, read = made.take_gap, []
    made.take_gap = lambda: read.append(made.state.global_step) or taken()
    made.train()
    assert read == [0, 1]
    tokens = [line["completion_tokens"] * 12 for line in read_lines(made.run.metrics_file)]
    assert made.gap.tokens == tokens[1]


def test_an_engine_that_samples_from_something_else_is_stopped_once_that_is_sure() -> None:
    close, apart, few = Gap(1000, 40.0), Gap(1000, 300.0), Gap(100, 300.0)
    close.require_close("vllm", 3)
    few.require_close("vllm", 3)
    with pytest.raises(EngineError, match=r"the vllm engine no longer samples .* 0.30 nats .* step 3"):
        apart.require_close("vllm", 3)


class Skewed:
    """The engine of a trainer, which tells other log-probabilities than it drew by: as if its weights were others."""

    name = "skewed"

    def __init__(self, engine: Any, skew: Callable[[int], float]) -> None:
        self.engine, self.skew = engine, skew

    def sync(self, policy: Any) -> None:
        self.engine.sync(policy)

    def close(self) -> None:
        self.engine.close()

    def generate(self, prompts: Any, n: int, sampling: Sampling) -> list[list[Completion]]:
        groups = self.engine.generate(prompts, n, sampling)
        return [
            [replace(c, logprobs=tuple(x - self.skew(i) for i, x in enumerate(c.logprobs))) for c in group]
            for group in groups
        ]


def uneven(index: int) -> float:
    return (0.0, 0.4, -0.3, 1.5, -1.0)[index % 5]  # one in five above the limit of log 2


def gradients(folder: Path, correct: bool, skew: Callable[[int], float], **changes: Any) -> dict[str, torch.Tensor]:
    made = training.make(folder, **changes)
    made.engine, made.correct_sampler = Skewed(made.engine, skew), correct
    return training.gradients(made)


def trls_gradients(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """With TRL's correction at the same limit, and ours out of the way."""
    made = training.make(folder, **changes)
    made.engine = Skewed(made.engine, uneven)
    made.vllm_importance_sampling_mode, made.vllm_importance_sampling_clip_max = "token_truncate", 2.0
    loss, passes = super(SamplerCorrection, made)._compute_loss, []
    logps = super(SamplerCorrection, made)._get_per_token_logps_and_entropies
    made._compute_loss = loss
    made._get_per_token_logps_and_entropies = lambda *a, **k: passes.append(1) or logps(*a, **k)
    made.use_vllm = True
    kept = training.gradients(made)
    assert len(passes) == 4  # three micro-batches, and one pass more over the whole batch
    return kept


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_the_gradient_is_that_of_trls_correction(tmp_path: Path, loss: str) -> None:
    ours = gradients(tmp_path / "ours", True, uneven, loss=loss)
    theirs = trls_gradients(tmp_path / "theirs", loss=loss)
    plain = gradients(tmp_path / "plain", False, uneven, loss=loss)
    assert any((theirs[name] - plain[name]).abs().max() > 1e-4 for name in theirs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_sampler_that_is_surer_everywhere_scales_the_gradient(tmp_path: Path) -> None:
    plain = gradients(tmp_path / "plain", True, lambda i: 0.0)
    # every token was drawn with 1/0.8 of the trainer's probability: each weighs 0.8
    scaled = gradients(tmp_path / "scaled", True, lambda i: math.log(0.8))
    capped = gradients(tmp_path / "capped", True, lambda i: math.log(5.0))
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], 0.8 * gradient, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(capped[name], 2.0 * gradient, rtol=1e-3, atol=1e-7)


def test_an_engine_with_the_policys_own_weights_is_measured_and_left_alone(tmp_path: Path) -> None:
    for correct in (True, False):
        made = training.make(tmp_path / str(correct))
        made.correct_sampler = correct
        made.train()
        lines = list(read_lines(made.run.metrics_file))
        assert all(abs(line["sampler_kl"]) < 1e-5 and line["ratio_cut"] == 0 for line in lines)
    corrected, plain = (gradients(tmp_path / f"g{correct}", correct, lambda i: 0.0) for correct in (True, False))
    for name in plain:
        torch.testing.assert_close(corrected[name], plain[name], rtol=1e-4, atol=1e-7)


def test_later_updates_of_a_rollout_keep_its_ratios(tmp_path: Path) -> None:
    made = training.make(tmp_path, num_iterations=2, micro_batch=12, learning_rate=0.2)
    made.engine, made.correct_sampler = Skewed(made.engine, uneven), True
    seen: list[torch.Tensor] = []
    original = made._compute_loss

    def kept(model: Any, inputs: Any) -> Any:
        loss = original(model, inputs)
        seen.append(inputs["importance_sampling_ratio"].clone())
        return loss

    made._compute_loss = kept
    made.train()
    assert len(seen) == 4
    # of old against sampler, whatever moved since
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    wanted = torch.tensor([min(2.0, math.exp(uneven(i))) for i in range(seen[0].size(1))])
    lengths = (seen[0] != 1).any(1)
    torch.testing.assert_close(seen[0][lengths][0][:5], wanted[:5], rtol=1e-3, atol=1e-3)


def test_truncated_sampling_is_no_sign_of_a_broken_engine(tmp_path: Path) -> None:
    made = training.make(tmp_path, top_k=2, model=tiny.model(), prompts_per_step=9, max_completion_tokens=24, steps=1)
    made.train()
    (line,) = read_lines(made.run.metrics_file)
    assert line["sampler_kl"] > 1  # two tokens of a hundred alike
