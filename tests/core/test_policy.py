"""The policy: loaded from what users have, with an adapter that leaves it as it was, and errors that say what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from grpo_portable.errors import ModelError, RecipeError
from grpo_portable.models import policy
from grpo_portable.recipe import Recipe

IDS = torch.tensor([[5, 9, 20, 33, 8, 41]])
RECIPE = replace(Recipe(), lora_rank=4, lora_alpha=8.0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("policy") / "model", hidden_size=64, intermediate_size=128)


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    loaded = policy.load(str(folder), dtype="float32")
    assert loaded.name == "model"
    assert torch.equal(logits(loaded.model), logits(tiny.model(hidden_size=64, intermediate_size=128)))
    assert not loaded.model.training
    assert loaded.tokenizer.pad_token_id == 0
    assert policy.load(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_tokenizer_without_a_pad_token_gets_its_end_token(folder: Path, tmp_path: Path) -> None:
    tiny.save(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(config))
    assert policy.load(str(tmp_path / "m"), dtype="float32").tokenizer.pad_token == "<eos>"


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}])
def test_a_fresh_adapter_changes_nothing_and_is_float32(folder: Path, kind: dict[str, Any]) -> None:
    loaded = policy.load(str(folder), dtype="bfloat16")
    before = logits(loaded.model)
    wrapped = policy.add_adapter(loaded.model, replace(RECIPE, **kind))
    torch.testing.assert_close(logits(wrapped), before, rtol=0.02, atol=0.02)
    assert {p.dtype for p in policy.trainable(wrapped).values()} == {torch.float32}


def test_counts_are_the_shapes_arithmetic(folder: Path) -> None:
    model = policy.add_adapter(policy.load(str(folder), dtype="float32").model, RECIPE)
    hidden, mlp, kv, layers, vocab = 64, 128, 32, 2, len(tiny.CHARACTERS) + 4
    q, k, v, o = (hidden + hidden), (hidden + kv), (hidden + kv), (hidden + hidden)
    trained = layers * 4 * (q + k + v + o + 3 * (hidden + mlp))
    base = vocab * hidden + hidden + layers * (2 * hidden + 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp)
    assert policy.counts(model) == (trained, base + trained)


def test_a_4_bit_model_counts_the_weights_it_stands_for(folder: Path) -> None:
    dense = policy.load(str(folder), dtype="float32")
    packed = policy.load(str(folder), dtype="float32", quantization="nf4")
    assert policy.counts(dense.model)[1] == policy.counts(packed.model)[1]
    linears = [m for m in packed.model.modules() if type(m).__name__ == "Linear4bit"]
    assert len(linears) == 14
    assert not any(getattr(m, "support_avx512bf16_for_cpu", False) for m in linears)


def test_bytes_of_weights_are_those_in_memory(folder: Path) -> None:
    """73,728 weights in 14 linear layers, 6,720 elsewhere; 4-bit ones have a scale a 64 (one byte) and three small tables."""
    dense = policy.add_adapter(policy.load(str(folder), dtype="bfloat16").model, RECIPE)
    assert policy.weight_bytes(dense) == (2 * (73_728 + 6_720), 4 * policy.counts(dense)[0])
    packed = policy.add_adapter(policy.load(str(folder), dtype="bfloat16", quantization="nf4").model, RECIPE)
    tables = 14 * 4 * (16 + 1 + 256)
    assert policy.weight_bytes(packed)[0] == 73_728 // 2 + 73_728 // 64 + tables + 2 * 6_720


def test_dora_on_4_bit_weights_is_the_same_before_and_after_an_evaluation(folder: Path) -> None:
    loaded = policy.load(str(folder), dtype="float32", quantization="nf4")
    wrapped = policy.add_adapter(loaded.model, replace(RECIPE, dora=True)).train()
    first = wrapped(input_ids=IDS).logits.detach()
    logits(wrapped.eval())
    torch.testing.assert_close(wrapped.train()(input_ids=IDS).logits.detach(), first)


def test_without_an_adapter_every_weight_is_free(folder: Path) -> None:
    model = policy.add_adapter(policy.load(str(folder), dtype="float32").model, replace(RECIPE, lora_rank=0))
    assert policy.counts(model)[0] == policy.counts(model)[1]


@pytest.mark.parametrize("rank", [4, 0])
def test_what_is_saved_comes_back(folder: Path, tmp_path: Path, rank: int) -> None:
    def fresh() -> Any:
        return policy.add_adapter(policy.load(str(folder), dtype="float32").model, replace(RECIPE, lora_rank=rank))

    model, other = fresh(), fresh()
    with torch.no_grad():
        for parameter in policy.trainable(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    policy.save(model, tmp_path / "saved", "owner/name")
    policy.save(model, tmp_path / "saved", "owner/name")  # again, over itself
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    assert {p.suffix for p in (tmp_path / "saved").iterdir()} <= {".json", ".safetensors"}
    assert len({file.stat().st_mode for file in (tmp_path / "saved").iterdir()}) == 1  # by the umask, all of them
    policy.restore(other, tmp_path / "saved")
    assert torch.equal(logits(model), logits(other))
    if rank:
        read = policy.load_adapter(policy.load(str(folder), dtype="float32").model, tmp_path / "saved")
        assert torch.equal(logits(model), logits(read))
        config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "owner/name"


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_which_a_part_is_missing_are_refused(tmp_path: Path, tied: bool) -> None:
    """As of a model in several files of which one is gone: the rest would be the base's."""
    model = tiny.model(tie_word_embeddings=tied)
    policy.save(model, tmp_path / "saved", "owner/name")
    policy.restore(tiny.model(seed=1, tie_word_embeddings=tied), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    gone = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="up_proj"):
        policy.restore(tiny.model(seed=1, tie_word_embeddings=tied), tmp_path / "saved")
    save_file({**weights, "model.layers.1.mlp.up.weight": gone}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="2 of its tensors"):
        policy.restore(tiny.model(seed=1, tie_word_embeddings=tied), tmp_path / "saved")


