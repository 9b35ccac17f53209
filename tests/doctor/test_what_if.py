"""What if: the diagnosis of an assumed machine, its ledger and its step time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from doctor.cards import Card, CardError, cards, find_card
from doctor.memory import Setting, Sizes, settle
from doctor.plan import diagnose
from doctor.shapes import Shape, shape_of
from doctor.speed import decode_step_s, estimate, in_words, step_estimate
from doctor.what_if import Comparison, WhatIf, answer, assumed_facts


def one(text: str, model: str | None = None) -> WhatIf:
    found = answer(text, model)
    assert isinstance(found, WhatIf)
    return found


def qwen() -> Shape:
    shape = shape_of("Qwen/Qwen3-4B")
    assert shape is not None
    return shape


# Tokens per second of a rollout on one H200 (docs/memory.md): Qwen3-4B's shape, prompt 128, 256 new tokens. The constants
# were fitted to these, so this holds the fit and does not validate it.
@pytest.mark.parametrize(
    ("setting", "measured"),
    [
        (Setting("bf16", copy="bf16", rollout_rows=64, prompt_tokens=128), 18_856),
        (Setting("bf16", copy="fp8", rollout_rows=64, prompt_tokens=128), 23_841),
        (Setting("nf4", rollout_rows=64, prompt_tokens=128), 558),
    ],
)
def test_decode_keeps_to_the_rates_it_was_fitted_to(setting: Setting, measured: float) -> None:
    rows = setting.rollout_rows
    assert rows / decode_step_s(qwen(), setting, find_card("H200")[0], rows) == pytest.approx(measured, rel=0.1)


# The block's share was fitted to Qwen3-4B and SmolLM2-135M; these two lie between (reports/engines-h200).
@pytest.mark.parametrize(("model", "measured"), [("Qwen/Qwen3-0.6B", 47_421), ("Qwen/Qwen3-1.7B", 33_921)])
def test_decode_of_models_it_was_not_fitted_to(model: str, measured: float) -> None:
    shape = shape_of(model)
    assert shape is not None
    setting = Setting("bf16", copy="bf16", rollout_rows=64, prompt_tokens=128)
    assert 64 / decode_step_s(shape, setting, find_card("H200")[0], 64) == pytest.approx(measured, rel=0.1)


# Seconds of a whole step on one H200, 8 x 8 completions of 256 tokens (reports/engines-h200). Fitted to the two of `bf16-hf`.
@pytest.mark.parametrize(
    ("model", "path", "measured"),
    [
        ("Qwen/Qwen3-1.7B", "bf16-hf", 1.40),
        ("Qwen/Qwen3-1.7B", "fp8-hf", 1.46),
        ("Qwen/Qwen3-1.7B", "bf16-vllm", 2.10),
        ("Qwen/Qwen3-1.7B", "fp8-vllm", 2.28),
        ("Qwen/Qwen3-4B", "bf16-hf", 2.68),
    ],
)
def test_steps_lie_near_what_was_measured(model: str, path: str, measured: float) -> None:
    shape = shape_of(model)
    assert shape is not None
    setting = settle(shape, path, 138.0, Sizes(prompt_tokens=130, fused_norms=True)).setting
    step = step_estimate(shape, setting, find_card("H200")[0], prompts=8, group_size=8)
    assert step.total_s == pytest.approx(measured, rel=0.15)


def test_a_step_by_hand() -> None:
    """BF16 on an A100, 64 rows at once: 256 decode steps limited by memory, 3 passes of the update limited by arithmetic."""
    card, shape = find_card("A100 80GB")[0], qwen()
    setting = Setting("bf16", copy="bf16", rollout_rows=64, micro_batch=16)
    kv = 64 * (512 + 128) * 147_456
    decode = 256 * ((2 * 4_022_468_096 + kv) / (0.85 * 2039e9) + 36 * 23e-6)
    prefill = 2 * 4_022_468_096 * 8 * 512 / (0.3 * 312e12)
    update = 3 * 2 * 4_022_468_096 * 64 * 768 / (0.3 * 312e12)
    found = step_estimate(shape, setting, card)
    assert (found.rollout_s, found.update_s) == (pytest.approx(decode + prefill), pytest.approx(update))
    assert found.total_s == pytest.approx(decode + prefill + update + 0.3)
    assert (found.low_s, found.high_s) == (pytest.approx(found.total_s / 2), pytest.approx(found.total_s * 2))


@pytest.mark.parametrize(
    ("card", "model", "paths"),
    [
        ("Tesla T4", "Qwen/Qwen3-0.6B", ("fp16-vllm",)),
        ("T4", "Qwen/Qwen3-8B", ("qlora-hf",)),
        ("GTX 1080 Ti", "Qwen/Qwen3-0.6B", ("fp16-hf",)),
        ("V100", "Qwen/Qwen3-1.7B", ("fp16-hf",)),
        ("RTX 3090", "Qwen/Qwen3-4B", ("bf16-vllm",)),
        ("A100", "Qwen/Qwen3-4B", ("bf16-vllm",)),
        ("L4", "Qwen/Qwen3-1.7B", ("fp8-vllm",)),
        ("H100", "Qwen/Qwen3-4B", ("fp8-vllm",)),
        ("RTX 5060", "Qwen/Qwen3-4B", ("qlora-hf", "fp8-hf")),
        ("Jetson AGX Orin", "Qwen/Qwen3-4B", ("bf16-hf",)),
        ("RTX 3050 laptop", "Qwen/Qwen3-14B", ("cpu", None)),
    ],
)
def test_paths(card: str, model: str, paths: tuple[str | None, ...]) -> None:
    assert one(card, model).diagnosis.plan.path in paths


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_the_set_assumed_for_a_card_raises_no_wall_about_torch(card: Card) -> None:
    """The install plan and the walls agree: with the named set on the machine nothing keeps torch from the card."""
    facts, _ = assumed_facts(card)
    d = diagnose(facts, "HuggingFaceTB/SmolLM2-135M")
    assert not [w.code for w in d.walls if w.code.startswith("TORCH")]
    assert d.plan.path is not None and d.plan.path != "cpu"


def test_text_holds_verdict_ledger_time_and_error_in_80_columns() -> None:
    text = one("8x RTX 4090", "Qwen/Qwen3-4B").to_text()
    assert text.startswith("8 x GeForce RTX 4090: Qwen/Qwen3-4B takes fp8-vllm\n")
    for part in (
        "Assumed: Linux",
        "engine copy",
        "a step (",
        "a factor of 2 either way",
        "8 cards share 8 questions x 8",
    ):
        assert part in " ".join(text.split()), part
    assert max(map(len, text.splitlines())) <= 80


def test_a_card_without_a_known_rate_says_a_wider_error() -> None:
    assert "a factor of 3 either way" in " ".join(one("DGX Spark").to_text().split())


def test_an_unknown_model_still_gets_a_path() -> None:
    found = one("H100", "someone/nameless")
    assert found.diagnosis.plan.path == "fp8-vllm" and found.settled is None and found.step is None
    json.dumps(found.to_json())


@pytest.mark.parametrize("card", ["H100", "all"])
def test_of_an_unknown_model_it_is_said_that_memory_is_not_checked(card: str) -> None:
    text = " ".join(answer(card, "someone/nameless").to_text().split())
    assert "The size of someone/nameless is not known: memory is not checked" in text and " takes " not in text
    assert "is not known" not in answer(card, "Qwen/Qwen3-4B").to_text()


def test_what_fits_nowhere_is_said() -> None:
    found = one("GTX 1650", "meta-llama/Llama-3.1-70B")
    assert found.diagnosis.plan.path is None and "takes nothing that fits" in found.to_text()


def test_json_sums() -> None:
    raw: dict[str, Any] = json.loads(json.dumps(one("RTX 3060", "Qwen/Qwen3-1.7B").to_json()))
    assert raw["memory"]["need_gib"] == pytest.approx(sum(raw["memory"]["ledger"].values()))
    seconds = raw["seconds_per_step"]
    assert seconds["low"] < seconds["estimate"] < seconds["high"] and raw["assumed"]


def test_all_is_one_table_fastest_first() -> None:
    table = answer("all", "Qwen/Qwen3-8B")
    assert isinstance(table, Comparison) and len(table.rows) == len(cards())
    seconds = [row.step.total_s for row in table.rows if row.step]
    assert seconds == sorted(seconds)
    assert all(row.step is None for row in table.rows[len(seconds) :])
    text = table.to_text()
    assert max(map(len, text.splitlines())) <= 80 and "a factor of 2 either way" in " ".join(text.split())
    assert len(json.loads(json.dumps(table.to_json()))["cards"]) == len(cards())


def test_rows_of_all_with_a_wider_error_are_marked() -> None:
    table = answer("all", "Qwen/Qwen3-4B")
    assert isinstance(table, Comparison)
    text = table.to_text()
    rows = {line[:29].strip(): line.endswith(" *") for line in text.splitlines() if line.rstrip(" *")[-1:].isdecimal()}
    wide = [row for row in table.rows if row.step and row.step.error == 3]
    assert (
        wide
        and sum(rows.values()) == len(wide)
        and all(rows[row.card.name.removeprefix("GeForce ")[:29]] for row in wide)
    )
    assert "a factor of 2 either way, of 3 in the rows marked *" in " ".join(text.split())


def test_an_unknown_card_is_an_error_with_its_nearest() -> None:
    with pytest.raises(CardError, match="nearest"):
        answer("RTX 9090")


def test_the_command_says_it_in_one_line_and_exits_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "doctor", "--what-if", "RTX 9090"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1 and "nearest" in done.stderr


def test_how_long_a_plan_takes() -> None:
    facts, _ = assumed_facts(find_card("RTX 4090")[0])
    step = estimate(diagnose(facts, "Qwen/Qwen3-1.7B"))
    text = step and in_words(step, 150)
    assert text is not None and text.startswith("about ") and "estimate:" in text
    assert estimate(diagnose(facts)) is None
