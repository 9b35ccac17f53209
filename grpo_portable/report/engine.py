"""The report's line on a rollout engine that holds weights of its own: their format, its start, its memory, its rest.

From `engine_details` of run.json, as the engine described itself when it was ready; what it did not say is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_portable.report.markdown import plain

PARTS = {"engine_copy": "weights", "engine_workspace": "workspace", "kv_cache": "KV cache"}


def line(run: Mapping[str, Any]) -> str:
    """`vllm, weights in FP8, ...; ready in 23.1 s; planned 2.10 GiB: ...`; empty for an engine that says nothing."""
    found = run.get("engine_details")
    if not isinstance(found, Mapping):
        return ""
    told = [
        _weights(found.get("weights")),
        _start(found.get("start_s")),
        _memory(found.get("memory_gib")),
        _rest(found),
    ]
    told = [text for text in told if text]
    return "; ".join([plain(str(run.get("engine") or "the engine")), *told]) if told else ""


def _weights(form: Any) -> str:
    return f"weights in {plain(form)}" if isinstance(form, str) and form else ""


def _start(seconds: Any) -> str:
    return f"ready in {seconds:.1f} s" if isinstance(seconds, (int, float)) else ""


def _memory(gib: Any) -> str:
    """Planned, as the engine was told; what the card really held is the run's peak."""
    parts = {k: v for k, v in gib.items() if isinstance(v, (int, float))} if isinstance(gib, Mapping) else {}
    if not parts:
        return ""
    told = ", ".join(f"{PARTS.get(name, plain(name))} {size:.2f}" for name, size in parts.items())
    return f"{sum(parts.values()):.2f} GiB planned ({told})"


def _rest(found: Mapping[str, Any]) -> str:
    if not isinstance(found.get("sleeps"), bool):
        return ""
    because = f", because {plain(str(found['because']))}" if found.get("because") else ""
    return ("sleeps during updates" if found["sleeps"] else "stays awake during updates") + because