def test_the_base_is_there_with_the_adapter_off(folder: Path) -> None:
    loaded = policy.load(str(folder), dtype="float32")
    before = logits(loaded.model)
    model = policy.add_adapter(loaded.model, RECIPE)
    with torch.no_grad():
        for parameter in policy.trainable(model).values():
            parameter.add_(1.0)
    assert not torch.allclose(logits(model), before)
    with policy.without_adapter(model):
        assert torch.equal(logits(model), before)


def test_a_gguf_file_becomes_a_model_that_can_be_trained_and_saved(folder: Path, tmp_path: Path) -> None:
    file = gguf_of(folder, tmp_path / "model.gguf")
    dense = policy.load(str(folder), dtype="float32")
    loaded = policy.load(str(file), dtype="float32")
    assert loaded.name == "model.gguf"
    torch.testing.assert_close(logits(loaded.model), logits(dense.model), rtol=1e-3, atol=1e-3)
    loaded.model.save_pretrained(tmp_path / "again")
    assert policy.counts(policy.add_adapter(loaded.model, RECIPE))[0] > 0
    packed = policy.load(str(file), dtype="float32", quantization="nf4")
    assert packed.model.is_loaded_in_4bit


def gguf_of(folder: Path, file: Path) -> Path:
    """The tiny Llama as a float32 GGUF file with a byte-level vocabulary of its own, as a converter would write it."""
    gguf = pytest.importorskip("gguf")
    model = tiny.model(hidden_size=64, intermediate_size=128)
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = ["<pad>", "<eos>", "12", "34", *[c.replace(" ", "Ġ").replace("\n", "Ċ") for c in tiny.CHARACTERS]]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 3] + [1] * len(tiny.CHARACTERS))
    writer.add_token_merges(["1 2", "3 4"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = model.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if (kind := ours.rpartition(".")[2]) in heads:  # llama.cpp keeps the rotary halves interleaved
                n = heads[kind]
                weight = weight.reshape(n, 2, weight.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("/nowhere/model", {}, ["is not there"]),
        ("./nowhere", {}, ["is not there"]),
        ("nowhere.gguf", {}, ["is not there"]),
        ("empty", {}, ["holds no model", "config.json"]),
        ("with_gguf", {"a.gguf": "x"}, ["holds no model", "a.gguf"]),
        ("broken_config", {"config.json": "{"}, ["holds no model", "cannot be read"]),
        ("no_object", {"config.json": "[]"}, ["holds no model", "no object"]),
        (
            "unknown_kind",
            {"config.json": '{"model_type": "martian"}', "a.safetensors": "x", "tokenizer.json": "{}"},
            ["cannot be read", "martian"],
        ),
        ("no_weights", {"config.json": '{"model_type": "llama"}'}, ["holds no model", "*.safetensors"]),
        ("a_file", None, ["not a GGUF file"]),
    ],
)
def test_a_model_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: dict | None, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if files is None:
        (tmp_path / name).write_text("x")
    elif "nowhere" not in name:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    source = name if "nowhere" in name else str(tmp_path / name)
    with pytest.raises(ModelError) as error:
        policy.load(source, dtype="float32")
    told = " ".join(error.value.lines())
    assert all(word in told for word in words), told
    assert error.value.exit_code == 2


def test_torn_weights_are_told(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match="cannot be read"):
        policy.load(str(tmp_path / "m"), dtype="float32")


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(tiny.model(hidden_size=64, intermediate_size=128).state_dict(), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        policy.load(str(tmp_path / "m"), dtype="float32")


def test_a_model_of_the_hub_that_cannot_be_reached_says_how_to_give_a_local_one() -> None:
    with pytest.raises(ModelError) as error:
        policy.load("some-owner/some-model", dtype="float32")
    told = " ".join(error.value.lines())
    assert "some-owner/some-model" in told
    assert "the hub and its local cache were tried" in told
    assert "--model FOLDER" in told


@pytest.mark.parametrize(("targets", "words"), [("lm_head", "lm_head"), ("q_projection", "q_proj"), ("", "all-linear")])
def test_targets_that_do_not_fit_are_told(folder: Path, targets: str, words: str) -> None:
    model = policy.load(str(folder), dtype="float32").model
    with pytest.raises(RecipeError) as error:
        policy.add_adapter(model, replace(RECIPE, lora_targets=targets))
    assert words in " ".join(error.value.lines())


def deep(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=layers, **sizes))


def policy_of(model: Any, folder: Path) -> Path:
    policy.save(policy.add_adapter(model, RECIPE), folder, "base")
    return folder


def test_an_adapter_of_another_model_is_told(folder: Path, tmp_path: Path) -> None:
    other = policy.add_adapter(tiny.model(), RECIPE)
    policy.save(other, tmp_path / "other", "other")
    with pytest.raises(ModelError, match="does not fit"):
        policy.load_adapter(policy.load(str(folder), dtype="float32").model, tmp_path / "other")
    with pytest.raises(ModelError, match="no place in the model, the first is"):  # the same sizes, but fewer layers
        policy.load_adapter(deep(1), policy_of(deep(2), tmp_path / "deeper"))
    renamed = policy_of(deep(2), tmp_path / "renamed")
    file = renamed / policy.ADAPTER_FILE
    save_file({key.replace(".layers.", ".blocks."): t for key, t in load_file(file).items()}, file)
    with pytest.raises(ModelError, match="no place in the model"):  # it would answer as its base
        policy.load_adapter(deep(2), renamed)
    short = policy_of(deep(2), tmp_path / "short")
    kept = {key: t for key, t in load_file(short / policy.ADAPTER_FILE).items() if "down_proj" not in key}
    save_file(kept, short / policy.ADAPTER_FILE)
    with pytest.raises(ModelError, match="are not in it"):
        policy.load_adapter(deep(2), short)
    with pytest.raises(ModelError, match="holds no adapter"):
        policy.load_adapter(policy.load(str(folder), dtype="float32").model, tmp_path)
