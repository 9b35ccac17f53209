"""Unsloth as a backend: one copy of the weights, which vLLM reads and quantises, samples from, and Unsloth's kernels learn on.
The only file that imports unsloth. Written against Unsloth 2026.10.9, whose sources are the authority for what follows.

What importing it changes in the process, and what is made of it:
- It rewrites TRL's trainers. Ours overrides parts of TRL's own, so these must stay: UNSLOTH_ALLOW_CPU leaves TRL alone, and
  means nothing else where there is an NVIDIA card (unsloth/models/rl.py, unsloth/device_type.py).
- transformers' Trainer gets its loop, `training_step` and `get_batch_samples` from Unsloth: a tiny run gives the same bits.
- While a model trains it drops the padding mask. Rows that are learnt from are padded on the right and have none
  (training/layout.py); should a call bring a left-padded one, `_unsloth_keep_padding_mask` keeps its mask
  (unsloth/models/llama.py).
- It checkpoints activations its own way, switched on with the adapter; TRL's is left off.
- `load_lora` may fold an adapter into the weights. Adapters are handed over as files here, as to every vLLM, and never merged.
- Standby leaves the weights where they are, since the policy learns on them, and gives back the KV cache.
- It asks a hub for statistics, and writes code it compiles into the working directory: the first is off, the second elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from doctor.memory import GIB, HEADROOM, ledger, weight_bytes
from doctor.shapes import Shape, shape_of
from grpo_portable.errors import EngineError, EngineUnsupported
from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import vllm, vllm_adapter, vllm_settings
from grpo_portable.rollout.contained import engine_errors, undisturbed

KINDS = ("llama", "mistral", "qwen2", "qwen3")  # model types that Unsloth has a path with vLLM and fused kernels for
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # all-linear, of these kinds
SCALES: Mapping[str, bool | str] = {"row": True, "block": "block"}  # `load_in_fp8`
CHOSEN_BY_MEMORY = 256  # `max_num_seqs` of which Unsloth thinks nobody asked for it


@dataclass(frozen=True)
class Shared:
    """The policy without an adapter, and the vLLM that holds its weights."""

    loaded: policy.Loaded
    llm: Any
    memory: vllm_settings.Memory
    context: int  # tokens of prompt and answer together
    precision: str

    def adapted(self, recipe: Recipe) -> tuple[Any, Recipe]:
        """The policy with a fresh adapter in float32 on Unsloth's kernels, and the recipe for the trainers: checkpointing is
        Unsloth's own, set here.
        """
        from unsloth import FastLanguageModel

        named = [target.strip() for target in recipe.lora_targets.split(",") if target.strip()]
        with engine_errors("Unsloth could not put the adapter on"):
            wrapped = FastLanguageModel.get_peft_model(
                self.loaded.model,
                r=recipe.lora_rank,
                target_modules=list(TARGETS) if named == ["all-linear"] else named,
                lora_alpha=recipe.lora_alpha,
                lora_dropout=recipe.lora_dropout,
                bias="none",
                use_gradient_checkpointing=recipe.gradient_checkpointing is True,
                random_state=recipe.seed,
                use_rslora=recipe.rslora,
            )
        policy.keep_float32(wrapped)
        _keep_padding_mask(wrapped)
        return wrapped, replace(recipe, gradient_checkpointing=False)


class SharedRollout(vllm.VllmRollout):
    """vLLM over weights that the policy learns on."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "weights_shared": True}

    def holds(self) -> dict[str, float | None]:
        """GiB beside the policy's: no weights, and the KV cache that was planned."""
        return {"weights": 0.0, "kv_cache": self.memory.gib.get("kv_cache")}


