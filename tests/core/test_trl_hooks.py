"""How deep this project sits in TRL: what is overridden and what is replaced must be there in the TRL that is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import training
import trl

from grpo_portable.training.sft import SftTrainer
from grpo_portable.training.trainer import GrpoTrainer
from grpo_portable.training.trl_trainer import SHORT_WAYS, short_ways

HOOKS = {  # ARCHITECTURE.md says why
    "GrpoTrainer": "__init__ get_train_dataloader _tokenize_prompts _generate_single_turn _calculate_rewards "
    "_generate_and_score_completions _prepare_inputs training_step _clip_grad_norm _get_grad_norm log",
    "SftTrainer": "__init__ _get_train_sampler compute_loss",
    "Silent": "_send_telemetry",
    "QuickUpdates": "train floating_point_ops",
    "Saving": "_save_checkpoint _load_from_checkpoint _load_optimizer_and_scheduler _load_scaler _load_rng_state",
    "SamplerCorrection": "_compute_loss _get_per_token_logps_and_entropies",
}
TAKEN = {  # by minor release
    "1.15": ["disable_gradient_checkpointing"],
    "1.16": ["_use_triton", "disable_gradient_checkpointing"],
}


@pytest.mark.parametrize(
    ("trainer", "leaves"), [(GrpoTrainer, "SftTrainer"), (SftTrainer, "GrpoTrainer SamplerCorrection")]
)
def test_what_is_overridden_is_what_trl_and_transformers_call(trainer: type, leaves: str) -> None:
    ours = [c for c in trainer.__mro__ if c.__module__.startswith("grpo_portable.")]
    theirs = {name for c in trainer.__mro__ if c not in (*ours, object) for name in vars(c)}
    overridden = {c.__name__: {n for n, v in vars(c).items() if callable(v) and n in theirs} for c in ours}
    assert overridden == {name: set(hooks.split()) for name, hooks in HOOKS.items() if name not in leaves.split()}


def now() -> list[Any]:
    return [getattr(importlib.import_module(module), name, None) for module, name, _ in SHORT_WAYS]


def test_the_short_ways_are_there() -> None:
    before = now()
    with short_ways() as taken:
        assert taken == TAKEN[".".join(trl.__version__.split(".")[:2])]
        assert now() == [instead if name in taken else None for _, name, instead in SHORT_WAYS]
    assert now() == before


def test_they_are_taken_while_training_goes_on(tmp_path: Path) -> None:
    made, before = training.make(tmp_path, steps=1), now()
    compute, inside = made._compute_loss, []
    made._compute_loss = lambda *given: (inside.append(now()), compute(*given))[1]
    made.train()
    assert inside and not any(one is other for seen in inside for one, other in zip(seen, before, strict=True) if other)
    assert now() == before
