"""A Llama of two layers and a tokenizer of bytes-like words, made from nothing: no download, no licence, a second's work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_VOCABULARY = 512
_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # a head size every attention backend knows
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}


def tiny_shape() -> dict[str, Any]:
    """The model's configuration, as `LlamaConfig` takes it."""
    return {k: v for k, v in _SHAPE.items() if k not in ("architectures", "model_type", "torch_dtype")}


def save_tiny_llama(folder: Path) -> Path:
    """Writes config.json and a tokenizer into `folder` (no weights: load them as dummies) and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["<s>", "</s>", "<unk>", *(f"{n}" for n in range(_VOCABULARY - 3))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": w, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for i, w in enumerate(words[:3])
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "<unk>"},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "model_max_length": 512,
    }
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