def load(recipe: Recipe, *, rows: int, dtype: str, fp8: bool) -> Shared:
    """Start vLLM through Unsloth and build the policy on its weights. EngineUnsupported for what Unsloth is not asked to
    do here, EngineError when it fails.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise EngineUnsupported("the Unsloth backend is only arranged for a single process")
    shape = shape_of(recipe.model)
    free, total = _card()
    memory = plan_memory(recipe, shape, rows, fp8=fp8, free_gib=free, total_gib=total)
    environment = _environment(sleeps=memory.sleeps)
    for name, value in {**vllm.ENVIRONMENT, **environment}.items():
        os.environ.setdefault(name, value)
    source = str(Path(recipe.model).expanduser())
    with engine_errors("Unsloth could not start", "set backend to plain: the path runs without it"), undisturbed():
        from unsloth import FastLanguageModel  # isort: skip  # before transformers' models, which it patches
        from transformers import GenerationConfig

        ready, positions = _checked(source)
        context = min(recipe.max_prompt_tokens + recipe.max_completion_tokens, positions)  # more would stretch RoPE
        model, _ = FastLanguageModel.from_pretrained(
            model_name=source,
            use_exact_model_name=True,  # never a mirror with other weights
            max_seq_length=context,
            dtype=getattr(torch, dtype),
            load_in_4bit=False,
            load_in_fp8=SCALES[recipe.fp8_scales] if fp8 and ready is None else False,
            fast_inference=True,
            max_lora_rank=vllm_settings.served_rank(recipe.lora_rank),
            gpu_memory_utilization=memory.share * total / free,  # Unsloth counts it of what is free
            use_gradient_checkpointing=recipe.gradient_checkpointing is True,
            trust_remote_code=False,
            max_num_seqs=rows + (rows == CHOSEN_BY_MEMORY),
            compilation_config=vllm_settings.graph_arguments("full", rows)["compilation_config"],
        )
        llm = model.vllm_engine
        _require_context(llm, context)
        with contextlib.suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(source)  # its end tokens stop the rows
    _keep_padding_mask(model)
    loaded = policy.Loaded(
        model.eval(),
        policy.load_tokenizer(recipe.model),
        policy.reported_name(recipe.model),
        dtype,
        "fp8" if fp8 else None,
    )
    told = vllm_settings.precision(ready, fp8=fp8, scales=recipe.fp8_scales, dtype=dtype)
    return Shared(loaded, llm, memory, context, f"{told}, the policy's own")


def engine(shared: Shared, model: Any, recipe: Recipe, *, rows: int) -> SharedRollout:
    """The rollout engine over the shared weights; asleep where the update needs its KV cache's memory."""
    reason = vllm_adapter.refusal(model, fp8=True)
    if reason is not None:
        raise EngineUnsupported(f"vLLM cannot make the rollouts of this policy: {reason}")
    arguments = {
        "max_model_len": shared.context,
        "max_num_seqs": rows,
        "max_lora_rank": vllm_settings.served_rank(recipe.lora_rank),
        "kv_cache_memory_bytes": None,  # Unsloth takes a share of the card
    }
    made = SharedRollout(
        arguments,
        shared.memory,
        shared.loaded.tokenizer,
        vocabulary=vllm_adapter.vocabulary(model),
        dtype=shared.loaded.dtype,
        llm=shared.llm,
    )
    made.precision = shared.precision
    made.rest()
    return made


def _environment(*, sleeps: bool) -> dict[str, str]:
    """Unsloth's switches; settings the user made are kept. Read when it is imported."""
    return {
        "UNSLOTH_ALLOW_CPU": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_VLLM_STANDBY": "1" if sleeps else "0",
        "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",  # the share of the card is planned here
        "UNSLOTH_VLLM_NO_FLASHINFER": "1",  # it compiles for minutes where no cubin is installed
        "UNSLOTH_VLLM_MERGED_ROLLOUT": "0",
        "UNSLOTH_BLOCK_COMPILE_LEGACY": "0",  # minutes of compiling for each new shape
        "UNSLOTH_RETURN_LOGITS": "1",  # the bootstrap's trainer reads them
        "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir()) / "grpo-portable-unsloth"),
    }


