"""Facts that `grpo-doctor --prove` saved on real machines, judged again."""

import json
from pathlib import Path

import pytest

from doctor.facts import facts_from_json
from doctor.plan import diagnose

SAVED = Path(__file__).parent / "saved"


def saved(name):
    return json.loads((SAVED / f"{name}.json").read_text())


def test_an_h200_whose_training_stack_lacks_one_package_is_found_out_by_the_proof():
    """torch 2.11+cu130, no vLLM: the card does all it is asked, yet no update runs, since huggingface_hub misses httpx2."""
    raw = saved("h200-torch211-hub-package-missing")
    d = diagnose(facts_from_json(raw), "Qwen/Qwen3-4B")
    assert d.plan.path is None
    closing = {w.code: w for w in d.walls if "bf16-hf" in w.closes}
    assert "httpx2" in json.dumps(closing["PROOF-LORA"].because)
    for probe in ("lora_step", "qlora_step", "cpu_step"):
        raw["probes"][probe] = {"ok": None, "error": None}
    repaired = diagnose(facts_from_json(raw), "Qwen/Qwen3-4B")
    assert repaired.plan.path == "fp8-hf" and repaired.paths["bf16-hf"].open
    assert repaired.plan.dtype == "bfloat16"


def test_what_the_card_itself_was_seen_to_do():
    raw = saved("h200-torch211-hub-package-missing")
    for probe in ("torch_cuda", "fp8_matmul", "bnb_4bit", "attention", "cuda_graph"):
        assert raw["probes"][probe]["ok"] is True, probe
    assert set(raw["fp8_forms"].values()) == set(raw["attention_forms"].values()) == {"ok"}


def test_a_whole_h200_without_vllm_was_proved():
    """torch 2.11+cu130 and the training stack: attention, a CUDA graph and three LoRA updates ran."""
    raw = saved("h200-torch211-bare")
    assert raw["proved"]["bf16-hf"].keys() == {"attention", "cuda_graph", "lora_step"}
    assert all(told.startswith("ok in ") for told in raw["proved"]["bf16-hf"].values())
    d = diagnose(facts_from_json(raw), "Qwen/Qwen3-4B")
    assert d.plan.engine == "portable" and d.plan.dtype == "bfloat16" and d.paths["bf16-hf"].open
    assert d.paths["fp8-vllm"].walls == ("VLLM-ABSENT",)
    assert not [w.code for w in d.walls if w.code.startswith(("PROOF", "LOCK", "PAIR"))]


def test_an_h200_with_vllm_started_it_on_weights_made_fp8():
    """vLLM 0.24.0 beside torch 2.11+cu130, trl 1.16, transformers 5.24: it started and wrote tokens, so every path is open."""
    raw = saved("h200-torch211-vllm024")
    assert raw["proved"]["fp8-vllm"].keys() == {"fp8_matmul", "lora_step", "vllm_fp8_start"}
    assert all(told.startswith("ok in ") for told in raw["proved"]["fp8-vllm"].values())
    assert raw["packages"]["vllm"] == "0.24.0"
    d = diagnose(facts_from_json(raw), "Qwen/Qwen3-4B")
    assert (d.plan.path, d.plan.engine, d.plan.quantization) == ("fp8-vllm", "vllm", "fp8")
    assert all(d.paths[path].open for path in ("fp8-vllm", "bf16-vllm", "bf16-hf", "qlora-hf", "cpu"))


def test_a_vllm_that_stops_starting_sends_the_same_h200_to_the_portable_engine():
    raw = saved("h200-torch211-vllm024")
    for probe in ("vllm_start", "vllm_fp8_start"):
        raw["probes"][probe] = {"ok": False, "error": "RuntimeError: Engine core initialization failed"}
    d = diagnose(facts_from_json(raw), "Qwen/Qwen3-4B")
    assert d.plan.engine == "portable" and not any(d.paths[p].open for p in ("fp8-vllm", "bf16-vllm"))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (None, "fp8-hf"),
        ("Qwen/Qwen3-4B", "fp8-hf"),
        ("Qwen/Qwen3-1.7B", "fp8-hf"),
        ("Qwen/Qwen3-0.6B", "bf16-hf"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "bf16-hf"),
    ],
)
def test_fp8_without_vllm_is_taken_for_models_it_was_measured_to_pay_for(model, path):
    d = diagnose(facts_from_json(saved("h200-torch211-bare")), model)
    assert d.plan.path == path
    assert ("FP8-HF-UNPROVEN" in d.paths["fp8-hf"].walls) == (path == "bf16-hf")
