"""A proof turns what happened into facts, judges again, and goes on along the new choice."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import doctor_samples as samples
import pytest

from doctor import child, prove, render
from doctor.child import Outcome
from doctor.diagnosis import GPU_PATHS, PATHS, VLLM_PATHS, Diagnosis, Plan, Wall
from doctor.facts import Facts, Probe
from doctor.trials.tiny import save_tiny_llama, tiny_shape

OK: dict[str, Any] = {"ok": True, "error": None}


def fake_run(monkeypatch: pytest.MonkeyPatch, fails: dict[str, str]) -> list[tuple[str, ...]]:
    """Every trial passes but those in `fails` (trial, or trial and its first argument)."""
    ran: list[tuple[str, ...]] = []

    def run(trial: str, *args: str, timeout_s: float, env: dict[str, str]) -> Outcome:
        ran.append((trial, *args))
        error = fails.get(" ".join((trial, *args[:1])), fails.get(trial))
        told = {"cuda": "fp8_matmul", "bnb": "bnb_4bit"}.get(trial, trial)
        return Outcome("error", None, {}, error, 0.1) if error else Outcome("ok", None, {told: OK}, None, 0.1)

    monkeypatch.setattr(prove.child, "run", run)
    return ran


def judge(facts: Facts) -> Diagnosis:
    """The rules as the table in doctor/prove.py states them, in short."""
    against = {"fp8_matmul": ("fp8-vllm", "fp8-hf"), "vllm_start": VLLM_PATHS, "vllm_fp8_start": ("fp8-vllm",),
               "bnb_4bit": ("qlora-hf",), "lora_step": GPU_PATHS[:-1], "qlora_step": ("qlora-hf",)}  # fmt: skip
    walls = tuple(Wall(name, closes, name) for name, closes in against.items() if facts.probe(name).ok is False)
    d = samples.diagnosis(walls=walls, facts=facts)
    path = next(p for p in PATHS if d.paths[p].open)
    return replace(d, plan=Plan(path, None, "bfloat16", None, (0,), None, None, None, None, ()))


def clean() -> Facts:
    return samples.facts(probes=MappingProxyType({}), extra=MappingProxyType({}))


def test_a_good_machine_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake_run(monkeypatch, {})
    d = prove.prove(judge(clean()), judge)
    assert ran == [("cuda",), ("lora_step", "cuda", "bfloat16", "plain"), ("vllm_start", prove.FP8_FORM, "bfloat16")]
    assert d.plan.path == "fp8-vllm"
    assert d.facts.probe("vllm_start") == d.facts.probe("vllm_fp8_start") == Probe(True)
    assert d.facts.extra["proved"]["fp8-vllm"]["vllm_fp8_start"] == "ok in 0.1 s"
    for page in (render.text(d), render.markdown(d)):
        assert "proved here: fp8-vllm: fp8_matmul ok in 0.1 s" in " ".join(page.replace("\\", "").split())


def test_fp8_start_fails_and_plain_start_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(monkeypatch, {f"vllm_start {prove.FP8_FORM}": "fp8 needs CUDA 12.9"})
    d = prove.prove(judge(clean()), judge)
    assert d.plan.path == "bf16-vllm"
    assert d.facts.probe("vllm_fp8_start") == Probe(False, "fp8 needs CUDA 12.9") and d.facts.probe("vllm_start").ok


def test_vllm_fails_altogether_and_the_portable_path_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake_run(monkeypatch, {"vllm_start": "undefined symbol", "cuda": "no fp8"})
    d = prove.prove(judge(clean()), judge)
    assert d.plan.path == "bf16-hf" and d.facts.probe("fp8_matmul") == Probe(False, "no fp8")
    assert d.facts.probe("vllm_start") == Probe(False, "undefined symbol")
    assert [r[0] for r in ran] == ["cuda", "lora_step", "vllm_start", "attention", "cuda_graph", "lora_step"]
    assert ("vllm_start", prove.FP8_FORM, "bfloat16") not in ran  # the matmul had settled that


def test_no_graph_is_no_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake_run(monkeypatch, {"cuda_graph": "capture failed"})
    d = prove.prove(judge(clean()), judge, path="bf16-hf")
    assert d.facts.probe("cuda_graph") == Probe(False, "capture failed") and d.facts.probe("lora_step").ok
    assert [r[0] for r in ran] == ["attention", "cuda_graph", "lora_step"]


def test_only_the_named_path_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake_run(monkeypatch, {"bnb": "libbitsandbytes_cuda131.so"})
    d = prove.prove(judge(clean()), judge, path="qlora-hf")
    assert ran == [("bnb",)] and not d.paths["qlora-hf"].open


def test_an_unknown_outcome_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prove.child, "run", lambda *a, **k: Outcome("timeout", "import vllm", {}, "no answer within 360 s")
    )
    d = prove.prove(judge(clean()), judge, path="bf16-vllm")
    assert d.facts.probe("vllm_start") == Probe() and d.paths["bf16-vllm"].open
    assert "no answer" in d.facts.extra["unknown"]["probes.vllm_start"]


@pytest.mark.parametrize(
    ("path", "dtype"),
    [("fp16-vllm", "float16"), ("qlora-hf", "float16"), ("cpu", "float32"), ("bf16-hf", "bfloat16")],
)
def test_type_of_a_path_that_was_not_chosen(path: str, dtype: str) -> None:
    facts = samples.facts(gpus=(replace(samples.RTX_5090, compute_capability="7.5"),))
    d = replace(samples.diagnosis("fp16-hf", facts=facts))
    assert prove._dtype(d, path) == (dtype if path != "bf16-hf" else "float16")


@pytest.mark.parametrize(
    ("visible", "gpu", "env"),
    [
        (None, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("3,5", 1, {"CUDA_VISIBLE_DEVICES": "5"}),
        ("3", 1, {}),
        (None, 0, {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_children_see_the_planned_card(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: int, env: dict[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert prove._one_card(samples.facts(gpus=(samples.RTX_5090, samples.RTX_5090)), (gpu,)) == env
    assert prove._one_card(samples.facts(), (0,)) == {}


def test_every_path_has_steps_that_exist() -> None:
    from doctor.trials import TRIALS

    for path in PATHS:
        assert prove.steps(path, "bfloat16")
        assert all(step.trial in TRIALS for step in prove.steps(path, "bfloat16"))


# ---- the trials themselves, as far as a CPU goes --------------------------------------------------------------------

torch_here = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@torch_here
@pytest.mark.parametrize(("args", "probe"), [
    (("attention", "float32", "cpu"), "attention"),
    (("lora_step", "cpu", "float32"), "lora_step"),
])  # fmt: skip
def test_real_steps_on_the_cpu(args: tuple[str, ...], probe: str) -> None:
    outcome = child.run(*args, timeout_s=90)
    assert outcome.end == "ok" and outcome.told[probe] == OK, outcome


@torch_here
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="for machines without a card")
def test_a_gpu_step_without_gpu_is_a_fact() -> None:
    outcome = child.run("cuda_graph", "bfloat16", timeout_s=60)
    assert outcome.end == "error" and outcome.stage == "CUDA graph: warm-up" and outcome.error


def test_the_tiny_model_is_one_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_tiny_llama(tmp_path / "tiny")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.hidden_size == tiny_shape()["hidden_size"] and config.model_type == "llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("1 2 3")["input_ids"]
    assert (
        tokenizer.decode(ids) == "1 2 3"
        and tokenizer.eos_token_id == config.eos_token_id
        and max(ids) < config.vocab_size
    )


@pytest.mark.parametrize(
    ("files", "end", "words"),
    [
        ((), "error", "without its compiled code"),
        (("_C_AVX2.abi3.so",), "ok", ""),
        (("_C.abi3.so",), "error", "ImportError"),  # there, and broken: an empty file is no library
        (("_C_stable_libtorch.abi3.so", "_moe_C.abi3.so"), "error", "ImportError"),
        (("unrelated.so",), "error", "without its compiled code"),
    ],
)
def test_a_husk_of_vllm_is_told_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], end: str, words: str
) -> None:
    """`import vllm` works in every one of these; the compiled code tells."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("LLM = SamplingParams = object\n")
    for name in files:
        (tmp_path / "vllm" / name).write_bytes(b"")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = child.run("vllm_import", timeout_s=20)
    assert outcome.end == end and words in (outcome.error or ""), outcome
