"""A recipe as TRL's arguments: the one place where names and arithmetic of the two meet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trl import GRPOConfig, SFTConfig

from doctor.memory import largest_divisor
from grpo_portable.errors import RecipeError
from grpo_portable.recipe import Recipe

CISPO_CLIP = 5.0  # ScaleRL's upper clip, arXiv 2510.13786; TRL would take `epsilon` and scale every gradient by 0.2


def training_arguments(recipe: Recipe, *, output_dir: Path, dtype: str, cpu: bool, world: int = 1) -> GRPOConfig:
    """The recipe as TRL's arguments. One rollout fills one accumulation window: N = m * A * world."""
    rows = recipe.prompts_per_step * recipe.group_size
    micro_batch = int(recipe.micro_batch)
    if recipe.prompts_per_step % world or rows % (micro_batch * world):
        raise RecipeError(
            f"a step of {recipe.prompts_per_step} questions x {recipe.group_size} cannot be shared by {world} processes",
            because=f"each needs whole groups and whole micro-batches of {micro_batch}",
            help="choose prompts_per_step and micro_batch so that processes and micro_batch divide the step",
        )
    accumulation = rows // (micro_batch * world)
    sequence_level = recipe.loss == "gspo"
    upper_clip = CISPO_CLIP if recipe.loss == "cispo" and recipe.epsilon_high is None else recipe.epsilon_high
    return GRPOConfig(
        **_of_both(recipe, output_dir=output_dir, dtype=dtype, cpu=cpu),
        max_steps=recipe.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=recipe.group_size,
        num_iterations=recipe.num_iterations,
        max_completion_length=recipe.max_completion_tokens,
        temperature=recipe.temperature,
        top_p=recipe.top_p,
        top_k=recipe.top_k,
        min_p=recipe.min_p or None,
        repetition_penalty=recipe.repetition_penalty,
        loss_type="grpo" if sequence_level else recipe.loss,
        importance_sampling_level="sequence" if sequence_level else "token",
        beta=recipe.beta,
        epsilon=recipe.epsilon,
        epsilon_high=upper_clip,
        scale_rewards=recipe.scale_rewards,
        reward_weights=list(recipe.reward_weights) or None,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant_with_warmup" if recipe.lr_schedule == "constant" else recipe.lr_schedule,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        report_to=list(recipe.report_to),
        ddp_broadcast_buffers=False,  # they are the same everywhere and stay so
        logging_nan_inf_filter=False,
        ignore_data_skip=True,
        shuffle_dataset=False,
    )


def sft_arguments(recipe: Recipe, *, rows: int, output_dir: Path, dtype: str, cpu: bool, world: int = 1) -> SFTConfig:
    """The bootstrap on `rows` examples as TRL's arguments. Each process has the same number of rows of a batch."""
    batch = min(recipe.bootstrap_batch, rows)
    batch = max(world, batch - batch % world)
    mine = batch // world
    micro_batch = largest_divisor(mine, int(recipe.micro_batch))
    steps = max(1, math.ceil(recipe.bootstrap_epochs * rows / batch))
    return SFTConfig(
        **_of_both(recipe, output_dir=output_dir, dtype=dtype, cpu=cpu),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=mine // micro_batch,
        learning_rate=recipe.bootstrap_learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(steps // 10, 20),
        weight_decay=0.01,
        report_to=[],
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
    )


def _of_both(recipe: Recipe, *, output_dir: Path, dtype: str, cpu: bool) -> dict[str, Any]:
    """What the arguments of bootstrap and GRPO have in common."""
    return {
        "output_dir": str(output_dir),
        "optim": optimizer(recipe, dtype=dtype, cpu=cpu),
        "max_grad_norm": recipe.max_grad_norm,
        "seed": recipe.seed,
        "bf16": dtype == "bfloat16",  # TRL's default is true, also on a CPU
        "fp16": dtype == "float16",
        "use_cpu": cpu,
        "ddp_find_unused_parameters": False,
        "gradient_checkpointing": recipe.gradient_checkpointing is True,  # TRL's default is true
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if recipe.gradient_checkpointing is True else None,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def optimizer(recipe: Recipe, *, dtype: str, cpu: bool) -> str:
    """transformers' name of the recipe's optimizer. On a GPU its fused form: one kernel for many tensors, not a dozen."""
    if recipe.optimizer == "adamw_8bit":
        return "adamw_bnb_8bit"
    # a fused step reads float16's scale itself, so that accelerate no longer sees which steps were left out
    return "adamw_torch" if cpu or dtype == "float16" else "adamw_torch_fused"
