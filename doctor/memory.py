"""What a path needs of a card's memory, part by part, and the largest settings that fit.

Legend: P prompt tokens, T completion tokens, N = prompts x G completions a step. All results are GiB, all shapes parameters.
A step has two phases that never overlap: the rollout (sampling) and the update (activations, logits of the loss). What
lives through both is added up, of the rest the larger phase counts. The arithmetic is shown in docs/memory.md, with what
was measured beside it. Pure: nothing here looks at a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from doctor.diagnosis import SPREAD_PATHS
from doctor.facts import Facts
from doctor.readings import fused_norms, repeats_keys
from doctor.shapes import Shape

GIB = 2**30
CONTEXT_GIB = 0.55  # CUDA context, torch's and cuBLAS's kernels and workspaces
CPU_PROCESS_GIB = 0.9  # an interpreter with torch, transformers and TRL loaded
ENGINE_WORKSPACE_GIB = 2.4  # vLLM: CUDA graphs, its profile run's activations and logits, what it takes outside torch
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # two values a byte; one 8-bit absmax per 64, one float32 per 256 of those
LOSS_ROWS, LOSS_COLUMNS = 4096, 32768  # tile of TRL's chunked LM head (trl/kernels/chunked_logprob.py)
COMPUTE_BOUND_TOKENS = 2048  # tokens in a pass from which the arithmetic is the limit of a large model, and on a CPU
# Weights x tokens whose products take as long as launching one block from Python: 1.2 ms (doctor.speed, assumed) at 45 % of
# an H200's 989 Tflop/s, two operations each. Unmeasured; slower cards need less, and lose little by a wider pass.
LAUNCH_PRODUCTS = 2.7e11
LAUNCH_MARGIN = 2  # arithmetic should take this many times as long as the launches, since both are estimates
NO_SLOWER = 1.1  # of the settings whose update should take at most this times the fastest one's, the smallest is taken
HEADROOM = 0.92  # share of free memory that may be planned away beyond the smallest setting
PREFILL_TOKENS = {"cuda": 16384, "cpu": 4096}  # prompt tokens the engine runs at once (rollout/decoder.py)
KV_BUCKET = 64  # the static cache's length is a multiple of this (rollout/decoder.py: capacity_for)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run asks of a machine, and what of the machine decides how much an update keeps."""

    prompt_tokens: int = 512
    completion_tokens: int = 256
    lora_rank: int = 32
    dora: bool = False
    dropout: bool = False  # on the adapter's inputs
    optimizer: str = "adamw"
    shared: bool = False  # the engine reads the policy's own weights (Unsloth), no second copy
    spread: int = 1  # cards that hold the frozen 16-bit blocks in parts (FSDP2); then rollouts come from elsewhere
    # torch has a fused norm for the card (doctor.readings.fused_norms); unless that is known, more is counted
    fused_norms: bool = False
    repeats_keys: bool = False  # an update repeats keys and values for each head (doctor.readings.repeats_keys)


@dataclass(frozen=True, kw_only=True)
class Sizes(Asked):
    """What is asked, and the completions of a step: all that `settle` chooses a `Setting` for."""

    group_size: int = 8
    prompts_per_step: int = 8

    def on(self, facts: Facts) -> Sizes:
        """The same on this machine."""
        return replace(self, fused_norms=fused_norms(facts), repeats_keys=repeats_keys(facts))


DEFAULT = Sizes()


@dataclass(frozen=True)
class Setting(Asked):
    """Everything the ledger depends on beside the shape. `base`: bf16, fp16, fp32, nf4 or fp8; `copy`: none, bf16 or fp8."""

    base: str
    copy: str = "none"
    engine: str = "portable"  # portable | vllm
    micro_batch: int = 1
    rollout_rows: int = 8
    checkpointing: bool = True
    device: str = "cuda"


@dataclass(frozen=True)
class Settled:
    """What to run with. `ledger` sums to `need_gib`; `fits` is judged at the smallest setting and is None when nobody knows."""

    need_gib: float
    have_gib: float | None
    ledger: Mapping[str, float]
    micro_batch: int
    rollout_rows: int
    checkpointing: bool
    rollout_copy: bool
    fits: bool | None
    reason: str
    base: str
    phase: str  # update | rollout: which of the two is the larger
    setting: Setting


