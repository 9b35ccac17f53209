"""Which paths this installation has an engine for: path → None, or the reason why not. Torch-free; nothing is imported."""

from __future__ import annotations

import importlib.util

from doctor.diagnosis import FP8_PATHS, PATHS, VLLM_PATHS
from grpo_portable.combinations import samples_elsewhere
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.vllm_settings import RANKS


def unavailable(recipe: Recipe | None = None) -> dict[str, str | None]:
    """For every path None, or one sentence. With a recipe, also what its adapter asks of vLLM, told before anything loads."""
    elsewhere = recipe is not None and samples_elsewhere(recipe)
    if not elsewhere and importlib.util.find_spec("vllm") is None:
        return {path: "vLLM is not installed" if path in VLLM_PATHS else None for path in PATHS}
    return unserved(recipe) if recipe is not None else dict.fromkeys(PATHS)


def unserved(recipe: Recipe) -> dict[str, str | None]:
    """The same from the recipe alone, wherever it runs: what vLLM cannot serve of its adapter."""
    reasons: dict[str, str | None] = dict.fromkeys(PATHS)
    if samples_elsewhere(recipe):
        reasons.update(dict.fromkeys(VLLM_PATHS, f"the rollouts come from the vLLM server at {recipe.vllm_server}"))
        return reasons
    if recipe.dora:
        reasons.update(dict.fromkeys(VLLM_PATHS, "vLLM serves LoRA and rsLoRA adapters, not DoRA"))
    elif recipe.lora_rank > RANKS[-1]:
        told = f"vLLM serves adapters up to rank {RANKS[-1]}, not {recipe.lora_rank}"
        reasons.update(dict.fromkeys(VLLM_PATHS, told))
    elif recipe.lora_rank == 0:
        told = "all weights are trained, and an FP8 copy of them would have to be quantised anew at every step"
        reasons.update({path: told for path in VLLM_PATHS if path in FP8_PATHS})
    return reasons
