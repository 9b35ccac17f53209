"""GRPO steps: what is computed is what the formulas say, whatever the batching; faults cost an update at most."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import training

from grpo_portable.errors import EngineError, NonFiniteError, RewardError
from grpo_portable.models import policy
from grpo_portable.rewards.faults import FaultCounter
from grpo_portable.rollout.protocol import Completion
from grpo_portable.run.folder import read_lines
from grpo_portable.training import checkpoint
from grpo_portable.training.arguments import optimizer, training_arguments
from grpo_portable.training.batches import micro_batches, questions_of
from grpo_portable.training.guards import NonFiniteGuard, StopSignal
from grpo_portable.updates import few_kernels

METRICS = [
    "step",
    "seconds",
    "step_s",
    "rollout_s",
    "update_s",
    "loss",
    "reward",
    "reward_std",
    "rewards",
    "zero_spread",
    "completion_tokens",
    "truncated",
    "entropy",
    "grad_norm",
    "learning_rate",
    "kl",
    "tokens_per_s",
    "memory_gib",
    "skipped",
    "sampler_kl",
    "ratio_cut",
]
CLOCK = ("seconds", "step_s", "rollout_s", "update_s", "tokens_per_s", "memory_gib")
LOSSES = ["dapo", "grpo", "dr_grpo", "gspo", "cispo"]


def metrics(made: Any) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in read_lines(made.run.metrics_file)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6, msg=f"gradient of {name}")


# --- order and batching


def test_every_question_comes_once_a_pass_and_the_order_is_a_function_of_seed_and_step() -> None:
    first = [i for r in range(10) for i in questions_of(r, count=20, per_rollout=4, seed=1)]
    assert Counter(first[:20]) == Counter(range(20))
    assert Counter(first[20:40]) == Counter(range(20))
    assert first[:20] != first[20:40]
    assert questions_of(7, count=20, per_rollout=4, seed=1) == first[28:32]
    assert questions_of(0, count=20, per_rollout=4, seed=2) != first[:4]
    assert Counter(questions_of(0, count=2, per_rollout=4, seed=1)) == Counter({0: 2, 1: 2})


def test_micro_batches_hold_every_row_once_and_no_padding_they_do_not_need() -> None:
    prompt_lengths, completion_lengths = [2, 5, 3, 1], [1, 2, 6, 3]
    batch = {
        "prompt_ids": torch.tensor([[0] * (5 - n) + [row + 1] * n for row, n in enumerate(prompt_lengths)]),
        "prompt_mask": torch.tensor([[0] * (5 - n) + [1] * n for n in prompt_lengths]),
        "completion_ids": torch.tensor([[row + 1] * n + [0] * (6 - n) for row, n in enumerate(completion_lengths)]),
        "completion_mask": torch.tensor([[1] * n + [0] * (6 - n) for n in completion_lengths]),
        "advantages": torch.tensor([1.0, -1.0, 0.0, 2.0]),
        "num_items_in_batch": torch.tensor(12),
        "sampling_per_token_logps": torch.arange(24.0).view(4, 6),
        "importance_sampling_ratio": torch.ones(4, 1),
    }
    parts = micro_batches(batch, 2, by_length=True)
    assert [p["advantages"].tolist() for p in parts] == [[-1.0, 2.0], [1.0, 0.0]]
    assert [tuple(p["prompt_ids"].shape) for p in parts] == [(2, 5), (2, 3)]
    assert [tuple(p["completion_ids"].shape) for p in parts] == [(2, 3), (2, 6)]
    assert parts[1]["prompt_ids"].tolist() == [[0, 1, 1], [3, 3, 3]]
    assert parts[0]["completion_ids"].tolist() == [[2, 2, 0], [4, 4, 4]]
    assert parts[0]["sampling_per_token_logps"].shape == (2, 3)
    assert parts[0]["importance_sampling_ratio"].shape == (2, 1)
    assert all(p["num_items_in_batch"] == 12 for p in parts)
    in_order = micro_batches(batch, 4, by_length=False)
    assert [p["advantages"].item() for p in in_order] == [1.0, -1.0, 0.0, 2.0]


def test_the_recipe_becomes_trls_arguments(tmp_path: Path) -> None:
    from dataclasses import replace

    def arguments(**changes: Any) -> Any:
        recipe = replace(training.RECIPE, **changes)
        return training_arguments(recipe, output_dir=tmp_path, dtype="float32", cpu=True)

    plain = arguments(prompts_per_step=8, group_size=4, micro_batch=8)
    assert (plain.per_device_train_batch_size, plain.gradient_accumulation_steps, plain.steps_per_generation) == (
        8,
        4,
        4,
    )
    assert plain.generation_batch_size == 32
    assert (plain.bf16, plain.fp16, plain.gradient_checkpointing) == (False, False, False)
    assert (plain.min_p, plain.logging_steps, plain.report_to, plain.beta) == (None, 1, [], 0.0)
    assert (arguments(loss="gspo").loss_type, arguments(loss="gspo").importance_sampling_level) == ("grpo", "sequence")
    assert (arguments(loss="dapo").loss_type, arguments(loss="dapo").importance_sampling_level) == ("dapo", "token")
    assert arguments(loss="cispo").epsilon_high == 5.0
    assert arguments(loss="cispo", epsilon_high=3.0).epsilon_high == 3.0
    assert arguments(lr_schedule="constant").lr_scheduler_type == "constant_with_warmup"


@pytest.mark.parametrize(
    ("recipe", "dtype", "cpu", "name"),
    [
        ("adamw", "bfloat16", False, "adamw_torch_fused"),
        ("adamw", "float16", False, "adamw_torch"),  # its skipped steps must be seen
        ("adamw", "float32", True, "adamw_torch"),
        ("adamw_8bit", "bfloat16", False, "adamw_bnb_8bit"),
    ],
)
def test_the_optimizer_is_fused_on_a_gpu(recipe: str, dtype: str, cpu: bool, name: str) -> None:
    from dataclasses import replace

    assert optimizer(replace(training.RECIPE, optimizer=recipe), dtype=dtype, cpu=cpu) == name


# --- the gradient is the formula's


def formula(made: Any, batch: dict[str, Any], loss: str) -> dict[str, torch.Tensor]:
    """The gradient of one on-policy step written down from the papers: ratio 1, so clipping never acts."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].size(1)
    model = made.model
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1] / made.recipe.temperature
    logp = logits.log_softmax(-1).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
    keep, advantage = batch["completion_mask"], batch["advantages"].unsqueeze(1)
    tokens, rows = keep.sum(), len(ids)
    surrogate = (logp - logp.detach()).exp() * advantage
    if loss == "dapo":
        value = (surrogate * keep).sum() / tokens
    elif loss == "grpo":
        value = ((surrogate * keep).sum(1) / keep.sum(1)).mean()
    elif loss == "dr_grpo":
        value = (surrogate * keep).sum() / (rows * made.recipe.max_completion_tokens)
    elif loss == "cispo":
        value = (logp * advantage * keep).sum() / tokens
    else:  # gspo, arXiv 2507.18071: one ratio a sequence, the geometric mean of the tokens'
        sequence = ((logp - logp.detach()) * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
        value = (sequence.exp() * advantage).mean()
    (-value).backward()
    gradient = {n: p.grad.clone() for n, p in policy.trainable(model).items() if p.grad is not None}
    model.zero_grad()
    return gradient


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_the_formulas_for_every_micro_batch(tmp_path: Path, loss: str) -> None:
    reference: dict[str, torch.Tensor] = {}
    for micro_batch in (12, 4, 1):
        made = training.make(tmp_path / str(micro_batch), loss=loss, micro_batch=micro_batch, temperature=0.8)
        made.training_step = remember(made)
        gradient = training.gradients(made)
        if not reference:
            reference = formula(made, made.first_batch, loss)
            assert any(g.abs().max() > 1e-4 for g in reference.values())
        close(gradient, reference)


def remember(made: Any) -> Any:
    original, score = made.training_step, made._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        made.first_batch = score(inputs)
        return made.first_batch

    made._generate_and_score_completions = scored
    return original


def test_groups_without_spread_cost_no_forward_pass_and_change_nothing(tmp_path: Path) -> None:
    def only_one_group_differs(completions: list[str], **_: Any) -> list[float]:
        return [float(len(c) % 3) if i < 4 else 1.0 for i, c in enumerate(completions)]

    gradients = []
    for name, idle in (("with", None), ("without", lambda micro_batch: False)):
        made = training.make(tmp_path / name, rewards=[only_one_group_differs], micro_batch=2)
        forwards = count_forwards(made)
        if idle is not None:
            made._is_idle = idle
        gradients.append((training.gradients(made), len(forwards)))
    close(gradients[0][0], gradients[1][0])
    assert (gradients[0][1], gradients[1][1]) == (2, 6)


def test_the_run_says_what_few_kernels_replaced(tmp_path: Path) -> None:
    made = training.make(tmp_path / "few", steps=1)
    made._kernels = lambda: few_kernels.few_kernels(made.model)  # as on a GPU
    made.train()
    told = made.run.read_json("run.json")["few_kernels"]
    assert set(told) == {"adapters", "norms", "rotary"} and all(told.values())
    plain = training.make(tmp_path / "plain", steps=1)
    plain.train()
    assert "few_kernels" not in plain.run.read_json("run.json")


@pytest.mark.parametrize(
    ("device", "backend", "fewer"), [("cuda", "plain", True), ("cuda", "unsloth", False), ("cpu", "plain", False)]
)
def test_layers_run_in_few_kernels_on_a_gpu_unless_they_are_a_backends_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, backend: str, fewer: bool
) -> None:
    made = training.make(tmp_path, backend=backend)
    monkeypatch.setattr(type(made.accelerator), "device", torch.device(device))
    with made._kernels() as replaced:
        assert bool(replaced) is fewer


