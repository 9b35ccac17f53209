"""Shapes: counts against published ones and against transformers, names as people write them, files whole and torn."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.shape_files import no_model, shape_from_config, shape_from_gguf
from doctor.shapes import Shape, count, known_models, shape_of, size_in


@pytest.mark.parametrize("model", known_models())
def test_the_published_count_follows_from_the_dimensions(model: str) -> None:
    shape = shape_of(model)
    assert shape is not None and shape.basis == "table" and not shape.estimated
    assert count(shape) == shape.params


@pytest.mark.parametrize(
    ("model", "rank", "trainable"),
    [
        ("Qwen/Qwen3-8B", 32, 87_293_952),
        ("Qwen/Qwen3-8B", 16, 43_646_976),
        ("unsloth/Llama-3.2-1B-Instruct-FP8-Block", 32, 22_544_384),
    ],
)
def test_adapter_counts_of_published_runs(model: str, rank: int, trainable: int) -> None:
    shape = shape_of(model)
    assert shape is not None and shape.adapter_params(rank) == trainable


@pytest.mark.parametrize(
    ("name", "params", "basis", "stored"),
    [
        ("Qwen/Qwen3-4B", 4_022_468_096, "table", None),
        ("qwen3-4b", 4_022_468_096, "table", None),
        ("unsloth/Qwen3-8B-FP8", 8_190_735_360, "table", "fp8"),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096, "table", None),
        ("Qwen/Qwen3-4B-Thinking-2507-FP8", 4_022_468_096, "table", "fp8"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", 8_030_261_248, "table", "nf4"),
        ("unsloth/mistral-7b-instruct-v0.3-bnb-4bit", 7_248_023_552, "table", "nf4"),
        ("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616, "table", None),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 7_615_616_512, "table", "int4"),
        ("google/gemma-3-1b-it", 999_885_952, "table", None),
        ("microsoft/Phi-4-mini-instruct", 3_836_021_760, "table", None),
        ("someone/Qwen3-4B-GSM8K-GRPO", 4_022_468_096, "similar name", None),
        ("someone/brand-new-13B", 13_000_000_000, "size in the name", None),
        ("someone/tiny-135m", 135_000_000, "size in the name", None),
        ("Qwen/Qwen3.5-9B", 9_000_000_000, "size in the name", None),
    ],
)
def test_names(name: str, params: int, basis: str, stored: str | None) -> None:
    shape = shape_of(name)
    assert shape is not None and (shape.params, shape.basis, shape.stored) == (params, basis, stored)
    assert shape.name == name and shape.estimated == (basis != "table")


@pytest.mark.parametrize(
    "name", [None, "", "   ", "gpt2", "./nowhere", "/no/such/7B", "a\0b", "~0", "x" * 5000, "bert-base"]
)
def test_what_cannot_be_known_is_none(name: str | None) -> None:
    assert shape_of(name) is None


@pytest.mark.parametrize(
    ("name", "params"), [("8x7B", 46_480_000_000), ("30B-A3B", 30e9), ("1.5b", 1.5e9), ("v0.1", None), ("int8b4", None)]
)
def test_sizes_in_names(name: str, params: float | None) -> None:
    assert size_in(name) == params


@given(st.text(max_size=60))
def test_no_name_breaks_it(name: str) -> None:
    shape = shape_of(name)
    assert shape is None or shape.params > 0


@pytest.mark.parametrize("params", [2_000_000, 60_000_000, 900_000_000, 13_000_000_000, 405_000_000_000])
def test_a_guess_has_the_size_it_was_guessed_from(params: int) -> None:
    shape = (
        shape_of(f"made-up-{params // 1_000_000}m") if params < 1e9 else shape_of(f"made-up-{params // 1_000_000_000}b")
    )
    assert shape is not None and shape.estimated and shape.params == params
    assert 0 <= shape.linear_params <= params


def _tiny(kind: str, **more: Any) -> dict[str, Any]:
    size = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 130, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {"model_type": kind, **size, **more}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3"]
)
def test_counts_agree_with_transformers_and_peft(kind: str, tied: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model(**_tiny(kind, tie_word_embeddings=tied))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shape = shape_of(str(tmp_path))
    assert shape is not None and shape.basis == "config"
    assert shape.params == sum(p.numel() for p in model.parameters())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert shape.adapter_params(4) == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)


def test_mixture_of_experts_counts_agree_with_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        **_tiny("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False)
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(str(tmp_path))
    assert shape is not None and shape.params == sum(p.numel() for p in model.parameters())
    assert shape.active_params < shape.params


def test_a_multi_modal_config_gives_its_text_model() -> None:
    text = _tiny("gemma3_text", tie_word_embeddings=True)
    shape = shape_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "x")
    assert shape is not None and (shape.hidden, shape.norms, shape.qk_norm) == (64, 4, True)


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "float"}}}}, "fp8"),
        ({"quant_method": "gptq"}, "int4"),
        ({"quant_method": "something"}, None),
        ("nonsense", None),
    ],
)
def test_stored_kind_from_a_config(quantization: Any, stored: str | None) -> None:
    shape = shape_from_config({**_tiny("llama"), "quantization_config": quantization}, "x")
    assert shape is not None and shape.stored == stored


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"hidden_size": "many"}',
        '{"hidden_size": -1, "num_hidden_layers": 3}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_broken_config_is_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert shape_of(str(tmp_path)) is None


_CONFIG = '{"model_type": "llama"}'
_WEIGHTS = {"config.json": _CONFIG, "model.safetensors": "x"}


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("model", {**_WEIGHTS, "tokenizer.json": "{}"}, None),
        ("model", {**_WEIGHTS, "tokenizer.model": "x"}, None),
        ("model", {**_WEIGHTS, "vocab.json": "{}", "merges.txt": ""}, None),
        ("model", {**_WEIGHTS, "qwen.tiktoken": "x"}, None),
        ("model", {**_WEIGHTS, "spiece.model": "x"}, None),
        ("model", {**_WEIGHTS, "config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, None),
        ("model", {**_WEIGHTS, "generation_config.json": "{}"}, "a model without its tokenizer"),
        ("model/a.gguf", {"a.gguf": "x"}, None),
        ("embedded", {"note.txt": "x"}, None),  # the built-in model, whatever lies here
        ("Qwen/Qwen3-4B", {}, None),
        ("model", {"config.json": _CONFIG}, "there is no *.safetensors in it"),
        ("model", {"config.json": "{", "model.safetensors": "x"}, "its config.json cannot be read"),
        ("model", {"config.json": "[]", "model.safetensors": "x"}, "holds no object"),
        ("model", {"adapter_config.json": "{}"}, "it is an adapter's: name its base model"),
        ("model", {"a.gguf": "x"}, "name the GGUF file: model/a.gguf"),
        ("model/note.txt", {"note.txt": "7B"}, "is a file, but not a GGUF file"),
        ("~nobody-of-this-name/model", {}, "is not there"),
        ("x" * 5000, {}, "is not there"),
    ],
)
def test_what_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, str], words: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("embedded" if name == "embedded" else "model")
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text)
    found = no_model(name)
    assert found is None if words is None else words in str(found)


def test_a_folder_without_a_model_is_unknown(tmp_path: Path) -> None:
    assert shape_of(str(tmp_path)) is None
    (tmp_path / "note.txt").write_text("7B")
    assert shape_of(str(tmp_path / "note.txt")) is None


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _gguf() -> bytes:
    """A GGUF 3 header of a tied Llama of 2 blocks, hidden 8, vocabulary 5."""
    numbers = {"embedding_length": 8, "block_count": 2, "attention.head_count": 2, "attention.head_count_kv": 1,
               "feed_forward_length": 12}  # fmt: skip
    pairs = [_text("general.architecture") + struct.pack("<I", 8) + _text("llama")]
    pairs += [_text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    pairs.append(_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 5) + b"".join(map(_text, "abcde")))
    pairs.append(_text("tokenizer.ggml.scores") + struct.pack("<IIQ5f", 9, 6, 5, *range(5)))
    tensors = {"token_embd.weight": (8, 5), "output_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8)}
    infos = b"".join(
        _text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 0, 0)
        for name, dims in tensors.items()
    )
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + infos


def test_gguf_header(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(_gguf())
    shape = shape_of(str(file))
    whole = shape_from_gguf(file)
    assert shape is not None and whole is not None and shape == replace(whole, name="model.gguf")
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (8, 2, 2, 1, 4)
    assert (shape.vocab, shape.tied, shape.params, shape.basis) == (5, True, 8 * 5 + 8 + 64, "gguf")


@settings(max_examples=60)
@given(end=st.integers(0, len(_gguf()) - 1), at=st.integers(0, len(_gguf()) - 1), byte=st.integers(0, 255))
def test_a_torn_or_altered_gguf_never_breaks_it(
    tmp_path_factory: pytest.TempPathFactory, end: int, at: int, byte: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "torn.gguf"
    file.write_bytes(_gguf()[:end])
    assert shape_of(str(file)) is None
    whole = bytearray(_gguf())
    whole[at] = byte
    file.write_bytes(bytes(whole))
    found = shape_of(str(file))
    assert found is None or isinstance(found, Shape)
