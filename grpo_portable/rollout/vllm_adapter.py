"""What a vLLM engine is handed of a policy: its adapter as a LoRA folder, or its weights, and reasons to refuse it.

Torch only; nothing here needs vLLM. An adapter is never merged into the engine's weights: a small update would be rounded
away on quantised ones. Its scale (alpha/r, or alpha/sqrt(r) for rsLoRA, arXiv 2312.03732) is folded into B in float32 and
rounded once, so the folder always declares the scale 1 and nobody has to agree on what a scale is made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_portable.combinations import vllm_refusal
from grpo_portable.errors import EngineUnsupported
from grpo_portable.rollout import delta
from grpo_portable.rollout.vllm_settings import Layout


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors by the name peft would save them under."""

    tensors: Mapping[str, torch.Tensor]
    layout: Layout

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def base_of(policy: Any) -> Any:
    """The transformers model inside a policy, adapter layers and all."""
    model = getattr(policy, "module", policy)
    return model.get_base_model() if hasattr(model, "peft_config") else model


def context(policy: Any) -> int:
    """The most tokens of prompt and answer together that the policy was made for."""
    config = base_of(policy).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or 1 << 30


def vocabulary(policy: Any) -> int:
    """Rows of the policy's input embedding."""
    return int(base_of(policy).get_input_embeddings().weight.shape[0])


def refusal(policy: Any, *, fp8: bool) -> str | None:
    """Why vLLM cannot sample from this policy, None when it can."""
    adapted = [m for m in base_of(policy).modules() if hasattr(m, "lora_A")]
    rank = max((sum(m.lora_A[name].weight.shape[0] for name in m.lora_A) for m in adapted), default=0)
    learns = any(p.requires_grad for p in policy.parameters())
    dora = any(len(getattr(m, "lora_magnitude_vector", ()) or ()) for m in adapted)
    if unserved := vllm_refusal(rank, dora=dora, fp8=fp8 and learns):
        return unserved.because
    if not adapted:
        return None
    inside = {id(p) for m in adapted for part in (m.lora_A, m.lora_B) for p in part.parameters()}
    others = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in inside]
    if others:
        return f"vLLM serves adapters only, and `{others[0]}` is trained beside one"
    for module in adapted:
        if any(getattr(layer, "bias", None) is not None for layer in module.lora_B.values()):
            return "vLLM serves no adapters with a bias"
        variants = {type(v).__name__ for v in (getattr(module, "lora_variant", None) or {}).values() if v is not None}
        if variants:
            return f"vLLM does not know adapters of kind `{sorted(variants)[0]}`"
    return None


def layout(policy: Any) -> Layout | None:
    """The layout of the policy's active adapter, None when it has none."""
    adapted = [(name, m, delta.adapters_of(m)) for name, m in base_of(policy).named_modules()]
    ranks = [sum(m.lora_A[n].weight.shape[0] for n in names) for _, m, names in adapted if names]
    return (
        Layout(max(ranks), tuple(sorted({p.rpartition(".")[2] for p, _, names in adapted if names}))) if ranks else None
    )


@torch.no_grad()
def adapter(policy: Any, dtype: torch.dtype) -> Adapter:
    """The policy's active adapter now, A and scaled B in `dtype` on the host. Several active ones are put side by side."""
    known = layout(policy)
    if known is None:
        raise EngineUnsupported("the policy has no active adapter", because="there is no LoRA to hand over")
    tensors: dict[str, torch.Tensor] = {}
    for path, module in base_of(policy).named_modules():
        if names := delta.adapters_of(module):
            first = torch.cat([module.lora_A[n].weight.float() for n in names], 0)
            second = torch.cat([module.lora_B[n].weight.float() * float(module.scaling[n]) for n in names], 1)
            tensors[f"base_model.model.{path}.lora_A.weight"] = first.to(dtype).cpu().contiguous()
            tensors[f"base_model.model.{path}.lora_B.weight"] = second.to(dtype).cpu().contiguous()
    return Adapter(tensors, known)


def write(given: Adapter, folder: Path) -> Path:
    """The adapter as a folder in peft's format, with the scale 1."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(dict(given.tensors), folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": given.layout.rank,
        "lora_alpha": given.layout.rank,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "target_modules": list(given.layout.modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def weights(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every base weight under its checkpoint's name: adapter layers are left out, ties given once."""
    seen: set[int] = set()
    for name, tensor in base_of(policy).state_dict().items():
        if ".lora_" in name or tensor.data_ptr() in seen:
            continue
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise EngineUnsupported(
                f"`{name}` is stored in fewer than 16 bits",
                because="only the model's own folder could be given to vLLM",
            )
        seen.add(tensor.data_ptr())
        yield name.replace(".base_layer.", "."), tensor.detach()


def export(policy: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> Path:
    """The policy's base as a folder that vLLM can read: config.json, safetensors in `dtype`, tokenizer."""
    import copy

    from safetensors.torch import save_file

    base = base_of(policy)
    config = copy.deepcopy(base.config)
    for stale in ("quantization_config", "_name_or_path"):
        if hasattr(config, stale):
            delattr(config, stale)
    config.architectures, config.dtype = [type(base).__name__], dtype
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    named = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in weights(policy)}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder
