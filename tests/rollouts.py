"""Random models of every family, prompts and comparisons for the tests of rollout engines."""

from __future__ import annotations

import random
from typing import Any

import torch

from grpo_portable.rollout.protocol import Completion

VOCAB = 211
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide, so that logits spread and a wrong detail changes tokens
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama with scaled rotary": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "phi3": {"partial_rotary_factor": 0.5},
}


def model(family: str = "qwen3", dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> Any:
    """A random model on the CPU; norms and biases are random too, so that none of them can be forgotten unnoticed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**BASE, **FAMILIES[family], **changes}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(settings.pop("model_type", family), **settings)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.to(dtype)


def with_lora(made: Any, **settings: Any) -> Any:
    """The model with an adapter that already does something."""
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(made, LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **settings}))
    disturb(policy, 0.05)
    return policy


def disturb(policy: Any, size: float, seed: int = 5) -> None:
    """A stand-in for an update: every trainable weight moves."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=draw) * size).to(parameter))


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB) for _ in range(length)] for length in lengths]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


@torch.no_grad()
def logprobs(policy: Any, prompt: list[int], completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [T] of a completion's tokens by the policy's own forward."""
    device = next(policy.parameters()).device
    ids = torch.tensor([[*prompt, *completion.token_ids]], device=device)
    logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    if temperature > 0:
        logits = logits / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
