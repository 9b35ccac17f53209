"""Which paths this installation has an engine for: path → None, or the reason why not. Torch-free; nothing is imported."""

from __future__ import annotations

import importlib.util

from doctor.diagnosis import FP8_PATHS, PATHS, VLLM_PATHS
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.vllm_settings import RANKS


def unavailable(recipe: Recipe | None = None) -> dict[str, str | None]:
    """For every path None, or one sentence. With a recipe, also what its adapter asks of vLLM, told before anything loads."""
    reasons: dict[str, str | None] = dict.fromkeys(PATHS)
    if importlib.util.find_spec("vllm") is None:
        reasons.update(dict.fromkeys(VLLM_PATHS, "vLLM is not installed"))
    elif recipe is not None and recipe.dora:
        reasons.update(dict.fromkeys(VLLM_PATHS, "vLLM serves LoRA and rsLoRA adapters, not DoRA"))
    elif recipe is not None and recipe.lora_rank > RANKS[-1]:
        told = f"vLLM serves adapters up to rank {RANKS[-1]}, not {recipe.lora_rank}"
        reasons.update(dict.fromkeys(VLLM_PATHS, told))
    elif recipe is not None and recipe.lora_rank == 0:
        told = "all weights are trained, and an FP8 copy of them would have to be quantised anew at every step"
        reasons.update({path: told for path in VLLM_PATHS if path in FP8_PATHS})
    return reasons
