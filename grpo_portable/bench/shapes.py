"""What is measured: models of known sizes, and the completions of one rollout. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_portable.errors import UsageError

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
        "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 344, "vocab_size": 300, "max_position_embeddings": 1024,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """`prompts` x `group` completions; lengths are `new_tokens`, or spread evenly from `shortest` to it."""

    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 256
    shortest: int | None = None
    rows: int | None = None  # completions at once; None: all
    lora_rank: int = 32
    seed: int = 0

    @property
    def width(self) -> int:
        return self.rows or self.prompts * self.group

    def limits(self) -> list[int] | None:
        """The length of each completion, or None when all have `new_tokens`."""
        if self.shortest is None:
            return None
        import numpy as np

        draw = np.random.default_rng(self.seed)
        return draw.integers(self.shortest, self.new_tokens + 1, self.prompts * self.group).tolist()


def known(shape: str) -> dict[str, Any]:
    """The sizes of a shape, as transformers' configuration names them. UsageError for one that is not known."""
    if shape not in SHAPES:
        raise UsageError(f"there is no shape `{shape}`", help=f"one of: {', '.join(SHAPES)}")
    return SHAPES[shape]


def config_of(shape: str) -> Any:
    """transformers' configuration of a shape, without end and padding tokens. UsageError for a shape that is not known."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings = dict(known(shape))
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(kind, **settings, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]  # vLLM goes by it
    return config
