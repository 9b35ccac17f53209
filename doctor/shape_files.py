"""Is a model there, and its shape, read from local files: config.json or a GGUF header. Nothing is loaded but the header.

A file that cannot be read, or that says something impossible, gives None: the shape is then unknown, which is a fact too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from doctor.shapes import BUILT_IN, Shape, count

MAX_CONFIG_BYTES = 8 << 20
_ALIASES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
}
# What any tokenizer of transformers or a model's own library is kept in.
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.spm", "merges.txt", "dict.txt", "*.codes", "tekken.json")
_QK_NORM = ("qwen3", "gemma3")
_TIED_BY_DEFAULT = ("gemma", "smollm3", "gpt2")


def shape_from_path(path: Path) -> Shape | None:
    """The shape of a model folder or a GGUF file, or None."""
    try:
        if path.is_file():
            return shape_from_gguf(path) if path.suffix.lower() == ".gguf" else None
        return shape_from_config(_json(path / "config.json"), str(path))
    except (OSError, ValueError, RecursionError):
        return None


class NoModel(NamedTuple):
    """Why a name leads to no model, and what helps."""

    fact: str
    because: str | None
    help: str

    def __str__(self) -> str:
        return f"{self.fact}{f', because {self.because}' if self.because else ''}; {self.help}"


def no_model(name: str) -> NoModel | None:
    """Why a name that can only be a local path, or is one, leads to no model, as far as names and its configuration tell.

    None for a model, and for a name that the hub may know. Training asks the same before it loads anything.
    """
    if name == BUILT_IN.name:
        return None
    missing = NoModel(f"model `{name}` is not there", None, "check the path; models of the hub are named owner/name")
    try:
        path = Path(name).expanduser()
        if path.is_file():
            file = NoModel(f"`{name}` is a file, but not a GGUF file", None, "give the model's folder")
            return None if path.suffix.lower() == ".gguf" else file
        if path.is_dir():
            if because := _no_model_in(path):
                return NoModel(f"folder `{name}` holds no model", because, _instead(path))
            return None if _has_tokenizer(path) else _no_tokenizer(name)
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL, or of a user that is not there
        return missing
    return missing if name.startswith((".", "/", "~")) or name.lower().endswith(".gguf") else None


def _no_model_in(folder: Path) -> str | None:
    try:
        _json(folder / "config.json")
    except FileNotFoundError:
        return "there is no config.json in it"
    except (OSError, ValueError, RecursionError) as error:
        return f"its config.json cannot be read: {error}"
    return None if any(folder.glob("*.safetensors")) else "there is no *.safetensors in it"


def _has_tokenizer(folder: Path) -> bool:
    """Whether files of one are there, or the configuration names its class: some read bytes and need no file."""
    named = _json(folder / "config.json").get("tokenizer_class")
    return bool(named) or any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern))


def _no_tokenizer(name: str) -> NoModel:
    because = "there is no tokenizer.json, tokenizer.model or vocab.json in it"
    help = "copy the tokenizer's files there from the model it was made of: tokenizer.json and tokenizer_config.json"
    return NoModel(f"folder `{name}` holds a model without its tokenizer", because, help)


def _instead(folder: Path) -> str:
    if files := sorted(folder.glob("*.gguf")):
        return f"name the GGUF file: {files[0]}"
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter's: name its base model"
    return "a model's folder holds config.json, *.safetensors and the tokenizer's files"


def _json(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as file:
        raw = json.loads(file.read(MAX_CONFIG_BYTES).decode("utf-8"))
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} holds no object")
    return raw


def shape_from_config(config: Mapping[str, Any], name: str) -> Shape | None:
    """The shape a transformers config.json describes; a multi-modal one's text model. None when a dimension is missing."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    kind = str(text.get("model_type") or config.get("model_type") or "")
    sizes = {key: _first(text, names) for key, names in _ALIASES.items()}
    hidden, layers, heads, vocab = (sizes[k] for k in ("hidden", "layers", "heads", "vocab"))
    if not (hidden and layers and heads and vocab):
        return None
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    shape = Shape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=_whole(text.get("head_dim")) or max(1, hidden // heads),
        intermediate=sizes["intermediate"] or 4 * hidden,
        vocab=vocab,
        tied=tied if isinstance(tied, bool) else kind.startswith(_TIED_BY_DEFAULT),
        params=0,
        qk_norm=kind.startswith(_QK_NORM),
        qkv_bias=kind.startswith("qwen2") or text.get("attention_bias") is True,
        norms=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        fused=kind in ("phi3", "phi4"),
        experts=_first(text, ("num_experts", "num_local_experts", "n_routed_experts")) or 0,
        experts_per_token=_whole(text.get("num_experts_per_tok")) or 0,
        moe_intermediate=_whole(text.get("moe_intermediate_size")) or sizes["intermediate"] or 0,
        stored=_stored(config.get("quantization_config")),
        basis="config",
    )
    return replace(shape, params=count(shape))


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((n for n in (_whole(values.get(name)) for name in names) if n), None)


