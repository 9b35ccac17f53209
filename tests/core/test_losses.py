"""Each loss against a case worked out by hand, through TRL's own code with this project's arguments; bad combinations refused.

Two completions in one step. The first: advantage +1, two tokens, ratios 1.1 and 1.5. The second: advantage -1, four tokens,
ratios 1, 0.5, 1 and 2. Clips 0.2 and 0.2, log-probabilities -0.5 and -0.25 a token, limit 10 tokens.

    clipped terms (negated)   first: -1.1, -1.2        second: 1, 0.8, 1, 2       sums -2.3 and 4.8
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training

from grpo_portable.combinations import float16_refusal
from grpo_portable.errors import RecipeError
from grpo_portable.recipe import LOSSES, Recipe, check, override
from grpo_portable.training.arguments import training_arguments

RATIOS = torch.tensor([[1.1, 1.5, 1.0, 1.0], [1.0, 0.5, 1.0, 2.0]])
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
LOGPS = torch.tensor([[-0.5] * 4, [-0.25] * 4])
ADVANTAGES = torch.tensor([1.0, -1.0])

HAND = {
    "grpo": (-2.3 / 2 + 4.8 / 4) / 2,  # 0.025
    "dr_grpo": (-2.3 + 4.8) / (2 * 10),  # 0.125
    "dapo": (-2.3 + 4.8) / 6,  # 0.4167
    "bnpo": (-2.3 + 4.8) / 6,
    # s = sqrt(1.1 * 1.5) = 1.2845, clipped to 1.2; and (1 * 0.5 * 1 * 2) ** (1/4) = 1
    "gspo": (-1.2 + 1.0) / 2,  # -0.1
    # first: 1.1 * 0.5 + 1.5 * 0.5 = 1.3; second: -(1 + 0.5 + 1 + 2) * 0.25 = -1.125
    "cispo": (1.3 - 1.125) / 6,  # 0.02917
}


def loss(folder: Path, rows: slice = slice(None), **changes: Any) -> float:
    """TRL's loss of these rows, as one micro-batch."""
    trainer = training.make(folder, max_completion_tokens=10, micro_batch=12, **changes)
    new = LOGPS[rows].clone().requires_grad_(True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    count = MASK[rows].size(0)
    inputs = {
        "prompt_ids": torch.ones(count, 1, dtype=torch.long),
        "prompt_mask": torch.ones(count, 1, dtype=torch.long),
        "completion_ids": torch.ones(count, 4, dtype=torch.long),
        "completion_mask": MASK[rows],
        "advantages": ADVANTAGES[rows],
        "old_per_token_logps": LOGPS[rows] - RATIOS[rows].log(),
        "num_items_in_batch": MASK.sum(),
    }
    return float(trainer._compute_loss(trainer.model, inputs).detach())


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_what_the_page_says(name: str, tmp_path: Path) -> None:
    assert loss(tmp_path, loss=name) == pytest.approx(HAND[name], abs=1e-6)


def test_every_loss_has_a_row_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    assert set(HAND) == set(LOSSES)
    assert all(f"| `{name}`" in page for name in LOSSES)


def test_bnpo_with_one_completion_a_micro_batch_is_grpo(tmp_path: Path) -> None:
    parts = [loss(tmp_path / str(i), slice(i, i + 1), loss="bnpo") for i in (0, 1)]
    assert parts == pytest.approx([-2.3 / 2, 4.8 / 4], abs=1e-6)
    assert sum(parts) / 2 == pytest.approx(HAND["grpo"], abs=1e-6)


def test_dapo_and_cispo_sum_over_micro_batches_to_the_whole(tmp_path: Path) -> None:
    for name in ("dapo", "cispo"):
        parts = [loss(tmp_path / f"{name}-{i}", slice(i, i + 1), loss=name) for i in (0, 1)]
        assert sum(parts) == pytest.approx(HAND[name], abs=1e-6)


def test_the_upper_clip_and_the_cap(tmp_path: Path) -> None:
    assert loss(tmp_path / "a", loss="grpo", epsilon_high=0.28) == pytest.approx(
        (-(1.1 + 1.28) / 2 + 1.2) / 2, abs=1e-6
    )
    capped = (1.3 - (1 + 0.5 + 1 + 1.5) * 0.25) / 6  # the ratio 2 counts 1.5
    assert loss(tmp_path / "b", loss="cispo", epsilon_high=1.5) == pytest.approx(capped, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "loss_type", "level", "upper"),
    [
        ("grpo", "grpo", "token", None),
        ("dr_grpo", "dr_grpo", "token", None),
        ("dapo", "dapo", "token", None),
        ("bnpo", "bnpo", "token", None),
        ("gspo", "grpo", "sequence", None),
        ("cispo", "cispo", "token", 5.0),
    ],
)
def test_what_a_recipe_becomes_in_trl(
    name: str, loss_type: str, level: str, upper: float | None, tmp_path: Path
) -> None:
    recipe = replace(training.RECIPE, loss=name)
    made = training_arguments(recipe, output_dir=tmp_path, dtype="float32", cpu=True)
    assert (made.loss_type, made.importance_sampling_level, made.epsilon_high) == (loss_type, level, upper)


