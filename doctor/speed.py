"""Seconds of one GRPO step on a card, estimated from its bandwidth and arithmetic; each estimate says how wrong it may be.

Legend: N completions a step, P prompt tokens, T completion tokens, rows = completions generated at once. A decode step reads
the weights and the rows' KV once, and pays a fixed cost for launching its kernels; prefill and update are limited by
arithmetic. Some constants are fitted to one card (H200), the others are assumed; `docs/memory.md` says which. Every
completion is counted at its full length T, so runs whose answers end early are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from doctor import speed_cpu
from doctor.cards import Card, CardError, find_card
from doctor.diagnosis import Diagnosis
from doctor.memory import DEFAULT, Setting, Sizes, kv_bytes_per_token, settle, weight_bytes
from doctor.readings import cards
from doctor.shapes import Shape, shape_of

BANDWIDTH_SHARE = 0.85  # of the data sheet's bandwidth, reached by large reads
PRODUCT_SHARE = 0.3  # of the data sheet's tensor rate, reached in an update, and assumed for a prefill
DECODE_PRODUCT_SHARE = 0.6  # the same for a decode step's few, wide products
# one block's kernels in one decode step inside a CUDA graph, beside the bytes; fused by Triton
PORTABLE_LAYER_S = 23e-6
GENERATE_LAYER_S = 3.1e-3  # the same in transformers' generate, 4-bit weights, adapter not merged, no graph
# A decode step of vLLM as it runs here, with an adapter and nothing compiled, and what each row adds
VLLM_STEP_S, VLLM_ROW_S = 3e-3, 11e-6
BLOCK_PASS_S = 1.2e-3  # assumed: launching one block's forward or backward, peft's adapters included
SYNC_S = 0.3  # assumed: merging the adapter into the copy, or pushing weights to the engine; rewards, optimizer
ERROR = 2.0  # a judgement, not a measured spread: the truth is expected between the estimate over and times this
ERROR_UNKNOWN_RATE = 3.0  # for cards whose arithmetic no data sheet says


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one step and of its two phases; the truth is expected within `low_s` to `high_s`."""

    rollout_s: float
    update_s: float
    total_s: float
    low_s: float
    high_s: float
    tokens_per_s: float  # of the rollout
    error: float


def step_estimate(shape: Shape, setting: Setting, card: Card, *, prompts: int = 8, group_size: int = 8) -> StepEstimate:
    """Seconds of one step with `prompts` x `group_size` completions on one card of this kind."""
    completions = prompts * group_size
    rollout, update = (
        _rollout_s(shape, setting, card, prompts, completions),
        _update_s(shape, setting, card, completions),
    )
    total = rollout + update + SYNC_S
    error = ERROR if card.bf16_tflops is not None else ERROR_UNKNOWN_RATE
    tokens = completions * setting.completion_tokens
    return StepEstimate(rollout, update, total, total / error, total * error, tokens / rollout, error)


def cpu_step_estimate(
    shape: Shape, setting: Setting, rates: speed_cpu.Rates, *, prompts: int, group_size: int
) -> StepEstimate:
    """The same on a CPU whose rates were measured."""
    rollout, update = speed_cpu.phases(shape, setting, rates, prompts=prompts, group_size=group_size)
    total, error = rollout + update, speed_cpu.ERROR
    tokens = prompts * group_size * setting.completion_tokens
    return StepEstimate(rollout, update, total, total / error, total * error, tokens / rollout, error)


def estimate(diagnosis: Diagnosis, sizes: Sizes = DEFAULT) -> StepEstimate | None:
    """Seconds of one step of the plan on a card; None where card or model is not known, and on the CPU."""
    plan = diagnosis.plan
    shape = shape_of(plan.model)
    gpu = next((card.gpu for card in cards(diagnosis.facts) or () if card.index in plan.gpus), None)
    if plan.path in (None, "cpu") or shape is None or gpu is None or not gpu.name:
        return None
    try:
        card, _ = find_card(gpu.name)
    except CardError:
        return None
    have = plan.memory.have_gib if plan.memory else None
    setting = settle(shape, str(plan.path), have, sizes.on(diagnosis.facts)).setting
    return step_estimate(shape, setting, card, prompts=sizes.prompts_per_step, group_size=sizes.group_size)


def in_words(step: StepEstimate, steps: int) -> str:
    """How long `steps` such steps take, with the error."""
    whole, low, high = (duration(steps * seconds) for seconds in (step.total_s, step.low_s, step.high_s))
    return f"about {whole}, {_short(step.total_s)} a step (estimate: {low} to {high})"


def duration(seconds: float) -> str:
    """`48 s`, `12 min`, `3.1 h`, `27 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds >= 72 * 3600:
        return f"{seconds / 86400:.0f} days"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _rollout_s(shape: Shape, s: Setting, card: Card, prompts: int, completions: int) -> float:
    rows = min(s.rollout_rows, completions)
    rounds = -(-completions // rows)
    prefills = max(prompts, rounds)  # a prompt whose group is split is prefilled once for each part
    prefill = 2 * shape.active_params * prefills * s.prompt_tokens / (PRODUCT_SHARE * card.tflops * 1e12)
    return rounds * s.completion_tokens * decode_step_s(shape, s, card, rows) + prefill


def decode_step_s(shape: Shape, s: Setting, card: Card, rows: int) -> float:
    """Seconds in which `rows` completions grow by one token, half-way through their length."""
    generate = s.base == "nf4" and s.copy == "none" and s.engine == "portable"
    kind = s.copy if s.copy != "none" else s.base
    read = weight_bytes(shape, kind) * (shape.active_params / max(1, shape.params) if shape.experts else 1.0)
    read += rows * (s.prompt_tokens + s.completion_tokens / 2) * kv_bytes_per_token(shape, s.base)
    memory = read / (BANDWIDTH_SHARE * card.bandwidth_gb_s * 1e9)
    products = 2 * shape.active_params * rows / (DECODE_PRODUCT_SHARE * card.tflops * 1e12)
    if s.engine == "vllm":
        fixed = VLLM_STEP_S + VLLM_ROW_S * rows
    else:
        fixed = shape.layers * (GENERATE_LAYER_S if generate else PORTABLE_LAYER_S)
    return max(memory, products) + fixed


def _update_s(shape: Shape, s: Setting, card: Card, completions: int) -> float:
    """Forward, backward to the inputs (frozen weights need no gradient of their own), and the forward again if recomputed."""
    passes = 3 if s.checkpointing else 2
    if not s.lora_rank:
        passes += 1
    tokens = completions * (s.prompt_tokens + s.completion_tokens)
    slower = 1.3 if s.base == "nf4" else 1.0  # every product de-quantises its weight first
    products = slower * passes * 2 * shape.active_params * tokens / (PRODUCT_SHARE * card.tflops * 1e12)
    launches = -(-completions // s.micro_batch) * shape.layers * passes * BLOCK_PASS_S
    return max(products, launches)
