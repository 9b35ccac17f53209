"""What the engine must know of a model to run it without its module: shape constants, and the modules that hold the weights.

`read(model)` knows the Llama, Mistral, Qwen2/2.5, Qwen3, Gemma 1/2/3 (text) and Phi-3 families, which covers SmolLM, TinyLlama
and everything else saved under those types. Any other model, and any option this forward does not compute (a mixture of
experts, a length-dependent rotary base, ...), raises EngineUnsupported with the reason, and the reference engine takes over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_portable.errors import EngineUnsupported

GEMMA = ("gemma", "gemma2", "gemma3_text")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", *GEMMA)
ROTARY = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Shape:
    """Constants of one model's forward; hashable, so that compiled code can treat them as fixed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    scaling: float  # of the attention scores
    activation: str  # silu | gelu | gelu_tanh
    norm_offset: float  # 1 where a norm multiplies by 1 + weight
    embed_scale: float
    attn_softcap: float | None
    logit_softcap: float | None
    windows: tuple[int | None, ...]  # per layer: keys a query may look back on, itself included
    rotary: tuple[str, ...]  # per layer: which rotary table
    context: int  # positions the model was made for

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Block:
    """The modules of one decoder layer. Several modules in `qkv` or `gate_up` stand for one product, in that order."""

    norm_in: Any
    norm_attn_out: Any | None  # Gemma 2 and 3: on the attention's output, before the residual sum
    norm_mlp: Any
    norm_mlp_out: Any | None
    norm_q: Any | None  # over each head
    norm_k: Any | None
    qkv: tuple[Any, ...]
    out: Any
    gate_up: tuple[Any, ...]
    down: Any


@dataclass(frozen=True)
class Family:
    shape: Shape
    embed: Any
    blocks: tuple[Block, ...]
    norm: Any
    head: Any
    rotary: Any

    def rotary_tables(
        self, length: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Cosine and signed sine of every position below `length`, each [length, rotated dims], by table name.

        They are the model's own numbers; the sine of the first half is negated, which spares every step the negation.
        """
        positions = torch.arange(length, device=device)[None]
        like = torch.empty(0, device=device, dtype=dtype)
        tables = {}
        for name in set(self.shape.rotary):
            cos, sin = self.rotary(like, positions, name) if name else self.rotary(like, positions)
            half = sin.shape[-1] // 2
            tables[name] = (cos[0].contiguous(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1))
        return tables


def unwrap(policy: Any) -> nn.Module:
    """The transformers model inside a PEFT, DDP or compiled wrapper."""
    model: Any = policy
    for _ in range(8):
        if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            break
    return model


def active(module: Any) -> Any:
    """The module that computes: for PEFT's `modules_to_save` wrapper the trained copy in use, else the module itself."""
    saved = getattr(module, "modules_to_save", None)
    if saved is None or not hasattr(module, "original_module"):
        return module
    names = [] if getattr(module, "disable_adapters", False) else list(module.active_adapters)
    return saved[names[0]] if names and names[0] in saved else module.original_module


def read(policy: Any) -> Family:
    """The model's Family; EngineUnsupported when this forward would not compute what the module computes."""
    model: Any = unwrap(policy)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or kind not in FAMILIES:
        raise EngineUnsupported(
            f"the portable engine does not know the model type `{kind}`", help="the reference engine runs it"
        )
    inner = getattr(model, "model", None)
    if inner is None or not hasattr(inner, "layers") or not hasattr(model, "lm_head"):
        raise EngineUnsupported(
            f"`{type(model).__name__}` is not a causal language model as the portable engine knows them"
        )
    blocks = tuple(_block(layer, kind) for layer in inner.layers)
    return Family(
        shape=_shape(config, kind, active(inner.embed_tokens).weight.shape[0], len(blocks)),
        embed=inner.embed_tokens,
        blocks=blocks,
        norm=inner.norm,
        head=model.lm_head,
        rotary=inner.rotary_emb,
    )


def _shape(config: Any, kind: str, vocab: int, layers: int) -> Shape:
    if getattr(config, "use_bidirectional_attention", None):
        raise EngineUnsupported("this model attends in both directions")
    gemma = kind in GEMMA
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or _types_of_old_configs(config, kind, layers)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise EngineUnsupported(f"the portable engine does not know layers of type `{sorted(unknown)[0]}`")
    scalar = getattr(config, "query_pre_attn_scalar", None) if kind in ("gemma2", "gemma3_text") else None
    return Shape(
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        vocab=vocab,
        eps=config.rms_norm_eps,
        scaling=(scalar or head_dim) ** -0.5,
        activation=_activation(config),
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=config.hidden_size**0.5 if gemma else 1.0,
        attn_softcap=_softcap(config),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        windows=tuple(config.sliding_window if t == "sliding_attention" else None for t in types),
        rotary=_rotary_names(config, types),
        context=config.max_position_embeddings,
    )


def _softcap(config: Any) -> float | None:
    """The cap on attention scores. Where the policy runs through sdpa its own forward leaves the cap out (transformers before
    5.24 lets Gemma 2 do so), and a rollout must sample from the policy that is trained."""
    cap = getattr(config, "attn_logit_softcapping", None)
    return None if getattr(config, "_attn_implementation", None) == "sdpa" else cap


def _types_of_old_configs(config: Any, kind: str, layers: int) -> list[str]:
    """Mistral and Phi-3 have one window for all layers and name no layer types."""
    slides = kind in ("mistral", "phi3") and getattr(config, "sliding_window", None)
    return ["sliding_attention" if slides else "full_attention"] * layers


def _rotary_names(config: Any, types: list[str]) -> tuple[str, ...]:
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = any(isinstance(value, dict) for value in parameters.values())
    for one in parameters.values() if per_layer else [parameters]:
        rope = one.get("rope_type", "default") if isinstance(one, dict) else "default"
        if rope not in ROTARY:
            raise EngineUnsupported(
                f"rotary positions of type `{rope}` change with the length", help="the reference engine runs it"
            )
    return tuple(types) if per_layer else ("",) * len(types)


def _activation(config: Any) -> str:
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    if name not in known:
        raise EngineUnsupported(f"the portable engine does not know the activation `{name}`")
    return known[name]


def _block(layer: Any, kind: str) -> Block:
    attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
    if mlp is None or not hasattr(mlp, "down_proj"):
        raise EngineUnsupported("this model's layers hold no plain gated MLP")
    fused = kind == "phi3"
    doubled = hasattr(layer, "pre_feedforward_layernorm")
    return Block(
        norm_in=layer.input_layernorm,
        norm_attn_out=layer.post_attention_layernorm if doubled else None,
        norm_mlp=layer.pre_feedforward_layernorm if doubled else layer.post_attention_layernorm,
        norm_mlp_out=layer.post_feedforward_layernorm if doubled else None,
        norm_q=getattr(attention, "q_norm", None),
        norm_k=getattr(attention, "k_norm", None),
        qkv=(attention.qkv_proj,) if fused else (attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if fused else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
    )
