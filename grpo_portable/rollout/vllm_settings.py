"""How vLLM is started beside a trainer on one card: sizes, memory, graphs, number format. Pure, torch-free, vLLM-free.

Memory of the engine is given in bytes of KV cache, not as a share of the card: the trainer's weights already lie there and
its gradients, optimizer and activations are still to come. The engine stays awake through the update when the card holds
both; only when it does not, it sleeps (weights to the host, KV cache dropped), which costs time at every step.

Legend: rows completions at once, prompt and completion their longest in tokens, group completions that share a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from doctor.memory import GIB, HEADROOM, Setting, ledger
from doctor.shapes import Shape
from grpo_portable.combinations import RANKS
from grpo_portable.errors import EngineError, EngineUnsupported
from grpo_portable.recipe import Recipe

BLOCK = 16  # tokens in a block of vLLM's KV cache
BATCHED_TOKENS = 8192  # prompt tokens in one forward pass
FP8_BLOCK = 128  # vllm/model_executor/layers/quantization/utils/fp8_utils.py: group_size
FP8 = {"row": "fp8_per_channel", "block": "fp8_per_block", "tensor": "fp8_per_tensor"}  # vllm/config/quantization.py
GRAPHS = ("full", "compiled", "eager")


@dataclass(frozen=True)
class Layout:
    """What the engine must reserve for an adapter: the largest rank, and the adapted layers' last names (q_proj, ...)."""

    rank: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """`gib` by part; `sleeps`: whether the engine gives its memory back during the update, and `reason` why or why not."""

    gib: Mapping[str, float]
    kv_bytes: int | None  # None: vLLM fills its share
    share: float  # of the whole card; vLLM checks that so much is free when it starts
    sleeps: bool
    reason: str


def setting_of(recipe: Recipe, rows: int, *, base: str, copy: str) -> Setting:
    """What the doctor's ledger asks of a run with vLLM: `base` and `copy` are the formats of the policy and of the engine."""
    return Setting(
        base=base,
        copy=copy,
        engine="vllm",
        micro_batch=int(recipe.micro_batch),
        rollout_rows=rows,
        checkpointing=recipe.gradient_checkpointing is not False,
        prompt_tokens=recipe.max_prompt_tokens,
        completion_tokens=recipe.max_completion_tokens,
        lora_rank=recipe.lora_rank,
        optimizer=recipe.optimizer,
    )