def ledger(shape: Shape, setting: Setting) -> dict[str, float]:
    """GiB by part for one setting, at the peak of a step; the sum is the need."""
    update, rollout = _update(shape, setting), _rollout(shape, setting)
    larger = update if sum(update.values()) >= sum(rollout.values()) else rollout
    parts = {**_lasting(shape, setting), **larger}
    return {name: gib for name, gib in parts.items() if gib > 0}


def phase(shape: Shape, setting: Setting) -> str:
    """Which phase of a step needs more: update or rollout."""
    more = sum(_update(shape, setting).values()) >= sum(_rollout(shape, setting).values())
    return "update" if more else "rollout"


def weight_bytes(shape: Shape, kind: str) -> float:
    """Bytes of all weights: quantised kinds keep embeddings, head and norms in 16 bit."""
    each = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nf4": NF4_BYTES}[kind]
    if kind in ("nf4", "fp8"):
        return shape.linear_params * each + (shape.params - shape.linear_params) * 2
    return shape.params * each


def kv_bytes_per_token(shape: Shape, kind: str = "bf16") -> int:
    """Bytes one token of one row keeps in the KV cache."""
    return shape.kv_values_per_token * (4 if kind == "fp32" else 2)


def saved_bytes_per_token(shape: Shape, s: Setting) -> float:
    """Bytes one block keeps of one token for the backward pass, without checkpointing: what the nodes of its graph save.

    Counted tensor by tensor on transformers' blocks, each storage once (tests/doctor/test_memory_counted.py); attention has no
    mask, so keys and values lie there once a KV head. Numbers of the update's type are 2 bytes, those of float32 4.
    """
    query, key, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, _value(s)
    trained = not s.lora_rank
    attention = value * (2 * query + 2 * key) + 4 * shape.heads  # q, k, v, what comes out; log-sum-exp of each head
    if shape.fused:  # v is a view of the one product that holds q and k before their turn as well
        attention += value * (query + key)
    # fp16: the cards that have no bfloat16 are before Ampere
    if s.base == "fp16" or (s.repeats_keys and s.base != "fp32"):
        attention += value * 2 * (query - key)
    gated = value * 4 * _wide(shape)  # gate, its activation, up, and their product: the last projection's input
    if shape.experts:  # tokens sorted by expert, before and after
        gated += value * 2 * shape.experts_per_token * shape.hidden
    ranks = value * s.lora_rank * len(shape.linears())
    return _norm_bytes(shape, s, trained) + _input_bytes(shape, s, query) + attention + gated + ranks


def _norm_bytes(shape: Shape, s: Setting, trained: bool) -> float:
    """The norms of a block: torch's fused kernel keeps its input as it came, a model's own code a copy in float32; either
    keeps 1 / rms of each row. Where the norms' weights are trained, what was multiplied by them as well.
    """
    inner = (shape.heads + shape.kv_heads) if shape.qk_norm else 0
    hidden, heads = shape.norms * shape.hidden, inner * shape.head_dim
    each = _value(s) if _norms_are_fused(shape, s) else 4
    kept = each * (hidden + heads) + 4 * (shape.norms + inner)
    if trained:  # the residual stream is float32 then
        kept += 4 * hidden + _value(s) * heads
    return kept


def _input_bytes(shape: Shape, s: Setting, query: int) -> float:
    """What the linear layers keep of their inputs beside what attention and MLP keep anyway.

    Under autocast PEFT's 16-bit layers make a copy each, and so do weights that are trained in float32.
    """
    if _shares_inputs(shape, s):
        return _value(s) * 2 * shape.hidden
    linears = shape.linears()
    readers = 5 if shape.experts else len(linears) - 2  # all but those of attention's and the MLP's outputs
    kept = 2 * readers * shape.hidden
    if s.lora_rank:
        kept += 2 * query  # the output's projection
    if s.dora:  # both parts of each product, which the magnitude scales
        kept += 2 * 2 * sum(o for _, o in linears.values())
    if s.dropout:  # which inputs were kept, a byte each
        kept += readers * shape.hidden + query + _wide(shape)
    return kept


def _few_kernels(s: Setting) -> bool:
    """Whether updates are made in few kernels (updates/quick.py): on a card, without Unsloth, of weights that lie whole."""
    return s.device == "cuda" and not s.shared and s.spread == 1


def _one_node(shape: Shape, s: Setting) -> bool:
    """Whether adapter and layer are one node. Experts are no linear layers, and theirs stays a model's own code."""
    dense = s.base in ("bf16", "fp16") and s.lora_rank > 0 and not shape.experts
    return _few_kernels(s) and dense and not (s.dora or s.dropout)


def _shares_inputs(shape: Shape, s: Setting) -> bool:
    """Whether layers that read the same keep one input: as one node, in float32, and PEFT's of 4 bits."""
    return _one_node(shape, s) or s.base == "fp32" or (s.base == "nf4" and not (s.dora or s.dropout))


def _norms_are_fused(shape: Shape, s: Setting) -> bool:
    """Frozen norms become torch's fused one. Gemma's are of another kind: from the second on they come in fours, and the first
    one's heads are as wide as nearly no other's.
    """
    return _few_kernels(s) and s.fused_norms and s.lora_rank > 0 and shape.norms == 2 and shape.head_dim != 256


def _value(s: Setting) -> int:
    """Bytes of a number in the update's arithmetic; weights trained in float32 on a card compute in 16 bit."""
    return 4 if s.base == "fp32" else 2


def _passing_bytes(shape: Shape, s: Setting) -> float:
    """Bytes a token needs for a moment, while all that was kept is still there: for an MLP's gradient two tensors of its width
    and two hidden ones (PEFT's 16-bit steps: 4.2 and two), for that of a norm in a model's own code six float32 ones. A norm
    is what comes last in a model, and in each of Gemma's blocks.
    """
    wide = 2.0 if _shares_inputs(shape, s) else 4.2
    mlp = _value(s) * (wide * _wide(shape) + 2 * shape.hidden)
    by_norm = not _norms_are_fused(shape, s) and (shape.norms > 2 or not s.checkpointing)
    return max(mlp, 24.0 * shape.hidden if by_norm else 0.0)


def _wide(shape: Shape) -> int:
    """Width of the MLP one token passes through."""
    return shape.experts_per_token * shape.moe_intermediate if shape.experts else shape.intermediate


