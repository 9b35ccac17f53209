"""Weights and tokenizer → one GGUF file in f16 or q8_0, for the Llama and Qwen families, written tensor by tensor.

Names and keys are llama.cpp's, from the `gguf` package. Matrices get the file's type, vectors stay float32; queries and keys of
Llama are permuted to llama.cpp's order of rotary pairs, and Llama 3's frequency factors become a tensor. What is not
known here is refused with the name of the tool that knows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_portable.errors import ExportError
from grpo_portable.export.gguf_tokens import Vocabulary

CONVERTER = "export with --to merged, then run llama.cpp's convert_hf_to_gguf.py on that folder"
FLOAT16_MAX = 65_504.0


@dataclass(frozen=True)
class Family:
    """How llama.cpp keeps one model type: its architecture, and whether queries and keys are permuted."""

    arch: str
    permuted: bool


FAMILIES = {
    "llama": Family("llama", True),
    "mistral": Family("llama", True),
    "qwen2": Family("qwen2", False),
    "qwen3": Family("qwen3", False),
}

# every call yields (transformers' name, float32 tensor) again, in order
Tensors = Callable[[], Iterable[tuple[str, Any]]]


def family_of(config: Any) -> Family:
    """The family of a configuration; ExportError for one that is not written here."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ExportError(
            f"models of type `{config.model_type}` are not written to GGUF here",
            because=f"names and metadata are known for {', '.join(FAMILIES)}",
            help=CONVERTER,
        )
    if getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", config.model_type == "mistral"
    ):
        raise ExportError("a sliding attention window is not written to GGUF here", help=CONVERTER)
    return family


def write(
    file: Path,
    config: Any,
    tensors: Tensors,
    vocabulary: Vocabulary,
    *,
    kind: str,
    name: str,
    chat_template: str | None,
    turn_end: int | None = None,
) -> None:
    """Write the file. `kind` is f16 or q8_0; `name` is for people; `turn_end` ends an answer beside the end token."""
    import gguf

    family = family_of(config)
    writer = gguf.GGUFWriter(file, family.arch)
    factors = frequency_factors(config)
    try:
        _metadata(writer, config, name, kind)
        _tokens(writer, vocabulary, chat_template, turn_end)
        _declare(writer, config, family, tensors(), factors, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for hf_name, tensor in tensors():
            writer.write_tensor_data(_stored(hf_name, tensor, config, family, kind))
    except BaseException:
        writer.close()
        file.unlink(missing_ok=True)  # a part of a file would be taken for one
        raise
    writer.close()


def _declare(
    writer: Any, config: Any, family: Family, tensors: Iterable[tuple[str, Any]], factors: np.ndarray | None, kind: str
) -> None:
    """Name, shape and type of every tensor, in the order in which they are written; ExportError for one without a name."""
    import gguf

    names = gguf.get_tensor_name_map(_arch(family), config.num_hidden_layers)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for hf_name, tensor in tensors:
        shape = tuple(tensor.shape)
        target = _type(shape, kind)
        if target == gguf.GGMLQuantizationType.Q8_0:
            stored = gguf.quant_shape_to_byte_shape(shape, target)
            size = math.prod(stored)
            writer.add_tensor_info(_named(names, hf_name), stored, np.dtype(np.uint8), size, raw_dtype=target)
        else:
            dtype = np.dtype(np.float16 if target == gguf.GGMLQuantizationType.F16 else np.float32)
            writer.add_tensor_info(_named(names, hf_name), shape, dtype, math.prod(shape) * dtype.itemsize)


def _stored(hf_name: str, tensor: Any, config: Any, family: Family, kind: str) -> np.ndarray:
    """A tensor as the file holds it: permuted where the family asks for it, in its type. ExportError beyond float16's range."""
    import gguf

    data = tensor.cpu().contiguous().numpy()
    if family.permuted and hf_name.endswith(("q_proj.weight", "q_proj.bias")):
        data = permuted(data, config.num_attention_heads)
    elif family.permuted and hf_name.endswith(("k_proj.weight", "k_proj.bias")):
        data = permuted(data, config.num_key_value_heads)
    target = _type(tuple(data.shape), kind)
    if target == gguf.GGMLQuantizationType.F16 and float(np.abs(data).max(initial=0.0)) > FLOAT16_MAX:
        raise ExportError(
            f"`{hf_name}` holds numbers beyond float16's range", help="take --quantize q8_0, or --to merged"
        )
    return gguf.quantize(data, target)


def permuted(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered from halves (transformers: x1..xn, y1..yn) to pairs (llama.cpp: x1, y1, x2, y2, ...)."""
    halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)


def frequency_factors(config: Any) -> np.ndarray | None:
    """Llama 3's divisors of the rotary frequencies (head_dim / 2,), None for plain ones; other scalings are refused."""
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "linear"):
        return None
    if kind != "llama3":
        raise ExportError(f"rotary scaling `{kind}` is not written to GGUF here", help=CONVERTER)
    dim, base = _head_dim(config), float(_theta(config))
    frequencies = 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    lengths = 2 * math.pi / frequencies
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    old = float(rope["original_max_position_embeddings"])
    smooth = (old / lengths - low) / (high - low)
    between = 1.0 / ((1.0 - smooth) / factor + smooth)
    divisors = np.where(lengths < old / high, 1.0, np.where(lengths > old / low, factor, between))
    return divisors.astype(np.float32)


def _metadata(writer: Any, config: Any, name: str, kind: str) -> None:
    import gguf

    head_dim = _head_dim(config)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_theta(config)))
    rope = _rope(config)
    if (rope.get("rope_type") or rope.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _tokens(writer: Any, vocabulary: Vocabulary, chat_template: str | None, turn_end: int | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    writer.add_token_merges(list(vocabulary.merges))
    for add, token in (
        (writer.add_bos_token_id, vocabulary.bos),
        (writer.add_eos_token_id, vocabulary.eos),
        (writer.add_pad_token_id, vocabulary.pad),
        (writer.add_unk_token_id, vocabulary.unknown),
        (writer.add_eot_token_id, turn_end if turn_end != vocabulary.eos else None),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    if chat_template:
        writer.add_chat_template(chat_template)


def _type(shape: tuple[int, ...], kind: str) -> Any:
    """Matrices in the file's type (f16 where a row is no whole number of q8_0's blocks), vectors in float32."""
    import gguf

    types = gguf.GGMLQuantizationType
    if len(shape) < 2:
        return types.F32
    return types.Q8_0 if kind == "q8_0" and shape[-1] % 32 == 0 else types.F16


def _named(names: Any, hf_name: str) -> str:
    found = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ExportError(f"weight `{hf_name}` has no name in GGUF", help=CONVERTER)
    return found


def _arch(family: Family) -> Any:
    import gguf

    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _theta(config: Any) -> float:
    return _rope(config).get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0
