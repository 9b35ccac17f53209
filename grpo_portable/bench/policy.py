"""Random policies for the benches: a shape on a dense or a 4-bit base, with an adapter that already does something."""

from __future__ import annotations

from typing import Any

from grpo_portable.errors import UsageError

BASES = ("dense", "nf4")


def random_policy(config: Any, base: str, rank: int, seed: int, where: Any, dtype: Any) -> tuple[Any, list[str]]:
    """The policy and notes on what it is: frozen random weights and a float32 adapter of `rank` on every linear layer.

    `base`: `dense` weights in `dtype`, or `nf4` as the 4-bit path keeps them. Rank 0, or no PEFT: no adapter.
    UsageError for `nf4` without bitsandbytes.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False)
    if base == "nf4":
        _quantise(model, dtype)
    if not rank:
        return model, ["no adapter"]
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return model, ["no adapter: PEFT is not installed"]
    policy = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    return policy, [f"LoRA r={rank}"]


def _quantise(model: Any, dtype: Any) -> None:
    """Put each linear layer but the head into NF4 with quantised scales, in place: what `models.policy.load` asks
    bitsandbytes for, without a checkpoint on disk."""
    import torch

    try:
        import bitsandbytes as bnb
    except ImportError as missing:
        raise UsageError("a 4-bit base needs bitsandbytes", help="pip install bitsandbytes") from missing
    how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name.endswith("lm_head"):
            continue
        sizes = (module.in_features, module.out_features, module.bias is not None)
        four = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, device="meta", **how)
        packed: Any = bnb.nn.Params4bit(module.weight.data, requires_grad=False, **how)
        four.weight = packed.to(module.weight.device)  # which packs them
        four.bias = module.bias
        four.support_avx512bf16_for_cpu = False  # else an eval forward on some CPUs repacks the weight in place
        model.set_submodule(name, four)
    model.is_loaded_in_4bit = True  # PEFT asks the model, not the layer