def kv_gib(shape: Shape, *, rows: int, prompt: int, completion: int, group: int = 1) -> float:
    """KV cache in 16 bit of `rows` rows, each with its completion, and of one prompt a group."""
    tokens = rows * (completion + BLOCK) + -(-rows // group) * (prompt + BLOCK)
    return 2 * shape.kv_values_per_token * tokens / GIB


def plan_memory(
    shape: Shape | None,
    setting: Setting,
    *,
    group: int,
    trains: bool,
    free_gib: float,
    total_gib: float,
    sleep: bool | None = None,
) -> Memory:
    """Room for the engine in what is free with the policy loaded. EngineError when not even one row fits.

    `setting` is the doctor's, whose ledger tells the parts; `trains` False leaves the update's out. `sleep` True or False
    overrides the choice. A model of unknown shape shares the card half and half.
    """
    if shape is None:
        sleeps = trains if sleep is None else sleep
        return Memory({}, None, round(0.5 * free_gib / total_gib, 4), sleeps, "the shape of the model is not known")
    parts = ledger(shape, setting)
    weights, workspace = parts["engine_copy"], parts["engine_workspace"]
    lasting = parts.get("gradients", 0.0) + parts.get("optimizer", 0.0) if trains else 0.0
    update = parts.get("activations", 0.0) + parts.get("logits", 0.0) if trains else 0.0
    lengths = {"prompt": setting.prompt_tokens, "completion": setting.completion_tokens}
    wanted = kv_gib(shape, rows=setting.rollout_rows, group=group, **lengths)
    room = HEADROOM * free_gib - lasting - weights - workspace
    together = wanted + update <= room
    sleeps = (trains and not together) if sleep is None else sleep
    kv = min(wanted, room if sleeps else room - update)
    least = kv_gib(shape, rows=1, **lengths)
    if kv < least:
        raise EngineError(
            f"vLLM has no room for a KV cache: {max(0.0, kv):.2f} GiB are left and one row needs {least:.2f}",
            because=f"of {free_gib:.1f} GiB free its weights take {weights:.1f} and its workspace {workspace:.1f}",
            help="lower max_completion_tokens or micro_batch, or take a path without vLLM",
        )
    share = min((weights + workspace + kv) / total_gib, 0.9 * free_gib / total_gib)
    gib = {"engine_copy": weights, "engine_workspace": workspace, "kv_cache": kv}
    return Memory(
        gib, int(kv * GIB), round(share, 4), sleeps, _sleep_reason(sleep, trains, together, wanted + update, room)
    )


def _sleep_reason(asked: bool | None, trains: bool, together: bool, both: float, room: float) -> str:
    if asked is not None:
        return "sleep mode was asked for" if asked else "sleep mode was switched off"
    if not trains:
        return "nothing is trained"
    if together:
        return "the card holds engine and update at once"
    return f"KV cache and update need {both:.1f} GiB at once, and {max(0.0, room):.1f} are left"


def ready_format(quantization: Any) -> str | None:
    """How a checkpoint's own `quantization_config` (mapping, object or None) stores weights: fp8, another name, or None."""
    if quantization is None:
        return None
    told = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(told.get("quant_method", "")).lower()
    if method in ("fp8", "fbgemm_fp8") or (method == "modelopt" and "FP8" in str(told.get("quant_algo", "")).upper()):
        return "fp8"
    if method == "compressed-tensors":
        kinds = [group.get("weights") or {} for group in (told.get("config_groups") or {}).values()]
        if kinds and all(k.get("type") == "float" and k.get("num_bits") == 8 for k in kinds):
            return "fp8"
    return method or "unknown"


def quantization(ready: str | None, *, fp8: bool, scales: str) -> str | None:
    """vLLM's `quantization`: None leaves the weights as the checkpoint has them. EngineUnsupported for what cannot be."""
    if not fp8 or ready == "fp8":
        return None
    if ready is not None:
        raise EngineUnsupported(f"the checkpoint is stored as {ready}", because="vLLM makes FP8 only of 16-bit weights")
    if scales not in FP8:
        raise EngineUnsupported(f"FP8 scales per `{scales}` are not known", help=f"one of: {', '.join(FP8)}")
    return FP8[scales]


def block_refusal(shape: Shape) -> str | None:
    """Why 128x128 blocks do not fit a model: vLLM's block product wants inputs of a multiple of 128. None: they do."""
    inputs = {
        "hidden size": shape.hidden,
        "query size": shape.heads * shape.head_dim,
        "MLP size": shape.intermediate,
    }
    odd = next(((name, size) for name, size in inputs.items() if size % FP8_BLOCK), None)
    return f"fp8_scales: block wants multiples of {FP8_BLOCK}, and the {odd[0]} is {odd[1]}" if odd else None


def precision(ready: str | None, *, fp8: bool, scales: str, dtype: str) -> str:
    """The engine's weights in words, for run.json and the report."""
    if ready is not None:
        return f"{ready.upper() if ready == 'fp8' else ready}, as the checkpoint has them"
    of = {"row": "output row", "block": "128x128 block", "tensor": "tensor"}.get(scales, scales)
    return f"FP8, one scale a{'n' if of[0] == 'o' else ''} {of}" if fp8 else dtype


def served_rank(rank: int) -> int:
    """The smallest of vLLM's ranks that holds an adapter of this rank."""
    fitting = [known for known in RANKS if known >= rank]
    if not fitting:
        raise EngineUnsupported(f"vLLM serves adapters up to rank {RANKS[-1]}, not {rank}")
    return fitting[0]


def capture_sizes(rows: int) -> list[int]:
    """Batch sizes that get a CUDA graph: eights up to 64, then quarters of each doubling, so that few are captured."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < rows:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 4))
    return sorted({min(size, rows) for size in sizes})


def graph_arguments(graphs: str, rows: int) -> dict[str, Any]:
    """vLLM's compilation settings. `full`: a graph of each decode step and nothing compiled; `compiled`: vLLM's default."""
    if graphs not in GRAPHS:
        raise EngineUnsupported(f"graphs=`{graphs}` is not known", help=f"one of: {', '.join(GRAPHS)}")
    if graphs == "eager":
        return {"enforce_eager": True}
    # every request carries the adapter, so graphs without one would be captured for nothing
    shared: dict[str, Any] = {"cudagraph_capture_sizes": capture_sizes(rows), "cudagraph_specialize_lora": False}
    if graphs == "full":
        shared |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"compilation_config": shared}


def llm_arguments(
    *,
    model: str,
    dtype: str,
    quantization: str | None,
    rows: int,
    context: int,
    memory: Memory,
    layout: Layout | None,
    graphs: str,
    seed: int,
    several: bool = False,
) -> dict[str, Any]:
    """The keyword arguments of vllm.LLM; `layout` is the adapter's, None without one.

    `several`: the process is one of a run's, each with a vLLM of its own on its own card. vLLM must then find its place among
    them as they were launched; alone it would take the first card, and make a group that they have already.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "trust_remote_code": False,
        "dtype": dtype,
        "quantization": quantization,
        "seed": seed,
        "max_model_len": context,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(BATCHED_TOKENS, rows),
        "gpu_memory_utilization": memory.share,
        "kv_cache_memory_bytes": memory.kv_bytes,  # None: all of the share that is left
        "enable_sleep_mode": memory.sleeps,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, as the importance ratio needs them
        "generation_config": "vllm",  # nothing is taken from the model's own sampling defaults
        **graph_arguments(graphs, rows),
    }
    if several:
        arguments["distributed_executor_backend"] = "external_launcher"  # v1/executor/uniproc_executor.py
    if layout is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": served_rank(layout.rank),
            "lora_target_modules": list(layout.modules),  # no adapter slots for embeddings and head
        }
    return arguments
