"""Which paths this installation has no engine for, whatever the recipe. Torch-free; nothing is imported."""

from __future__ import annotations

import importlib.util

from doctor.diagnosis import VLLM_PATHS
from grpo_portable.combinations import samples_elsewhere
from grpo_portable.recipe import Recipe


def unavailable(recipe: Recipe) -> dict[str, str | None]:
    """Path → why nothing here runs it; what the recipe itself keeps from a path is `combinations.on_path`."""
    absent = not samples_elsewhere(recipe) and importlib.util.find_spec("vllm") is None
    return dict.fromkeys(VLLM_PATHS, "vLLM is not installed") if absent else {}
