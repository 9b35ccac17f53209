"""Which paths this installation has an engine for: path → None, or the reason why not. Torch-free; nothing is imported."""

from __future__ import annotations

import importlib.util

from doctor.diagnosis import PATHS, VLLM_PATHS


def unavailable() -> dict[str, str | None]:
    """For every path None, or one sentence."""
    reasons: dict[str, str | None] = dict.fromkeys(PATHS)
    if importlib.util.find_spec("vllm") is None:
        reasons.update(dict.fromkeys(VLLM_PATHS, "vLLM is not installed"))
    return reasons