def _checked(source: str) -> tuple[str | None, int]:
    """How the checkpoint stores its weights (`ready_format`), and the positions it was made for.

    EngineUnsupported for kinds that Unsloth is not asked to load.
    """
    config, ready = vllm.stored(source)
    if config.model_type not in KINDS:
        raise EngineUnsupported(
            f"the Unsloth backend is not arranged for models of type {config.model_type}",
            because=f"what it does to their padding is known for {', '.join(KINDS)} only",
        )
    if ready not in (None, "fp8"):
        raise EngineUnsupported(f"the checkpoint is stored as {ready}", because="16 bit or FP8 is shared with vLLM")
    return ready, int(config.max_position_embeddings)


def _require_context(llm: Any, context: int) -> None:
    """EngineError where Unsloth found less room than it was given and cut the context short."""
    config = getattr(getattr(getattr(llm, "llm_engine", None), "vllm_config", None), "model_config", None)
    given = getattr(config, "max_model_len", None)
    if given is not None and given < context:
        raise EngineError(
            f"Unsloth gave vLLM a context of {given} tokens, and prompt and answer may take {context}",
            because="it counted too little memory for a KV cache",
            help="lower max_completion_tokens or max_prompt_tokens, or set backend to plain",
        )


def _keep_padding_mask(model: Any) -> None:
    """Make every part that would drop the padding mask in training keep it."""
    for module in model.modules():
        if hasattr(module, "embed_tokens"):
            module._unsloth_keep_padding_mask = True


def _card() -> tuple[float, float]:
    """(free, all) GiB of the current card."""
    if not torch.cuda.is_available():
        raise EngineUnsupported("Unsloth runs on a GPU here", because="torch sees none")
    free, total = torch.cuda.mem_get_info()
    return free / 2**30, total / 2**30


def plan_memory(
    recipe: Recipe, shape: Shape | None, rows: int, *, fp8: bool, free_gib: float, total_gib: float
) -> vllm_settings.Memory:
    """The engine's share of a card on which nothing lies yet: its weights are the policy's, the adapter comes on top."""
    setting = vllm_settings.setting_of(recipe, rows, base="fp8" if fp8 else "bf16", copy="fp8" if fp8 else "none")
    parts = ledger(shape, setting) if shape else {}
    free = free_gib - parts.get("adapter", 0.0)
    planned = vllm_settings.plan_memory(
        shape, setting, group=recipe.group_size, trains=True, free_gib=free, total_gib=total_gib
    )
    return planned if shape is None else _believed(planned, shape, parts, recipe.lora_rank, free, total_gib)


def _believed(
    planned: vllm_settings.Memory,
    shape: Shape,
    parts: Mapping[str, float],
    rank: int,
    free_gib: float,
    total_gib: float,
) -> vllm_settings.Memory:
    """The plan with a share in which Unsloth finds room for the context, else it cuts that short.

    It counts weights in 16 bit that vLLM will quantise, the adapter's slots, up to 1 GiB of CUDA graphs, and of the rest 0.95
    (`approximate_vllm_memory_usage`). What it counts too much becomes KV cache, which the update may need back.
    """
    slots = 2 * shape.adapter_params(vllm_settings.served_rank(rank)) / GIB
    counted = weight_bytes(shape, "bf16") / GIB + slots + 1.0 + planned.gib["kv_cache"] / 0.95
    more = max(0.0, counted - sum(planned.gib.values()))
    lasting = sum(parts.get(name, 0.0) for name in ("gradients", "optimizer"))
    update = sum(parts.get(name, 0.0) for name in ("activations", "logits"))
    gib = {**planned.gib, "kv_cache": planned.gib["kv_cache"] + more}
    engine = sum(gib.values())
    share = min(engine, HEADROOM * free_gib - lasting) / total_gib
    tight = engine + lasting + update > HEADROOM * free_gib
    if tight and not planned.sleeps:
        reason = f"Unsloth takes {engine:.1f} GiB for its engine, and the update needs {lasting + update:.1f} of {free_gib:.1f}"
        return replace(planned, gib=gib, share=round(share, 4), sleeps=True, reason=reason)
    return replace(planned, gib=gib, share=round(share, 4))
