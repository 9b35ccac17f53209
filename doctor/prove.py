"""One tiny real step of a path, in child processes with time limits; what happens becomes probe facts.

| probe | what is run | a failure speaks against |
|---|---|---|
| fp8_matmul | one scaled matmul | fp8-vllm, fp8-hf |
| bnb_4bit | one NF4 matmul | qlora-hf |
| vllm_start | vLLM on a two-layer model with random weights, four tokens | the vLLM paths |
| vllm_fp8_start | the same, quantised on the way in as training does it: FP8, one scale a row | fp8-vllm |
| attention | sdpa: causal, and one token over a masked cache | the paths of the portable engine on a GPU |
| cuda_graph | capture and replay | nothing: the engine runs without, slower |
| lora_step | three LoRA updates in the path's type | every GPU path with a 16-bit base |
| qlora_step | the same on an NF4 base | qlora-hf |
| cpu_step | the same on the CPU | cpu |

The diagnosis is made again with the new facts; where that changes the choice, the new one is proved too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from doctor import child
from doctor.child import Outcome
from doctor.diagnosis import Diagnosis
from doctor.facts import Facts, Probe
from doctor.probes import judge

_STEP_S = 60.0
_VLLM_S = 180.0
FP8_FORM = "fp8_per_channel"  # vLLM's name of what training asks of it (the recipe's `fp8_scales: row`)
_ROUNDS = 4  # a proof may knock out one path after the other; more than this many in a row helps nobody


@dataclass(frozen=True)
class Step:
    """One trial of a proof: the probe it fills, the trial and its arguments, seconds a stage may take."""

    probe: str
    trial: str
    args: tuple[str, ...] = ()
    timeout_s: float = _STEP_S


def steps(path: str, dtype: str) -> tuple[Step, ...]:
    """The steps that prove a path, cheapest first. `dtype` is what the plan computes in."""
    if path == "cpu":
        return (Step("cpu_step", "lora_step", ("cpu", dtype)),)
    matmul = {"fp8-vllm": (Step("fp8_matmul", "cuda"),), "fp8-hf": (Step("fp8_matmul", "cuda"),)}.get(path, ())
    four_bit = path == "qlora-hf"
    update = Step(
        "qlora_step" if four_bit else "lora_step", "lora_step", ("cuda", dtype, "nf4" if four_bit else "plain")
    )
    if path.endswith("-vllm"):
        name, form = ("vllm_fp8_start", FP8_FORM) if path == "fp8-vllm" else ("vllm_start", "none")
        start = Step(name, "vllm_start", (form, dtype), _VLLM_S)
        return (*matmul, update, start)
    nf4 = (Step("bnb_4bit", "bnb"),) if four_bit else ()
    engine = (Step("attention", "attention", (dtype, "cuda")), Step("cuda_graph", "cuda_graph", (dtype,)))
    return (*matmul, *nf4, *engine, update)


def prove(
    diagnosis: Diagnosis,
    judge_again: Callable[[Facts], Diagnosis],
    *,
    path: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """The diagnosis after trying `path`, or the chosen path and whatever is chosen once a trial has failed."""
    proved: set[str] = set()
    for _ in range(_ROUNDS):
        target = path or diagnosis.plan.path
        if target is None or target in proved:
            break
        proved.add(target)
        facts = _prove_path(diagnosis, target, say)
        diagnosis = judge_again(facts)
        if path is not None:
            break
    return diagnosis


def _prove_path(diagnosis: Diagnosis, path: str, say: Callable[[str], None]) -> Facts:
    facts = diagnosis.facts
    env = _one_card(facts, diagnosis.plan.gpus)
    for step in steps(path, _dtype(diagnosis, path)):
        facts = _run_step(facts, path, step, env, say)
        start = facts.probe("vllm_fp8_start")
        if step.probe == "vllm_fp8_start":
            if start.ok is False:  # FP8 alone, or vLLM altogether? The plain start tells
                facts = _run_step(
                    facts, path, Step("vllm_start", "vllm_start", ("none", step.args[1]), _VLLM_S), env, say
                )
            elif start.ok:
                facts = _with_probe(facts, "vllm_start", start)
        elif facts.probe(step.probe).ok is False and step.probe != "cuda_graph":
            break  # the path is out; the next steps would only repeat it
    return facts


def _dtype(diagnosis: Diagnosis, path: str) -> str:
    """What the path computes in: the plan's own word for the chosen path, else what the path's name says."""
    if path == diagnosis.plan.path and diagnosis.plan.dtype:
        return diagnosis.plan.dtype
    if path == "cpu":
        return "float32"
    if path.startswith("fp16"):
        return "float16"
    capability = next((g.compute_capability for g in diagnosis.facts.gpus or () if g.compute_capability), None)
    major = (capability or "9").split(".")[0]
    old = major.isdigit() and int(major) < 8
    return "float16" if old else "bfloat16"


def _one_card(facts: Facts, gpus: tuple[int, ...]) -> dict[str, str]:
    """Shows the children only the card the plan starts on; device 0 there is that card."""
    if not gpus or len(facts.gpus or ()) < 2:
        return {}
    names = [w.strip() for w in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if w.strip()]
    if names:
        return {"CUDA_VISIBLE_DEVICES": names[gpus[0]]} if gpus[0] < len(names) else {}
    return {"CUDA_VISIBLE_DEVICES": str(gpus[0])}


def _run_step(facts: Facts, path: str, step: Step, env: Mapping[str, str], say: Callable[[str], None]) -> Facts:
    say(f"proving {path}: {step.probe} (at most {step.timeout_s:g} s a stage)")
    outcome = child.run(step.trial, *step.args, timeout_s=step.timeout_s, env=env)
    name = {"vllm_fp8_start": "vllm_start", "qlora_step": "lora_step", "cpu_step": "lora_step"}.get(
        step.probe, step.probe
    )
    result, why = judge(name, outcome)
    facts = _with_probe(facts, step.probe, result)
    return _noted(facts, path, step.probe, result, outcome, why)


def _with_probe(facts: Facts, name: str, probe: Probe) -> Facts:
    return replace(facts, probes=MappingProxyType({**facts.probes, name: probe}))


def _noted(facts: Facts, path: str, name: str, probe: Probe, outcome: Outcome, why: str | None) -> Facts:
    """Keeps in `extra` how long the step took, and why nothing is known where that is so."""
    extra: dict[str, Any] = dict(facts.extra)
    word = {True: "ok", False: "failed", None: "unknown"}[probe.ok]
    proof = _copy(extra.get("proved"))
    proof[path] = {**_copy(proof.get(path)), name: f"{word} in {outcome.seconds:.1f} s"}
    extra["proved"] = proof
    for told, key in (("through", "step_through"), ("attention_forms", "attention_forms")):
        if told in outcome.told:
            extra[key] = outcome.told[told]
    if why:
        extra["unknown"] = {**_copy(extra.get("unknown")), f"probes.{name}": why}
    return replace(facts, extra=MappingProxyType(extra))


def _copy(raw: Any) -> dict[str, Any]:
    return dict(raw) if isinstance(raw, Mapping) else {}
