"""metrics.jsonl: one line an optimizer step, with the same fields in the same order whatever the recipe.

Times are in seconds; `rollout_s` is generation, `update_s` all the rest of the step; `tokens_per_s` is of generation.
`entropy` is the mean of -log p of the drawn tokens, an unbiased estimate. A field is null where a step has none, as
rewards on the later updates of one rollout. `sampler_kl` (nats a token) and `ratio_cut` (share of tokens) tell how far the
engine was from the policy.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_portable.run.folder import RunFolder, read_lines, write_atomically


def line(
    step: int,
    *,
    seconds: float,
    step_s: float,
    loss: float,
    own: Mapping[str, Any],
    logged: Mapping[str, Any],
    trl: Mapping[str, Sequence[float]],
    reward_names: Sequence[str],
    memory: float | None = None,
) -> dict[str, Any]:
    """The record of a step: `own` from the rollout, `logged` from transformers' loop, `trl` the lists TRL averages.

    `memory`: GiB of the process that holds most, where there are several.
    """
    means = {name: _mean(trl.get(f"rewards/{name}/mean")) for name in reward_names}
    record = {
        "step": step,
        "seconds": seconds,
        "step_s": step_s,
        "rollout_s": own.get("rollout_s"),
        "update_s": step_s - own.get("rollout_s", 0.0),
        "loss": loss,
        "reward": _mean(trl.get("reward")),
        "reward_std": _mean(trl.get("reward_std")),
        "rewards": {name: mean for name, mean in means.items() if mean is not None},
        "zero_spread": own.get("zero_spread"),
        "completion_tokens": own.get("completion_tokens"),
        "truncated": own.get("truncated"),
        "entropy": own.get("entropy"),
        "grad_norm": None if logged.get("grad_norm") is None else float(logged["grad_norm"]),
        "learning_rate": logged.get("learning_rate"),
        "kl": _mean(trl.get("kl")),
        "tokens_per_s": own.get("tokens_per_s"),
        "memory_gib": memory_gib() if memory is None else memory,
        "skipped": bool(own.get("skipped")),
        "sampler_kl": own.get("sampler_kl"),
        "ratio_cut": own.get("ratio_cut"),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def cut(run: RunFolder, step: int) -> None:
    """Drop the lines after `step`, since these steps are made again, and lines of no step."""
    kept = [m for m in read_lines(run.metrics_file) if m["step"] <= step]
    lines = [json.dumps(m, ensure_ascii=False) for m in kept]
    if run.metrics_file.exists():
        write_atomically(run.metrics_file, "".join(line + "\n" for line in lines))


def memory_gib() -> float:
    """Peak memory so far in GiB: what torch holds of the GPU, else what this process holds of the host."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved() / 2**30
    if sys.platform == "win32":
        import psutil  # accelerate brings it

        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _mean(values: Sequence[float] | None) -> float | None:
    numbers = [v for v in values or () if math.isfinite(v)]
    return sum(numbers) / len(numbers) if numbers else None
