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
    Sizes,
    kv_bytes_per_token,
    largest_divisor,
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
    assert rows == pytest.approx(64 * 448 * 147_456 / GIB)  # 384 and room for one more, in multiples of 64


def test_adapter_gradients_optimizer_by_hand() -> None:
    parts = ledger(QWEN, Setting("bf16", lora_rank=32))
    trained = QWEN.adapter_params(32)
    assert parts["adapter"] == parts["gradients"] == pytest.approx(4 * trained / GIB)
    assert parts["optimizer"] == pytest.approx(8 * trained / GIB)
    assert ledger(QWEN, Setting("bf16", optimizer="adamw_8bit"))["optimizer"] == pytest.approx(2.06 * trained / GIB)


def test_a_quantised_linear_is_dequantised_for_its_products() -> None:
    more = ledger(QWEN, Setting("nf4"))["activations"] - ledger(QWEN, Setting("bf16"))["activations"]
    assert more == pytest.approx(4 * 2560 * 9728 / GIB)


ALL_PEAKS = json.loads(Path(__file__).with_name("memory_peaks.json").read_text(encoding="utf-8"))["peaks"]
PEAKS = [peak for peak in ALL_PEAKS if not peak.get("before_few_kernels")]


@pytest.mark.parametrize("peak", PEAKS, ids=lambda p: f"{p['model']}: {p['what']}")
def test_measured_peaks(peak: dict[str, Any]) -> None:
    parts = ledger(known(peak["model"]), Setting(**peak["setting"]))
    seen = sum(gib for part, gib in parts.items() if part not in peak["left_out"])
    assert seen == pytest.approx(peak["gib"], rel=0.10)


def test_saved_bytes_by_hand() -> None:
    """Qwen3-4B: width 2560, queries 4096, keys 1024, MLP 9728; 7 adapters of rank 32; 32 and 8 heads."""
    # norms' inputs and outputs; q, k, v and more; the MLP
    one_node = 8 * 2560 + 6 * 4096 + 6 * 1024 + 8 * 9728 + 7 * 2 * 32
    rows = 4 * 32 + 4 * (2 + 32 + 8)  # log-sum-exp of each head; 1 / rms of each normed row
    norms = 2 * (2 * 2560 + 4096 + 1024)  # in float32 instead of 16 bit
    copies = 3 * 2 * 2560 + 2 * 4096  # five copies where two tensors were shared, and one for the output
    fused = Setting("bf16", fused_norms=True)
    for setting, expected in (
        (fused, one_node + rows),
        (replace(fused, base="nf4"), one_node + rows),
        (replace(fused, fused_norms=False), one_node + rows + norms),
        (replace(fused, shared=True), one_node + rows + norms + copies),
        (replace(fused, spread=2), one_node + rows + norms + copies),
        (replace(fused, dropout=True), one_node + rows + copies + 5 * 2560 + 4096 + 9728),
        (replace(fused, base="fp16"), one_node + rows + 4 * (4096 - 1024)),
    ):
        assert saved_bytes_per_token(QWEN, setting) == expected


def test_keys_are_repeated_on_cards_before_ampere_on_4_bit_bases_too() -> None:
    shape = shape_of("Qwen/Qwen3-4B")
    assert shape is not None
    few, more = (
        saved_bytes_per_token(shape, Setting(base="nf4", lora_rank=32, repeats_keys=repeats))
        for repeats in (False, True)
    )
    assert more - few == 4 * 32 * 128 - 4 * 8 * 128  # 4 Q - 4 K


@pytest.mark.parametrize("model", ["google/gemma-2b", "google/gemma-2-2b", "google/gemma-3-4b-it"])
def test_gemmas_norms_are_never_counted_as_fused(model: str) -> None:
    """They multiply by 1 + weight, which torch's kernel does not: updates/few_kernels.py leaves them alone."""
    fused = Setting("bf16", fused_norms=True)
    assert saved_bytes_per_token(known(model), fused) == saved_bytes_per_token(known(model), Setting("bf16"))


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
        "bf16-hf needs 10.4 GiB for Qwen/Qwen3-4B at its smallest setting (one completion in a backward pass, 8 rows), "
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
        # one launch a block: 31 ms at 1.2 ms, not 8 times that
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 139.0, 64, False),
        # 8 rows without recomputing launch 16 times, this 3 times
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 15.0, 64, True),
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
    alone, shared = settle(QWEN, VLLM, 0.1), settle(QWEN, VLLM, 0.1, Sizes(shared=True))
    assert alone.ledger["engine_copy"] == pytest.approx(weight_bytes(QWEN, "bf16") / GIB)
    assert "engine_copy" not in shared.ledger
    # Unsloth's layers are none of ours: more is counted
    assert shared.ledger["activations"] > alone.ledger["activations"]


def test_training_all_weights_counts_them_all() -> None:
    parts = ledger(known("Qwen/Qwen3-0.6B"), Setting("bf16", lora_rank=0))
    assert parts["gradients"] == pytest.approx(4 * 596_049_920 / GIB) and "adapter" not in parts


@pytest.mark.parametrize(("total", "most", "part"), [(12, 5, 4), (12, 12, 12), (8, 20, 8), (7, 3, 1), (8, 0, 1)])
def test_a_part_of_a_total_leaves_nothing_over(total: int, most: int, part: int) -> None:
    assert largest_divisor(total, most) == part


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
    asked = Sizes(**sizes)
    less, found = settle(shape, path, have, asked), settle(shape, path, have + more, asked)
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
