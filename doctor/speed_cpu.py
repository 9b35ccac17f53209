"""Seconds of one GRPO step on a CPU, from the rates that a trial measured there; no data sheet knows a CPU's.

Legend: N completions a step, P prompt tokens, T completion tokens, rows = completions generated at once. A decode step reads
every weight once and multiplies `rows` vectors by it, one after the other, since neither hides the other on a few cores;
prefill and update are arithmetic. `docs/memory.md` says what the constants were fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from doctor.facts import Facts
from doctor.memory import Setting, weight_bytes
from doctor.shapes import Shape

PRODUCT_SHARE = 0.75  # of the measured rate, reached by all products
# One block beside its products (attention, norms, launches): in a decode step, and in one forward or backward pass.
LAYER_S, LAYER_ROW_S = 0.5e-3, 15e-6  # and what each row adds
BLOCK_PASS_S, BLOCK_TOKEN_S = 3e-3, 8e-6  # and what each token adds
ERROR = 2.5  # a judgement: one kind of CPU was measured, and other programs share the cores


@dataclass(frozen=True)
class Rates:
    """What torch reached on all its threads: 10^9 float32 operations a second, and 10^9 bytes read a second."""

    gflops: float
    gb_s: float


def rates(facts: Facts) -> Rates | None:
    """The measured rates of this machine's CPU, None where nobody measured."""
    found = facts.extra.get("cpu_rates")
    if not isinstance(found, Mapping):
        return None
    gflops, gb_s = found.get("gflops"), found.get("gb_s")
    if not all(isinstance(rate, (int, float)) and 0 < rate < 1e9 for rate in (gflops, gb_s)):
        return None
    return Rates(float(gflops), float(gb_s))  # type: ignore[arg-type]


def phases(shape: Shape, s: Setting, rate: Rates, *, prompts: int, group_size: int) -> tuple[float, float]:
    """Seconds of (rollout, update) of one step with `prompts` x `group_size` completions."""
    completions = prompts * group_size
    return _rollout_s(shape, s, rate, prompts, completions), _update_s(shape, s, rate, completions)


def _rollout_s(shape: Shape, s: Setting, rate: Rates, prompts: int, completions: int) -> float:
    rows = min(s.rollout_rows, completions)
    rounds = -(-completions // rows)
    prefill = 2e-9 * shape.active_params * max(prompts, rounds) * s.prompt_tokens / (PRODUCT_SHARE * rate.gflops)
    read = 1e-9 * weight_bytes(shape, s.base) / rate.gb_s
    products = 2e-9 * shape.active_params * rows / (PRODUCT_SHARE * rate.gflops)
    return rounds * s.completion_tokens * (read + products + shape.layers * (LAYER_S + rows * LAYER_ROW_S)) + prefill


def _update_s(shape: Shape, s: Setting, rate: Rates, completions: int) -> float:
    """Forward and backward to the inputs, and the forward again if recomputed; frozen weights need no gradient."""
    passes = (3 if s.checkpointing else 2) + (0 if s.lora_rank else 1)
    tokens = completions * (s.prompt_tokens + s.completion_tokens)
    products = 2e-9 * passes * shape.active_params * tokens / (PRODUCT_SHARE * rate.gflops)
    beside = -(-completions // s.micro_batch) * BLOCK_PASS_S + tokens * BLOCK_TOKEN_S
    return products + shape.layers * passes * beside