def _lasting(shape: Shape, s: Setting) -> dict[str, float]:
    """What lives through the whole step: weights, copy, adapter and its optimizer, KV cache, engine, context."""
    trained = shape.adapter_params(s.lora_rank, dora=s.dora) if s.lora_rank else shape.params
    states = 2.06 if s.optimizer == "adamw_8bit" else 8.0  # two moments, 8-bit ones with a scale per 256
    wide = 4.0 if s.lora_rank else 0.0  # adapters are float32; without one the weights themselves are trained
    positions = -(-(s.prompt_tokens + s.completion_tokens + 1) // KV_BUCKET) * KV_BUCKET
    kv = s.rollout_rows * positions * kv_bytes_per_token(shape, s.base)
    parts = {
        "weights": weight_bytes(shape, s.base if s.lora_rank else "fp32"),
        "rollout_copy": {"none": 0.0, "bf16": 2.0, "fp8": 1.0}[s.copy] * shape.linear_params,
        "adapter": wide * trained,
        "gradients": 4.0 * trained,
        "optimizer": states * trained,
        "kv_cache": float(kv),
    }
    if s.spread > 1:  # a part of each block, and two whole ones: the one at work and the one fetched ahead
        blocks = weight_bytes(shape, s.base) * shape.linear_params / max(1, shape.params)
        parts["weights"] -= blocks
        parts["weights"] += blocks / s.spread + 2 * blocks / shape.layers
        parts["kv_cache"] = parts["rollout_copy"] = 0.0
    if s.engine == "vllm":
        parts["engine_copy"] = 0.0 if s.shared else weight_bytes(shape, "bf16" if s.copy == "none" else s.copy)
        parts["rollout_copy"] = 0.0
        parts["engine_workspace"] = ENGINE_WORKSPACE_GIB * GIB
    parts["context"] = (CONTEXT_GIB if s.device == "cuda" else CPU_PROCESS_GIB) * GIB
    return {name: size / GIB for name, size in parts.items()}


def _update(shape: Shape, s: Setting) -> dict[str, float]:
    """Activations and the loss's logits of one micro-batch."""
    tokens = s.micro_batch * (s.prompt_tokens + s.completion_tokens)
    block, passing, value = saved_bytes_per_token(shape, s), _passing_bytes(shape, s), _value(s)
    trained = shape.adapter_params(s.lora_rank, dora=s.dora) if s.lora_rank else shape.params
    low = 0 if s.base == "fp32" else 2 * trained  # 16-bit copies of what is trained in float32
    if s.checkpointing:  # each block's input is kept, in float32 where weights are trained, and one block is rebuilt
        stream = (value if s.lora_rank else 4) * shape.hidden * (shape.layers + 1)
        rebuilt = tokens * (block + passing)
        activations = tokens * stream + (rebuilt + low if s.lora_rank else max(rebuilt + low / shape.layers, low))
    else:
        activations = tokens * (shape.layers * block + passing) + low
    largest = max(i * o for i, o in shape.linears().values())
    if s.base == "nf4":  # the largest linear, de-quantised for its product and for its gradient
        activations += 2 * 2 * largest
    # the adapter as a matrix, by way of an identity in float32 and 16 bit, and a float32 weight
    if s.dora and s.lora_rank:
        activations += 6 * max(i for i, _ in shape.linears().values()) ** 2 + 4 * largest
    scored = s.micro_batch * s.completion_tokens
    tile = min(scored, LOSS_ROWS) * min(shape.vocab, LOSS_COLUMNS)
    # Triton works in place on 16 bit; plain torch holds about five float32 tiles
    copies = 2 if s.device == "cuda" else 20
    logits = tile * copies + scored * shape.hidden * (4 + value)
    return {"activations": activations / GIB, "logits": logits / GIB}


def _rollout(shape: Shape, s: Setting) -> dict[str, float]:
    """Sampling: the last token's logits of every row in float32, sorted or perturbed once more; the prefill's buffers."""
    if s.engine == "vllm" or s.spread > 1:
        return {"sampling": 0.0}  # inside the engine's workspace, or on other cards
    value = 4 if s.base == "fp32" else 2
    rows = s.rollout_rows * shape.vocab * (value + 4 + 4)
    wide = 2 * max(shape.intermediate, (shape.heads + 2 * shape.kv_heads) * shape.head_dim) + 4 * shape.hidden
    prefill = min(PREFILL_TOKENS[s.device], s.rollout_rows * s.prompt_tokens) * value * wide
    return {"sampling": (rows + prefill) / GIB}


def settle(shape: Shape, path: str, have_gib: float | None, sizes: Sizes = DEFAULT) -> Settled:
    """The largest micro-batch and rollout chunk of this path that fit `have_gib` (for `cpu`: free system memory).

    `fits` is judged at the smallest setting: one completion in a backward pass, one group of rollouts, checkpointing, no
    rollout copy unless the path is made of one. When that does not fit it is returned as it is. Groups stay whole.
    """
    total = max(1, sizes.group_size) * max(1, sizes.prompts_per_step)
    asked = {field.name: getattr(sizes, field.name) for field in fields(Asked)}
    smallest = Setting("bf16", rollout_rows=max(1, sizes.group_size), **asked)
    if path not in SPREAD_PATHS:
        smallest = replace(smallest, spread=1)
    bases = _kinds(path, smallest)
    if have_gib is None:
        return _unknown(shape, path, bases[0], total)
    for base in bases:
        if _need(shape, base) <= have_gib:
            return _grown(shape, path, base, total, have_gib)
    last = min(bases, key=lambda s: _need(shape, s))
    need = _need(shape, last)
    reason = (
        f"{path} needs {need:.1f} GiB for {shape.name} at its smallest setting (one completion in a backward pass, "
        f"{last.rollout_rows} rows), and {have_gib:.1f} GiB are free"
    )
    return _settled(shape, last, have_gib, False, reason)


def _kinds(path: str, smallest: Setting) -> list[Setting]:
    """How the path keeps its weights, best first."""
    kinds = {
        "fp8-vllm": [replace(smallest, engine="vllm", copy="fp8", base="fp8" if smallest.shared else "bf16")],
        "bf16-vllm": [replace(smallest, engine="vllm")],
        "fp16-vllm": [replace(smallest, base="fp16", engine="vllm")],
        "fp8-hf": [replace(smallest, copy="fp8")],
        "bf16-hf": [smallest],
        "fp16-hf": [replace(smallest, base="fp16")],
        "qlora-hf": [replace(smallest, base="nf4")],
        "cpu": [replace(smallest, base="fp32", device="cpu"), replace(smallest, device="cpu")],
    }
    if path not in kinds:
        raise ValueError(f"`{path}` is not a path; the paths are {', '.join(kinds)}")
    return kinds[path]


def _need(shape: Shape, setting: Setting) -> float:
    return sum(ledger(shape, setting).values())


def _grown(shape: Shape, path: str, smallest: Setting, total: int, have: float) -> Settled:
    """Spend what is left: rollout rows first, then a rollout copy, then a faster backward pass (`update_cost`).

    For 4-bit weights the copy comes first: without one they are de-quantised in every product of every token.
    """
    room = HEADROOM * have

    def widest(options: Iterator[Setting], now: Setting) -> Setting:
        return max((o for o in options if _need(shape, o) <= room), key=_size, default=now)

    now = smallest
    if now.base == "nf4":
        now = widest(iter([replace(now, copy="bf16")]), now)
    now = widest((replace(now, rollout_rows=n) for n in _divisors(total) if n >= smallest.rollout_rows), now)
    if now.engine == "portable" and now.copy == "none" and now.device == "cuda" and now.spread == 1:
        now = widest(iter([replace(now, copy="bf16")]), now)
    passes = [replace(now, micro_batch=n, checkpointing=c) for n in _divisors(total) for c in (True, False)]
    fitting = [now, *(p for p in passes if _need(shape, p) <= room)]
    quick = NO_SLOWER * min(update_cost(shape, p, total) for p in fitting)
    now = min((p for p in fitting if update_cost(shape, p, total) <= quick), key=lambda p: _need(shape, p))
    need = _need(shape, now)
    again = "" if now.checkpointing else " without recomputing"
    parts = f", in parts on {now.spread} cards" if now.spread > 1 else ""
    reason = (
        f"{path} takes {need:.1f} of {have:.1f} GiB for {shape.name}: {now.base} weights{parts}, "
        f"{completions(now.micro_batch)} in a backward pass{again}, {now.rollout_rows} rows at once"
    )
    return _settled(shape, now, have, True, reason)


def largest_divisor(total: int, most: int) -> int:
    """The largest number up to `most`, or 1, that divides a total: parts of that many leave nothing over."""
    return next(k for k in range(max(1, most), 0, -1) if total % k == 0)


def launch_tokens(shape: Shape, device: str = "cuda") -> int:
    """Tokens in one pass of a block whose arithmetic takes as long as launching it. The fewer weights, the more tokens."""
    block = max(1, shape.active_params - shape.vocab * shape.hidden) / shape.layers
    return max(COMPUTE_BOUND_TOKENS, int(LAUNCH_PRODUCTS / block) if device == "cuda" else 0)


def update_cost(shape: Shape, s: Setting, total: int) -> int:
    """What an update of `total` completions costs, in tokens passed through a block.

    Arithmetic and launches go on at once, so the slower of them counts. Two passes, forward and backward, three where the
    forward is made again.
    """
    launches = -(-total // s.micro_batch) * launch_tokens(shape, s.device)
    tokens = total * (s.prompt_tokens + s.completion_tokens)
    return (3 if s.checkpointing else 2) * max(tokens, LAUNCH_MARGIN * launches)


def completions(count: int) -> str:
    """`1 completion`, `8 completions`."""
    return f"{count} completion{'' if count == 1 else 's'}"


def _size(setting: Setting) -> tuple[int, int]:
    return setting.rollout_rows, setting.micro_batch


def _unknown(shape: Shape, path: str, smallest: Setting, total: int) -> Settled:
    now = replace(smallest, micro_batch=largest_divisor(total, 8), rollout_rows=total)
    reason = f"free memory is unknown; {path} would need {_need(shape, smallest):.1f} GiB for {shape.name} at the least"
    return _settled(shape, now, None, None, reason)


def _settled(shape: Shape, s: Setting, have: float | None, fits: bool | None, reason: str) -> Settled:
    parts = ledger(shape, s)
    return Settled(
        need_gib=sum(parts.values()),
        have_gib=have,
        ledger=parts,
        micro_batch=s.micro_batch,
        rollout_rows=s.rollout_rows,
        checkpointing=s.checkpointing,
        rollout_copy=s.copy != "none",
        fits=fits,
        reason=reason + (" (shape guessed from the name)" if shape.estimated else ""),
        base=s.base,
        phase=phase(shape, s),
        setting=s,
    )


def _divisors(total: int) -> list[int]:
    return [n for n in range(1, total + 1) if total % n == 0]
