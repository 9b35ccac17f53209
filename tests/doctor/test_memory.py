"""The ledger: numbers worked out by hand, memory that was measured or counted, and what must hold for every setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.diagnosis import PATHS
from doctor.memory import (
    GIB,
    Setting,
    kv_bytes_per_token,
    launch_tokens,
    ledger,
    phase,
    saved_bytes_per_token,
    settle,
    update_cost,
    weight_bytes,
)
from doctor.shapes import Shape, shape_of

HF16, NF4, VLLM = "bf16-hf", "qlora-hf", "bf16-vllm"


def known(name: str) -> Shape:
    shape = shape_of(name)
    assert shape is not None
    return shape


QWEN = known("Qwen/Qwen3-4B")


def test_weights_by_hand() -> None:
    blocks = 36 * (2560 * 128 * (2 * 32 + 2 * 8) + 3 * 2560 * 9728)
    assert QWEN.linear_params == blocks == 3_633_315_840
    assert weight_bytes(QWEN, "bf16") == 2 * 4_022_468_096
    assert weight_bytes(QWEN, "fp8") == blocks + 2 * (4_022_468_096 - blocks)
    # 4-bit: half a byte, one byte of scale per 64 values, four bytes per 256 scales; the rest stays in 16 bit
    by_hand = blocks / 2 + blocks / 64 + 4 * blocks / (64 * 256) + 2 * (4_022_468_096 - blocks)
    assert weight_bytes(QWEN, "nf4") == pytest.approx(by_hand)
    assert weight_bytes(QWEN, "nf4") / GIB == pytest.approx(2.47, abs=0.01)


def test_kv_cache_by_hand() -> None:
    assert kv_bytes_per_token(QWEN) == 36 * 2 * 8 * 128 * 2
    rows = ledger(QWEN, Setting("bf16", rollout_rows=64, prompt_tokens=128, completion_tokens=256))["kv_cache"]
    assert rows == pytest.approx(64 * 384 * 147_456 / GIB)


def test_adapter_gradients_optimizer_by_hand() -> None:
    parts = ledger(QWEN, Setting("bf16", lora_rank=32))
    trained = QWEN.adapter_params(32)
    assert parts["adapter"] == parts["gradients"] == pytest.approx(4 * trained / GIB)
    assert parts["optimizer"] == pytest.approx(8 * trained / GIB)
    assert ledger(QWEN, Setting("bf16", optimizer="adamw_8bit"))["optimizer"] == pytest.approx(2.06 * trained / GIB)


def test_a_quantised_linear_is_dequantised_for_its_products() -> None:
    more = ledger(QWEN, Setting("nf4"))["activations"] - ledger(QWEN, Setting("bf16"))["activations"]
    # the adapters of one block, 768 tokens, share their 16-bit inputs: three of width 2560 and one of 4096 less
    assert more == pytest.approx((4 * 2560 * 9728 - 768 * (3 * 2 * 2560 + 2 * 4096)) / GIB)


PEAKS = json.loads(Path(__file__).with_name("memory_peaks.json").read_text(encoding="utf-8"))["peaks"]


@pytest.mark.parametrize("peak", PEAKS, ids=lambda p: f"{p['model']}: {p['what']}")
def test_measured_peaks(peak: dict[str, Any]) -> None:
    parts = ledger(known(peak["model"]), Setting(**peak["setting"]))
    seen = sum(gib for part, gib in parts.items() if part not in peak["left_out"])
    assert seen == pytest.approx(peak["gib"], rel=0.15)


# Peak GiB of forward and backward of the blocks at 768 tokens a row, gradients aside: every tensor's bytes counted under fake
# tensors (torch 2.13, transformers 5.24, peft 0.21, adapters of rank 32 in float32, autocast to bfloat16, mask given).
@pytest.mark.parametrize(
    ("model", "rows", "checkpointing", "counted"),
    [
        ("Qwen/Qwen3-4B", 8, True, 2.646),
        ("Qwen/Qwen3-4B", 4, False, 19.866),
        ("meta-llama/Llama-3.2-1B", 8, True, 1.519),
        ("meta-llama/Llama-3.2-1B", 4, False, 5.975),
        ("Qwen/Qwen3-0.6B", 8, True, 0.956),
        ("Qwen/Qwen3-0.6B", 4, False, 6.618),
    ],
)
def test_counted_activations(model: str, rows: int, checkpointing: bool, counted: float) -> None:
    setting = Setting("bf16", micro_batch=rows, checkpointing=checkpointing, prompt_tokens=512, completion_tokens=256)
    assert ledger(known(model), setting)["activations"] == pytest.approx(counted, rel=0.08)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_saved_bytes_agree_with_what_autograd_keeps(kind: str, autocast: bool) -> None:
    """Tensors saved for backward by 3 blocks less those saved by 1, on a shape other than those the constants came from."""
    shape = Shape("x", 96, 1, 6, 2, 16, 320, 64, True, 0, qk_norm=kind == "qwen3")
    kept = (_kept(kind, shape, 3, autocast) - _kept(kind, shape, 1, autocast)) / 2
    assert saved_bytes_per_token(shape, "bf16" if autocast else "fp32", 8) == pytest.approx(kept / (2 * 48), rel=0.15)


def _kept(kind: str, shape: Shape, layers: int, autocast: bool) -> int:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=shape.hidden, num_hidden_layers=layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        vocab_size=shape.vocab, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if autocast else torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, shape.vocab, (2, 48))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.base_model.model.model(input_ids=tokens, attention_mask=mask)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)


# What a path needs at the least, by the coarse formulas machines are judged with (w: 2 bytes a parameter, in GiB). Cases keep a
# factor 1.4 from them, so the smallest setting of the ledger must lie between.
@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-3B",
        "Qwen/Qwen3-4B", "google/gemma-3-4b-it", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "google/gemma-2-9b-it",
        "Qwen/Qwen3-14B", "Qwen/Qwen3-32B",
    ],
)  # fmt: skip
def test_smallest_need_lies_near_the_coarse_formulas(model: str) -> None:
    shape = known(model)
    w = 2 * shape.params / GIB
    expected = {HF16: 1.35 * w + 1.5, "fp16-hf": 1.35 * w + 1.5, "fp8-hf": 1.35 * w + 1.5, VLLM: 2.35 * w + 3.5}
    for path, need in expected.items():
        assert need / 1.4 < settle(shape, path, 0.1).need_gib < 1.4 * need, path
    if shape.params > 1.6e9:  # below, the formula's constant of 3 GiB is generous
        need = 0.65 * shape.params / GIB + 3
        assert need / 1.4 < settle(shape, NF4, 0.1).need_gib < 1.4 * need


@pytest.mark.parametrize(
    ("model", "path", "have", "fits"),
    [
        ("Qwen/Qwen3-4B", "fp8-hf", 7.7, False),
        ("Qwen/Qwen3-4B", "qlora-hf", 7.7, True),
        ("Qwen/Qwen3-8B", "bf16-hf", 14.5, False),
        ("Qwen/Qwen3-8B", "qlora-hf", 14.5, True),
        ("meta-llama/Llama-3.2-1B-Instruct", "fp8-vllm", 7.34, False),
        ("meta-llama/Llama-3.2-1B-Instruct", "bf16-hf", 7.34, True),
        ("Qwen/Qwen3-0.6B", "bf16-hf", 3.6, True),
        ("Qwen/Qwen3-0.6B", "bf16-vllm", 3.6, False),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu", 16.0, True),
        ("meta-llama/Llama-3.1-70B", "cpu", 64.0, False),
    ],
)
def test_fits(model: str, path: str, have: float, fits: bool) -> None:
    found = settle(known(model), path, have)
    assert found.fits is fits
    assert (found.need_gib <= have) is fits


def test_what_does_not_fit_says_how_much_it_lacks() -> None:
    found = settle(QWEN, "bf16-hf", 8.0)
    assert (found.micro_batch, found.rollout_rows, found.checkpointing, found.rollout_copy) == (1, 8, True, False)
    assert found.reason == (
        "bf16-hf needs 10.2 GiB for Qwen/Qwen3-4B at its smallest setting (one completion in a backward pass, 8 rows), "
        "and 8.0 GiB are free"
    )


def test_unknown_memory_is_neither_yes_nor_no() -> None:
    found = settle(QWEN, "bf16-hf", None)
    assert found.fits is None and found.have_gib is None and "unknown" in found.reason
    assert 1 <= found.micro_batch <= 8 and found.rollout_rows == 64


def test_spending_order() -> None:
    """Rows before the backward pass; for 4-bit weights the copy before both; recomputing stops last."""
    tight, wide = settle(QWEN, "bf16-hf", 15.0), settle(QWEN, "bf16-hf", 78.0)
    assert tight.rollout_rows > tight.micro_batch and tight.checkpointing
    assert wide.rollout_copy and wide.rollout_rows == 64 and not wide.checkpointing
    assert settle(QWEN, "qlora-hf", 14.5).rollout_copy and not settle(QWEN, "qlora-hf", 9.0).rollout_copy
    assert settle(QWEN, "qlora-hf", 11.5, fp8_copy=True).setting.copy == "fp8"
    assert not settle(QWEN, "qlora-hf", 11.5).rollout_copy


def test_the_fewer_weights_a_block_has_the_more_tokens_a_launch_costs() -> None:
    small = known("HuggingFaceTB/SmolLM2-135M-Instruct")
    block = 576 * 64 * (2 * 9 + 2 * 3) + 3 * 576 * 1536 + 2 * 576  # attention, MLP, norms: 3.54 million
    assert launch_tokens(small) == pytest.approx(2.7e11 / block, rel=1e-4) == pytest.approx(76_268, abs=10)
    assert launch_tokens(QWEN) == pytest.approx(2.7e11 / (3_633_315_840 / 36), rel=1e-3)  # 2,675
    assert launch_tokens(known("Qwen/Qwen3-14B")) == 2048  # products of fewer tokens fill no card
    assert launch_tokens(small, "cpu") == 2048  # there launches are nothing beside the arithmetic


def test_update_cost_by_hand() -> None:
    """64 completions of 768 tokens: 49,152 tokens a pass; a launch costs Qwen3-4B 2,675 tokens, and counts twice."""
    setting = Setting("bf16", micro_batch=8, prompt_tokens=512, completion_tokens=256, checkpointing=False)
    assert update_cost(QWEN, setting, 64) == 2 * 49_152  # 8 launches: 2 x 8 x 2,675 = 42,800 is less
    assert update_cost(QWEN, replace(setting, checkpointing=True), 64) == 3 * 49_152
    assert update_cost(QWEN, replace(setting, micro_batch=4), 64) == 2 * 2 * 16 * 2675


@pytest.mark.parametrize(
    ("model", "have", "micro_batch", "checkpointing"),
    [
        (
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            139.0,
            64,
            False,
        ),  # one launch a block: 31 ms at 1.2 ms, not 8 times that
        (
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            15.0,
            64,
            True,
        ),  # 8 rows without recomputing launch 16 times, this 3 times
        ("Qwen/Qwen3-4B", 139.0, 8, False),  # arithmetic is the limit already: wider is no faster
        ("Qwen/Qwen3-4B", 44.0, 8, True),
    ],
)
def test_a_backward_pass_is_as_wide_as_is_worth_its_memory(
    model: str, have: float, micro_batch: int, checkpointing: bool
) -> None:
    found = settle(known(model), "bf16-hf", have)
    assert (found.micro_batch, found.checkpointing) == (micro_batch, checkpointing)


def test_a_guess_is_called_one() -> None:
    assert settle(known("someone/new-7B"), "bf16-hf", 40.0).reason.endswith("(shape guessed from the name)")


def test_cpu_falls_back_to_16_bit_weights() -> None:
    roomy, tight = settle(QWEN, "cpu", 64.0), settle(QWEN, "cpu", 13.0)
    assert (roomy.base, tight.base, tight.fits) == ("fp32", "bf16", True)


def test_an_engine_that_shares_the_weights_needs_no_copy() -> None:
    alone, shared = settle(QWEN, VLLM, 0.1), settle(QWEN, VLLM, 0.1, shared=True)
    assert alone.need_gib - shared.need_gib == pytest.approx(weight_bytes(QWEN, "bf16") / GIB)
    assert "engine_copy" not in shared.ledger


def test_training_all_weights_counts_them_all() -> None:
    parts = ledger(known("Qwen/Qwen3-0.6B"), Setting("bf16", lora_rank=0))
    assert parts["gradients"] == pytest.approx(4 * 596_049_920 / GIB) and "adapter" not in parts


def test_an_unknown_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a path"):
        settle(QWEN, "bf16", 10.0)


SIZES = st.fixed_dictionaries(
    {
        "group_size": st.integers(2, 16),
        "prompts_per_step": st.integers(1, 16),
        "prompt_tokens": st.integers(1, 4096),
        "completion_tokens": st.integers(1, 4096),
        "lora_rank": st.sampled_from([0, 1, 8, 32, 256]),
        "optimizer": st.sampled_from(["adamw", "adamw_8bit"]),
        "dora": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "someone/x-3B"]),
    path=st.sampled_from(PATHS),
    have=st.floats(0.0, 300.0),
    more=st.floats(0.0, 100.0),
    sizes=SIZES,
)
def test_what_holds_for_every_setting(model: str, path: str, have: float, more: float, sizes: dict[str, Any]) -> None:
    shape = known(model)
    less, found = settle(shape, path, have, **sizes), settle(shape, path, have + more, **sizes)
    total = sizes["group_size"] * sizes["prompts_per_step"]
    for s in (less, found):
        assert s.need_gib == pytest.approx(sum(s.ledger.values())) and all(gib > 0 for gib in s.ledger.values())
        assert total % s.micro_batch == 0 and total % s.rollout_rows == 0
        assert s.fits == (s.need_gib <= (s.have_gib or 0.0))
        assert s.phase in ("update", "rollout") and s.phase == phase(shape, s.setting)
    assert not (less.fits and not found.fits), "more memory never fits less"
    if less.base == found.base and less.rollout_copy == found.rollout_copy:
        assert found.rollout_rows >= less.rollout_rows


BASES = st.sampled_from(["bf16", "nf4", "fp32"])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 64), micro=st.integers(1, 64), tokens=st.integers(1, 4096), base=BASES)
def test_larger_settings_never_need_less(rows: int, micro: int, tokens: int, base: str) -> None:
    small = Setting(base, rollout_rows=rows, micro_batch=micro, completion_tokens=tokens)
    larger = (
        replace(small, rollout_rows=rows + 1),
        replace(small, micro_batch=micro + 1),
        replace(small, completion_tokens=tokens + 1),
        replace(small, checkpointing=False),
    )
    need = sum(ledger(QWEN, small).values())
    assert all(sum(ledger(QWEN, setting).values()) >= need for setting in larger)
