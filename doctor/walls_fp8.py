"""Walls of FP8 software: the trial matmul, FlashInfer's toolkit gate on SM 12.x; and warnings about nvcc.

FP8 is two questions: does the silicon have it (`walls_gpu`), and does this software have code for it. A toolkit fault other
than the 12.9 gate closes nothing: with VLLM_USE_FLASHINFER_SAMPLER=0 vLLM needs no compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from doctor.diagnosis import FP8_PATHS, Help, Wall
from doctor.facts import Facts
from doctor.readings import (
    Card,
    branch_for,
    build_cuda,
    cards,
    driver_cuda,
    driver_shown,
    driver_upgrade,
    linux,
    nvcc,
    nvcc_absent,
    nvcc_shown,
)
from doctor.versions import Pair, base, shown, version
from doctor.walls_gpu import FP8_FROM

_GATE: Pair = (12, 9)
_FLASHINFER_FROM: Pair = (7, 5)
_FLASHINFER = (
    "flashinfer asks CUDA_HOME, CUDA_PATH, the nvcc on PATH, then /usr/local/cuda, and torch only where none has nvcc"
)
_NATIVE = Help("Keep vLLM from compiling its sampler", "export VLLM_USE_FLASHINFER_SAMPLER=0", "certain")
_SM90_ONLY = re.compile(r"cutlass|arch conditional|TMA descriptor|fbgemm|f8f8bf16", re.IGNORECASE)
_BELOW = re.compile(r"8\.9|L4 and higher|fp8e4nv|not supported in this architecture", re.IGNORECASE)


def matmul_wall(facts: Facts) -> Wall | None:
    """One small FP8 matmul failed on a card that should have it. On older cards the hardware wall tells it."""
    trial = facts.probe("fp8_matmul")
    ours = [c for c in cards(facts) or () if c.nvidia]
    known = [c.capability for c in ours if c.capability is not None]
    if trial.ok is not False or (known and len(known) == len(ours) and max(known) < FP8_FROM):
        return None
    error = trial.error or ""
    rule = "a card may pass every capability test and still have no kernel in the library; one small matmul is the honest test"
    if _SM90_ONLY.search(error):
        rule = "fbgemm's row-wise FP8 kernels are built for sm_90 and fail on 8.9, 10.x and 12.x (unsloth#3776, #3863, #3902)"
    elif _BELOW.search(error):
        rule = "the library asks for FP8 units, which start at capability 8.9"
    return Wall(
        "FP8-MATMUL",
        FP8_PATHS,
        "A small FP8 matmul failed on this machine",
        (f'fp8_matmul failed: "{error or "no message"}"', rule),
        (
            Help("Train in bfloat16: the plan does", None, "certain"),
            Help("Install a torch, vLLM and torchao that belong together", "grpo-doctor --install-plan", "likely"),
            Help("Under Unsloth, block FP8 does without fbgemm", "export UNSLOTH_HAS_FBGEMM=0", "try"),
        ),
        "Another FP8 checkpoint: the kernel is what is missing",
    )


def gate(facts: Facts, card: Card) -> tuple[Pair, str] | None:
    """The CUDA version FlashInfer asks for on this card, and where that stands; None where it asks for nothing special."""
    if not card.nvidia or card.capability is None or card.capability[0] != 12:
        return None
    if card.capability == (12, 0) and _flashinfer_072(facts):
        return (12, 8), "flashinfer 0.7.2 lets 12.8 pass on SM 12.0 (its compilation_context.py; flashinfer PR 3633)"
    return _GATE, "flashinfer refuses SM 12.x below CUDA 12.9 (its compilation_context.py, up to 0.7.0)"


def _flashinfer_072(facts: Facts) -> bool:
    """Whether flashinfer is 0.7.2 or newer: as installed, else as the installed vLLM pins it (from 0.33 on)."""
    flashinfer, vllm = version(facts.version("flashinfer")), version(facts.version("vllm"))
    if flashinfer is not None:
        return base(flashinfer) >= Version("0.7.2")
    return vllm is not None and base(vllm) >= Version("0.33")


def gate_wall(facts: Facts, card: Card) -> Wall | None:
    """FlashInfer's toolkit gate: its FP8 kernels are compiled at run time, and it asks nvcc before it asks torch."""
    asked = gate(facts, card)
    if asked is None or linux(facts) is False:
        return None
    needed, source = asked
    found = nvcc(facts)
    if found is not None:
        if found >= needed:
            return None
        fact = f"{nvcc_shown(facts)} is older than the CUDA {shown(needed)} that FlashInfer's FP8 kernels need on {card.label}"
        because = (
            f"compute_capability = {shown(card.capability or ())}; nvcc = {facts.toolkit.nvcc}",
            source,
            _FLASHINFER,
        )
    else:
        torch = build_cuda(facts)
        if not nvcc_absent(facts) or torch is None or torch >= needed or facts.version("vllm") is None:
            return None
        fact = f"torch is a CUDA {shown(torch)} build, and FlashInfer's FP8 kernels need CUDA {shown(needed)} on {card.label}"
        because = (
            f"compute_capability = {shown(card.capability or ())}; nvcc = absent; torch's CUDA = {shown(torch)}",
            source,
            _FLASHINFER,
        )
    return Wall(
        "FP8-CUDA-129",
        ("fp8-vllm",),
        fact,
        because,
        _gate_helps(facts, needed),
        "A newer driver or torch alone: FlashInfer asks nvcc first" if found is not None else None,
    )


