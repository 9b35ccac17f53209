"""Facts that `grpo-doctor --prove` saved on real machines, judged again."""

import json
from pathlib import Path

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
    assert repaired.plan.path == "bf16-hf"
    assert repaired.plan.dtype == "bfloat16"


def test_what_the_card_itself_was_seen_to_do():
    raw = saved("h200-torch211-hub-package-missing")
    for probe in ("torch_cuda", "fp8_matmul", "bnb_4bit", "attention", "cuda_graph"):
        assert raw["probes"][probe]["ok"] is True, probe
    assert set(raw["fp8_forms"].values()) == set(raw["attention_forms"].values()) == {"ok"}