def _whole(value: Any) -> int | None:
    """A positive whole number small enough to be a dimension, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _stored(config: Any) -> str | None:
    if not isinstance(config, Mapping):
        return None
    method = str(config.get("quant_method", "")).lower()
    if method == "bitsandbytes":
        return "nf4" if config.get("load_in_4bit") or config.get("_load_in_4bit") else None
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method == "compressed-tensors":
        return "fp8" if "float" in json.dumps(config, default=str) else "int4"
    return "int4" if method in ("awq", "gptq") else None


# GGUF, versions 2 and 3: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_TEXT, _MAX_ITEMS = 1 << 24, 1 << 22


def shape_from_gguf(path: Path) -> Shape | None:
    """The shape in a GGUF file's header; `params` is the sum over its tensors. None when the header is torn or unknown."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "I") not in (2, 3):
                return None
            tensors, pairs = _number(file, "Q"), _number(file, "Q")
            if tensors > 1 << 20 or pairs > 1 << 20:
                return None
            values = {}
            for _ in range(pairs):
                key = _text(file)
                values[key] = _value(file, _number(file, "I"))
            sizes = dict(_tensor(file) for _ in range(tensors))
    except (OSError, ValueError, struct.error, OverflowError, MemoryError):
        return None
    return _gguf_shape(str(path), values, sizes)


def _gguf_shape(name: str, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Shape | None:
    kind = str(values.get("general.architecture", ""))

    def at(key: str) -> int | None:
        return _whole(values.get(f"{kind}.{key}"))

    hidden, layers, heads = at("embedding_length"), at("block_count"), at("attention.head_count")
    vocab = at("vocab_size") or _whole(values.get("tokenizer.ggml.tokens"))
    if not (hidden and layers and heads and vocab):
        return None
    shape = Shape(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=at("attention.head_count_kv") or heads,
        head_dim=at("attention.key_length") or max(1, hidden // heads),
        intermediate=at("feed_forward_length") or 4 * hidden,
        vocab=vocab,
        tied="output.weight" not in sizes,
        params=sum(sizes.values()),
        qk_norm=any(key.endswith("attn_q_norm.weight") for key in sizes),
        qkv_bias=any(key.endswith("attn_q.bias") for key in sizes),
        norms=4 if kind in ("gemma2", "gemma3") else 2,
        fused=any(key.endswith("attn_qkv.weight") for key in sizes),
        experts=at("expert_count") or 0,
        experts_per_token=at("expert_used_count") or 0,
        moe_intermediate=at("expert_feed_forward_length") or 0,
        basis="gguf",
    )
    return shape if shape.params else replace(shape, params=count(shape))


def _number(file: BinaryIO, code: str) -> Any:
    size = struct.calcsize("<" + code)
    return struct.unpack("<" + code, file.read(size))[0]


def _text(file: BinaryIO) -> str:
    length = _number(file, "Q")
    if length > _MAX_TEXT:
        raise ValueError("a text longer than any header's")
    raw = file.read(length)
    if len(raw) != length:
        raise ValueError("the header ends early")
    return raw.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A metadata value; of an array only its length is kept (the vocabulary's size is all that is wanted of it)."""
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        return _number(file, _SCALARS[kind]) if kind in _SCALARS else _unknown(kind)
    inner, length = _number(file, "I"), _number(file, "Q")
    if length > _MAX_ITEMS:
        raise ValueError("an array longer than any header's")
    if inner in _SCALARS:
        file.seek(length * struct.calcsize("<" + _SCALARS[inner]), 1)
    else:
        for _ in range(length):
            _value(file, inner)
    return length


def _unknown(kind: int) -> Any:
    raise ValueError(f"value type {kind} is not in GGUF 3")


def _tensor(file: BinaryIO) -> tuple[str, int]:
    name, rank = _text(file), _number(file, "I")
    if rank > 8:
        raise ValueError("a tensor of more than 8 dimensions")
    size = 1
    for _ in range(rank):
        size *= _number(file, "Q")
    _number(file, "I"), _number(file, "Q")
    return name, size