def _gate_helps(facts: Facts, needed: Pair) -> tuple[Help, ...]:
    serves, torch = driver_cuda(facts), build_cuda(facts)
    # of torch's major, whose libraries it is loaded beside
    best = needed if (torch or serves or needed) < (13, 0) else (13, 0)
    package = f"cuda-nvcc-{best[0]}-{best[1]}"
    toolkit = f"Put a CUDA toolkit {shown(needed)} or newer first (no newer than the driver's CUDA)"
    if serves is not None and serves < best:  # what a newer nvcc compiles may not load under an older driver
        toolkit = f"{driver_upgrade(facts, branch_for(best))}, then put a CUDA toolkit {shown(best)} first"
    helps = [
        Help(toolkit, f"sudo apt-get install {package} && export CUDA_HOME=/usr/local/cuda-{shown(best)}", "likely"),
        Help(
            "Or stay with bfloat16 in vLLM, without its compiled sampler",
            "export VLLM_USE_FLASHINFER_SAMPLER=0",
            "certain",
        ),
    ]
    if torch and torch >= needed and nvcc(facts):
        helps.insert(
            1,
            Help(
                "Or take the old nvcc off PATH and CUDA_HOME: torch's own CUDA is new enough",
                "unset CUDA_HOME CUDA_PATH",
                "try",
            ),
        )
    return tuple(helps)


def warnings(facts: Facts) -> Iterator[Wall]:
    """What a toolkit does to vLLM's run-time compiled kernels. Closes nothing."""
    ours = [c for c in cards(facts) or () if c.nvidia and (c.capability is None or c.capability >= _FLASHINFER_FROM)]
    if not ours or facts.version("vllm") is None or facts.probe("vllm_import").ok is False:
        return
    found, torch, serves = nvcc(facts), build_cuda(facts), driver_cuda(facts)
    if nvcc_absent(facts) and not facts.absent("flashinfer"):
        yield _nvcc_absent(facts)
    if found and serves and found > serves:
        yield _nvcc_newer(facts, found, serves)
    elif found and (found < (12, 8) or (torch and found[0] < torch[0])) and not any(gate_wall(facts, c) for c in ours):
        yield _nvcc_old(facts, torch)


def _nvcc_absent(facts: Facts) -> Wall:
    flashinfer = facts.version("flashinfer")
    cubin = f'pip install "flashinfer-cubin=={flashinfer.partition("+")[0]}"' if flashinfer else None
    return Wall(
        "NVCC-ABSENT",
        (),
        "There is no nvcc, and FlashInfer compiles some of vLLM's kernels with it at the first start",
        (
            "toolkit = absent",
            "without it the sampler's compilation stops the start (vllm#49497); vLLM has its own sampler",
        ),
        (
            _NATIVE,
            Help(
                "Or install FlashInfer's compiled kernels, of exactly its version",
                cubin,
            ),
        ),
    )


def _nvcc_newer(facts: Facts, found: Pair, serves: Pair) -> Wall:
    what = "Code" if found[0] > serves[0] else "PTX"
    return Wall(
        "NVCC-NEWER",
        (),
        f"{nvcc_shown(facts)} is newer than the CUDA {shown(serves)} that the driver serves",
        (
            f"nvcc = {facts.toolkit.nvcc}; {driver_shown(facts)}",
            f"{what} compiled by a newer CUDA cannot be loaded by an older driver (vllm#22008)",
        ),
        (_NATIVE, Help(f"Or point CUDA_HOME at a toolkit of CUDA {shown(serves)} or older", None, "likely")),
        "A newer torch or vLLM: their compiled code loads, what nvcc compiles here does not",
    )


def _nvcc_old(facts: Facts, torch: Pair | None) -> Wall:
    beside = f" beside torch's CUDA {shown(torch)}" if torch else ""
    return Wall(
        "NVCC-OLD",
        (),
        f"{nvcc_shown(facts)} is too old{beside} for the kernels that FlashInfer compiles",
        (
            f"nvcc = {facts.toolkit.nvcc}",
            "FlashInfer passes flags that nvcc knows from 12.8 on (flashinfer#1532, #5479)",
            _FLASHINFER,
        ),
        (_NATIVE, Help("Or install a toolkit of torch's CUDA version and point CUDA_HOME at it", None, "likely")),
    )


def on_the_fly(facts: Facts) -> Wall | None:
    """vLLM before 0.12 takes FP8 checkpoints but does not quantise LoRA-ready weights on the way in."""
    v = version(facts.version("vllm"))
    able = any(c.capability is None or c.capability >= FP8_FROM for c in cards(facts) or ())
    if v is None or base(v) >= Version("0.12") or not able:
        return None
    return Wall(
        "FP8-ON-THE-FLY",
        (),
        f"vllm {v} does not quantise to FP8 on the fly as GRPO needs it",
        (f"packages.vllm = {v}", "on-the-fly FP8 with LoRA came with vLLM 0.12 (unsloth_zoo/vllm_utils.py)"),
        (Help("Use a checkpoint that is FP8 already, or a newer vLLM", "grpo-doctor --install-plan", "likely"),),
    )