def test_the_kl_term_is_added_before_averaging(tmp_path: Path) -> None:
    """beta 0.5, the reference 0.1 nats above: exp(0.1) - 0.1 - 1 = 0.005171 a token, times the ratio (TRL's correction)."""
    trainer = training.make(tmp_path, loss="dapo", beta=0.5, micro_batch=12)
    new = LOGPS.clone().requires_grad_(True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = {
        "prompt_ids": torch.ones(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.ones(2, 4, dtype=torch.long),
        "completion_mask": MASK,
        "advantages": torch.zeros(2),
        "ref_per_token_logps": LOGPS + 0.1,
        "num_items_in_batch": MASK.sum(),
    }
    assert float(trainer._compute_loss(trainer.model, inputs).detach()) == pytest.approx(
        0.5 * (math.exp(0.1) - 1.1), abs=1e-6
    )


# --- combinations

TAGS = ("tags_b_exact", "tags_b_answer")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "cispo", "epsilon_high": 0.28}, ["cispo", "0.28", "2 or more"]),
        ({"epsilon": 1.0}, ["lower clip"]),
        ({"mask_truncated": True, "rewards": ("correctness", "overlong_penalty")}, ["mask_truncated", "never reaches"]),
        ({"beta": 0.04, "lora_rank": 0}, ["beta 0.04", "adapter"]),
        ({"dora": True, "path": "fp8-vllm"}, ["dora", "fp8-vllm", "-hf"]),
        ({"dora": True, "path": "bf16-vllm"}, ["not DoRA"]),
        ({"dora": True, "lora_rank": 0}, ["dora", "lora_rank"]),
        ({"rslora": True, "lora_rank": 0}, ["rslora", "lora_rank"]),
        ({"lora_rank": 0, "path": "qlora-hf"}, ["4-bit"]),
        ({"lora_rank": 0, "path": "fp8-vllm"}, ["FP8 copy"]),
        ({"lora_targets": "q_proj, lm_head"}, ["lm_head", "log-probabilities"]),
        ({"path": "fp16-hf", "model": "google/gemma-3-4b-it"}, ["gemma-3-4b-it", "65,504"]),
        ({"rewards": TAGS}, ["tags_b_exact", "answer_style"]),
        ({"rewards": ("tags_b_exact", "tags_c_exact"), "answer_style": "tagged"}, ["both sets"]),
        ({"rewards": ("correctness", "correctness")}, ["twice"]),
        ({"bootstrap_probe": 8}, ["bootstrap_epochs is 0"]),
        ({"context_tokens": 512}, ["no room"]),
    ],
)
def test_values_that_do_not_combine_are_refused_with_the_reason(changes: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        check(replace(Recipe(), **changes), "the recipe")
    told = "\n".join(refused.value.lines())
    assert all(word in told for word in words), told
    assert refused.value.help


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "cispo"},
        {"loss": "cispo", "epsilon_high": 5.0},
        {"dora": True},
        {"dora": True, "rslora": True, "path": "qlora-hf"},
        {"lora_rank": 0},
        {"mask_truncated": True},
        {"rewards": TAGS, "answer_style": "tagged"},
        {"path": "bf16-hf", "model": "google/gemma-3-4b-it"},
        {"context_tokens": 2048, "max_completion_tokens": 1984},
    ],
)
def test_values_that_combine_are_let_through(changes: dict) -> None:
    check(replace(Recipe(), **changes), "the recipe")


def test_a_refusal_comes_with_set_too() -> None:
    with pytest.raises(RecipeError, match="not DoRA"):
        override(Recipe(), ["dora=true", "path=bf16-vllm"])


@pytest.mark.parametrize(
    ("model", "unsafe"),
    [
        ("google/gemma-3-1b-it", True),
        ("unsloth/gemma-3n-E2B-it", True),
        ("google/gemma-2-9b-it", True),
        ("./models/gemma3-4b", True),
        ("google/gemma-4-E4B-it", True),
        ("openai/gpt-oss-20b", True),
        ("models/gemma-3/llama-3.2-1b", False),
        ("google/gemma-2b-it", False),
        ("google/gemma-7b", False),
        ("Qwen/Qwen3-4B", False),
        ("meta-llama/Llama-3.2-3B-Instruct", False),
    ],
)
def test_models_that_overflow_in_float16(model: str, unsafe: bool) -> None:
    assert (float16_refusal(model) is not None) is unsafe