@pytest.mark.parametrize("groups", [True, False])
def test_attention_is_fused_in_every_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: bool) -> None:
    """Whether or not layers run in few kernels: weights in parts keep their own. Else all scores would be kept."""
    home: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    before = home.use_gqa_in_sdpa
    monkeypatch.setattr(few_kernels, "_attends_groups", lambda device: groups)
    made = training.make(tmp_path, steps=1)
    compute, own = made._compute_loss, []
    made._compute_loss = lambda *given: (own.append(home.use_gqa_in_sdpa is before), compute(*given))[1]
    made.train()
    assert own and set(own) == {groups}
    assert home.use_gqa_in_sdpa is before


def count_forwards(made: Any) -> list[int]:
    seen: list[int] = []
    original = made._get_per_token_logps_and_entropies

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(1)
        return original(*arguments, **options)

    made._get_per_token_logps_and_entropies = counted
    return seen


def test_no_spread_at_all_is_a_step_that_moves_nothing(tmp_path: Path) -> None:
    made = training.make(tmp_path, rewards=[lambda completions, **_: [0.5] * len(completions)])
    before = training.weights(made)
    made.train()
    assert same(before, training.weights(made))
    lines = metrics(made)
    assert [line["zero_spread"] for line in lines] == [1.0] * 4
    assert [line["grad_norm"] for line in lines] == [0.0] * 4


