"""Walls from a proof (`doctor.prove`): a tiny real step of a path that failed here speaks louder than any rule."""

from __future__ import annotations

from dataclasses import dataclass

from doctor.diagnosis import GPU_PATHS, PATHS, Help, Wall
from doctor.facts import Facts

_SIXTEEN_BIT = tuple(p for p in GPU_PATHS if p != "qlora-hf")
_PORTABLE = tuple(p for p in GPU_PATHS if p.endswith("-hf"))


@dataclass(frozen=True)
class Trial:
    """What one failed trial says: the wall's code, the paths it closes, the fact, why it counts, what to do."""

    code: str
    closes: tuple[str, ...]
    fact: str
    rule: str
    help: Help


_SET = "grpo-doctor --install-plan"
TRIALS = {
    "vllm_fp8_start": Trial(
        "VLLM-FP8-START",
        ("fp8-vllm",),
        "vLLM did not start with FP8 weights on a tiny model",
        "the fp8-vllm path quantises weights to FP8 when vLLM starts; without FP8 it may well start",
        Help("Take bf16-vllm, where it is open: the plan does", None, "certain"),
    ),
    "attention": Trial(
        "PROOF-ATTENTION",
        _PORTABLE,
        "torch's attention failed or answered wrong on a tiny decode step",
        "the portable engine calls scaled_dot_product_attention causally and over a masked cache",
        Help("Install a torch build made for this card", _SET, "likely"),
    ),
    "lora_step": Trial(
        "PROOF-LORA",
        _SIXTEEN_BIT,
        "Three LoRA updates of a tiny model failed on this GPU",
        "every path with a 16-bit base trains exactly so: autocast, backward, AdamW",
        Help("Install a set that belongs together, in a fresh environment", _SET, "likely"),
    ),
    "qlora_step": Trial(
        "PROOF-QLORA",
        ("qlora-hf",),
        "Three LoRA updates of a tiny model on an NF4 base failed on this GPU",
        "qlora-hf trains exactly so: the gradient goes through bitsandbytes' 4-bit product",
        Help("Upgrade bitsandbytes", 'pip install -U "bitsandbytes>=0.50.2"', "try"),
    ),
    "cpu_step": Trial(
        "PROOF-CPU",
        (PATHS[-1],),
        "Three LoRA updates of a tiny model failed on the CPU",
        "with nothing but the CPU involved, the installed packages themselves do not work together",
        Help("Install a set that belongs together, in a fresh environment", _SET, "likely"),
    ),
    "cuda_graph": Trial(
        "PROOF-GRAPH",
        (),
        "A CUDA graph could not be captured and replayed, so decoding runs step by step and slower",
        "the portable engine captures one graph a token step and runs without one where that fails",
        Help("Install a torch build made for this driver and card", _SET, "try"),
    ),
}


def proof_walls(facts: Facts) -> list[Wall]:
    """One wall for each trial of a proof that failed; none for what was not tried."""
    return [
        _wall(name, trial, facts.probe(name).error) for name, trial in TRIALS.items() if facts.probe(name).ok is False
    ]


def _wall(name: str, trial: Trial, error: str | None) -> Wall:
    said = f'{name} failed: "{error}"' if error else f"{name} failed without a message"
    return Wall(trial.code, trial.closes, trial.fact, (said, trial.rule), (trial.help,))