# --- rollouts


def test_sampler_and_trainer_agree_on_the_probability_of_every_token(tmp_path: Path) -> None:
    made = training.make(tmp_path, temperature=0.7, steps=3, num_iterations=1)
    gaps: list[float] = []
    original = made._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        batch = original(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            logps, _, _ = made._get_per_token_logps_and_entropies(
                made.model, ids, mask, batch["completion_ids"].size(1)
            )
        gap = (logps - batch["sampling_per_token_logps"]).abs() * batch["completion_mask"]
        gaps.append(gap.max().item())
        return batch

    made._generate_and_score_completions = scored
    made.train()
    assert len(gaps) == 3
    assert max(gaps) < 1e-4  # also after updates: the engine follows the policy


class Scripted:
    """An engine that writes what it is told: `rows` token rows, the same at every call."""

    name = "scripted"

    def __init__(self, rows: list[Completion]) -> None:
        self.rows, self.calls = rows, 0

    def sync(self, policy: Any) -> None:
        assert not policy.training

    def close(self) -> None:
        pass

    def generate(self, prompts: Any, n: int, sampling: Any) -> list[list[Completion]]:
        assert not torch.is_grad_enabled()
        self.calls += 1
        return [self.rows[i * n : (i + 1) * n] for i in range(len(prompts))]


def completions(*texts: str, end: bool = True) -> list[Completion]:
    ids = [tiny.tokenizer()(text, add_special_tokens=False)["input_ids"] + ([1] if end else []) for text in texts]
    return [Completion(tuple(i), tuple([-1.0] * len(i)), "stop" if end else "length") for i in ids]


def test_each_prompt_is_asked_once_and_the_model_does_not_train_meanwhile(tmp_path: Path) -> None:
    engine = Scripted(completions(*[f"{i}" * (i + 1) for i in range(12)]))
    made = training.make(tmp_path, engine=engine, steps=2)
    made.train()
    assert engine.calls == 2
    assert made.model.training


def test_an_engine_that_gives_too_few_completions_is_an_engine_error(tmp_path: Path) -> None:
    made = training.make(tmp_path, engine=Scripted(completions("1", "2")))
    with pytest.raises(EngineError, match="2 completions where 12 were asked for"):
        made.train()


def test_empty_completions_do_no_harm(tmp_path: Path) -> None:
    rows = [*completions(*["12"] * 11), Completion((), (), "stop")]
    made = training.make(tmp_path, engine=Scripted(rows), steps=1)
    made.train()
    assert metrics(made)[0]["reward"] == pytest.approx(2 * 11 / 12)


def test_rewards_read_what_evaluation_reads(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(completions: list[str], gold: list[str], prompts: list[str], question: list[str], **_: Any) -> list[float]:
        seen.update(completions=completions, gold=gold, prompts=prompts, question=question)
        return [0.0] * len(completions)

    rows = completions(*["a"] * 11)
    rows.append(Completion((7, 0, 8, 1), (-1.0,) * 4, "stop"))  # a special token inside stays to be seen
    training.make(tmp_path, engine=Scripted(rows), rewards=[look], steps=1).train()
    assert seen["completions"][:2] == ["a", "a"]
    assert "<pad>" in seen["completions"][-1]
    assert len(set(seen["question"])) == 3
    assert [seen["gold"][i] for i in (0, 4, 8)] == [seen["gold"][i] for i in (3, 7, 11)]
    assert seen["prompts"] == seen["question"]


# --- advantages


def test_a_sample_without_a_reward_is_left_out_of_its_group(tmp_path: Path) -> None:
    def scores(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, 0.0, 0.0, None, 1.0, 1.0, 0.0, 0.0, None, None, None, None]

    def steady(completions: list[str], **_: Any) -> list[float]:
        return [0.25] * len(completions)

    made = training.make(
        tmp_path,
        engine=Scripted(completions(*["1"] * 12)),
        rewards=[scores, steady],
        steps=1,
        scale_rewards="none",
        faults=FaultCounter(limit=0.5),
    )
    made.training_step = remember(made)
    made.train()
    expected = [2 / 3, -1 / 3, -1 / 3, 0.0, 0.5, 0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert made.first_batch["advantages"].tolist() == pytest.approx(expected, abs=1e-6)
    line = metrics(made)[0]
    assert line["reward"] == pytest.approx((3 + 7 * 0.25) / 7)
    assert line["rewards"] == pytest.approx({"scores": 3 / 7, "steady": 0.25})
    events = [e for e in read_lines(made.run.events_file) if e["kind"] == "reward"]
    assert "`scores` returned None (5 x)" in events[0]["message"]


def test_a_reward_that_fails_too_often_ends_the_run(tmp_path: Path) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    made = training.make(tmp_path, rewards=[broken])
    with pytest.raises(RewardError, match="12 of 12 completions"):
        made.train()


def test_equal_rewards_that_float32_cannot_average_are_no_spread(tmp_path: Path) -> None:
    rewards = [lambda completions, **_: [1.1] * len(completions), lambda completions, **_: [0.1] * len(completions)]
    made = training.make(tmp_path, rewards=rewards, steps=1)
    made.train()
    assert metrics(made)[0]["zero_spread"] == 1.0
    assert metrics(made)[0]["grad_norm"] == 0.0


def test_scaled_advantages_are_the_papers(tmp_path: Path) -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0]
    made = training.make(
        tmp_path, engine=Scripted(completions(*["1"] * 12)), rewards=[lambda completions, **_: rewards], steps=1
    )
    made.training_step = remember(made)
    made.train()
    # (R - mean) / (std + 1e-4), std with n - 1: arXiv 2402.03300 as TRL writes it
    expected = [0.75 / 0.5001, *[-0.25 / 0.5001] * 3, *[0.5 / 0.57745] * 2, *[-0.5 / 0.57745] * 2, *[0.0] * 4]
    assert made.first_batch["advantages"].tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics(made)[0]["zero_spread"] == pytest.approx(1 / 3)


def test_truncated_completions_can_be_left_out_of_the_loss(tmp_path: Path) -> None:
    rows = completions("12") * 6 + completions("1234", end=False) * 6
    for masked, tokens in ((False, 6 * 3 + 6 * 4), (True, 6 * 3)):
        made = training.make(tmp_path / str(masked), engine=Scripted(rows), steps=1, mask_truncated=masked)
        made.training_step = remember(made)
        made.train()
        assert made.first_batch["num_items_in_batch"] == tokens
        assert made.first_batch["completion_mask"].sum() == tokens
        assert metrics(made)[0]["truncated"] == 0.5


# --- the reference of the KL term


@pytest.mark.parametrize("moved", [0.0, 0.05])
def test_kl_is_against_the_adapter_as_it_was_given(tmp_path: Path, moved: float) -> None:
    made = training.make(tmp_path, beta=0.1, steps=1)
    assert all(".default" in name for name in policy.trainable(made.model))
    base = tiny.model()
    given = policy.add_adapter(base, training.RECIPE)
    with torch.no_grad():
        for parameter in policy.trainable(given).values():
            parameter.add_(moved)
    made = training.make(tmp_path / "moved", model=given, adapter=False, beta=0.1, steps=3)
    made.train()
    lines = metrics(made)
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[2]["kl"] > 1e-6
    policy.save(made.model, tmp_path / "adapter", "tiny")
    names = policy_file_names(tmp_path / "adapter")
    assert names
    assert not any("ref" in name for name in names)


def policy_file_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


# --- numbers that are not finite


def poison(made: Any, bad_steps: set[int]) -> str:
    """From now on one parameter's gradient is NaN in the steps named."""
    name, parameter = list(policy.trainable(made.model).items())[3]
    parameter.register_hook(lambda g: g * float("nan") if made.state.global_step + 1 in bad_steps else g)
    return name


def test_an_update_that_is_not_finite_is_skipped_counted_and_named(tmp_path: Path) -> None:
    made = training.make(tmp_path, steps=4)
    name = poison(made, {2, 3})
    weights: list[dict[str, torch.Tensor]] = []
    original = made.log

    def logged(logs: dict, start_time: float | None = None) -> None:
        weights.append(training.weights(made))
        original(logs, start_time)

    made.log = logged
    made.train()
    lines = metrics(made)
    assert [line["skipped"] for line in lines] == [False, True, True, False]
    assert lines[1]["grad_norm"] is None
    assert same(weights[0], weights[1])
    assert same(weights[1], weights[2])
    assert not same(weights[2], weights[3])
    events = [e for e in read_lines(made.run.events_file) if e["kind"] == "nonfinite"]
    assert [e["step"] for e in events] == [2, 3]
    assert name in events[0]["message"]
    assert made.guard.total == 2


def test_three_in_a_row_end_the_run_and_leave_a_clean_checkpoint(tmp_path: Path) -> None:
    made = training.make(tmp_path, steps=8)
    poison(made, {3, 4, 5, 6, 7, 8})
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        made.train()
    saved = checkpoint.newest(made.run.checkpoints)
    assert saved is not None
    assert saved.step == 2  # the last good one: what was skipped is tried again on a lower path
    assert all(w.isfinite().all() for w in saved.weights().values())


def test_slow_steps_are_saved_after_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, saved = training.make(tmp_path, steps=5, save_every=100), []
    monkeypatch.setattr(made, "save_now", lambda: saved.append(made.state.global_step))
    monkeypatch.setattr(made, "overdue", lambda: made.state.global_step == 3)
    made.train()
    assert saved == [3, 5]


def test_a_bad_weight_is_never_saved(tmp_path: Path) -> None:
    made = training.make(tmp_path, steps=1)
    made.train()
    with torch.no_grad():
        next(iter(policy.trainable(made.model).values()))[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="is not saved"):
        made.save_now()


def test_a_gradient_scale_may_overflow_more_often() -> None:
    plain, scaled = NonFiniteGuard(), NonFiniteGuard(scaled=True)
    assert [plain.see("x", 1), plain.see("x", 2), plain.see(None, 3), plain.see("x", 4)] == [True, True, False, True]
    for step in range(15):
        assert scaled.see("x", step)
    with pytest.raises(NonFiniteError):
        scaled.see("x", 15)


# --- metrics, stop and resume


def test_a_metrics_line_has_these_fields_in_this_order(tmp_path: Path) -> None:
    made = training.make(tmp_path, beta=0.04)
    made.train()
    lines = list(read_lines(made.run.metrics_file))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert list(line) == METRICS
        assert None not in line.values()
        assert 0 < line["rollout_s"] < line["step_s"]
        assert line["update_s"] == pytest.approx(line["step_s"] - line["rollout_s"])
        assert line["entropy"] == pytest.approx(4.6, abs=0.2)  # a random model: about log of the vocabulary
    assert lines[-1]["seconds"] > sum(line["step_s"] for line in lines[:-1])
    assert json.loads(made.run.heartbeat_file.read_text())["doing"] == "update of step 4"


VARIANTS: list[dict[str, Any]] = [
    {},
    {"lora_dropout": 0.2, "micro_batch": 2},
    {"num_iterations": 2, "steps": 8},
    {"rslora": True, "dora": True, "lr_schedule": "cosine"},
    {"beta": 0.05, "loss": "gspo", "max_grad_norm": 0.0},
    {"optimizer": "adamw_8bit"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(c) or "plain")
def test_stopped_and_resumed_is_the_same_as_uninterrupted(tmp_path: Path, changes: dict[str, Any]) -> None:
    options = {"steps": 6, **changes}
    whole = training.make(tmp_path / "whole", **options)
    whole.train()

    stop = StopSignal()

    def stopping(completions: list[str], **_: Any) -> list[float]:
        stop.wanted = part.state.global_step >= 3
        return tiny.digits(completions)

    stopping.__name__ = "digits"
    part = training.make(tmp_path / "part", rewards=[stopping], stop=stop, **options)
    with stop.deferred():
        try:
            part.train()
        except KeyboardInterrupt:
            part.save_now()
    assert part.state.global_step < options["steps"]
    saved = checkpoint.newest(part.run.checkpoints)
    assert saved is not None
    resumed = training.resume(tmp_path / "part", **options)
    assert resumed.state.global_step == options["steps"]
    assert same(training.weights(whole), training.weights(resumed))
    assert metrics(whole) == metrics(resumed)


@pytest.mark.parametrize("done", [0, 3])
def test_a_stop_in_a_rollout_drops_the_step_and_saves_the_one_before(tmp_path: Path, done: int) -> None:
    whole = training.make(tmp_path / "whole", steps=5)
    whole.train()
    made = training.make(tmp_path / "part", steps=5, save_every=100)
    generate, stop = made.engine.generate, made.stop

    def interrupted(prompts: Any, n: int, sampling: Any) -> Any:
        if made.state.global_step == done:
            stop._handle(15, None)
        return generate(prompts, n, sampling)

    made.engine.generate = interrupted
    with pytest.raises(KeyboardInterrupt), stop.deferred():
        made.train()
    assert made.save_now().step == done
    resumed = training.resume(tmp_path / "part", steps=5, save_every=100)
    assert same(training.weights(whole), training.weights(resumed))
    assert metrics(whole) == metrics(resumed)


def test_a_second_stop_does_not_cut_the_saving_that_the_first_one_asked_for() -> None:
    stop, saved = StopSignal(), False
    with stop.installed():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the first stop ends what can be repeated")
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            saved = True
    assert saved and stop.wanted


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path: Path) -> None:
    runs = [training.make(tmp_path / str(i), seed=seed, steps=2) for i, seed in enumerate((5, 5, 6))]
    for made in runs:
        made.train()
    assert metrics(runs[0]) == metrics(runs[1])
    assert metrics(runs[0]) != metrics(runs[2])


# --- quantised bases and all weights


def test_the_adapter_of_a_4_bit_base_stays_float32_and_trains(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", hidden_size=64, intermediate_size=128)
    loaded = policy.load(str(folder), dtype="float32", quantization="nf4")
    made = training.make(tmp_path / "run", model=loaded.model, steps=2)
    before = training.weights(made)
    assert {w.dtype for w in before.values()} == {torch.float32}
    made.train()
    after = training.weights(made)
    assert {w.dtype for w in after.values()} == {torch.float32}
    assert not same(before, after)


def test_without_an_adapter_all_weights_train(tmp_path: Path) -> None:
    made = training.make(tmp_path, lora_rank=0, steps=2, learning_rate=1e-3)
    before = training.weights(made)
    assert policy.counts(made.model)[0] == policy.counts(made.model)[1]
    made.train()
    assert not same(before, training.weights(made))
    made.save_now()
    resumed = training.resume(tmp_path, lora_rank=0, steps=3, learning_rate=1e-3)
    assert resumed.state.global_step == 3
