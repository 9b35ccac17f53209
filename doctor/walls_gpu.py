"""Walls of the cards themselves: none, the wrong maker, no bfloat16, no FP8; and warnings about who else uses them.

Rules with their sources; facts in, walls out. What software makes of a card stands in the neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from doctor.diagnosis import BF16_PATHS, FP8_PATHS, GPU_PATHS, Help, Wall
from doctor.facts import Facts
from doctor.readings import Card, cards, hidden, vendor
from doctor.shapes import Shape
from doctor.versions import shown

BF16_FROM = (8, 0)
FP8_FROM = (8, 9)
# Capability → (billions of parameters, how much faster fp8-hf rolled out than bf16-hf), smallest first: one H200, 64 rows,
# `grpo-portable bench rollout --shape SHAPE --engines portable,portable-fp8` (reports/engines-h200).
FP8_HF_MEASURED: Mapping[tuple[int, int], tuple[tuple[float, float], ...]] = {
    (9, 0): ((0.13, 0.90), (0.6, 0.98), (1.7, 1.10), (4.0, 1.26)),
}
FP8_HF_PAYS = 1.05  # a smaller gain is not worth other numbers

_OTHER_MACHINE = Help("For more, another machine; this compares cards", "grpo-doctor --what-if all", "certain")
_NO_BF16_GFX = re.compile(r"gfx(?:[678]\d\d|90[0-69c])(?!\w)", re.IGNORECASE)
_FP8_GFX = re.compile(r"gfx(?:94\d|95\d|12\d\d)", re.IGNORECASE)
_LIST_HOLDERS = {
    "nvidia": "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
    "amd": "rocm-smi --showpids",
}
_BUSY_GIB = 2.0
_BUSY_SHARE = 0.2


def no_card(facts: Facts) -> Wall | None:
    """The wall that says there is nothing to train on but the CPU, or None. A passed trial outranks an empty list."""
    if facts.gpus is None or facts.probe("torch_cuda").ok:
        return None
    makers = [vendor(gpu) for gpu in facts.gpus]
    if cards(facts):
        return _all_hidden(facts) if hidden(facts) else None
    if "apple" in makers:
        return _wrong_maker(facts, "apple", "GPU-APPLE", "Apple GPUs have no path of their own yet (no CUDA, no vLLM)")
    if "intel" in makers:
        return _wrong_maker(
            facts, "intel", "GPU-INTEL", "Intel GPUs have no path of their own yet (torch's XPU build is not used)"
        )
    helps = [
        Help("Train a small model on the CPU: the `cpu` path is open wherever torch is installed", None, "certain"),
        _OTHER_MACHINE,
    ]
    if hidden(facts):
        helps.insert(
            0, Help("Unset CUDA_VISIBLE_DEVICES, which is set to hide every card", "unset CUDA_VISIBLE_DEVICES")
        )
    if facts.host.container:
        helps.insert(0, Help("If the host has an NVIDIA GPU, start the container with it", "docker run --gpus all ..."))
    return Wall(
        "GPU-NONE",
        GPU_PATHS,
        "This machine has no GPU that torch could use",
        ("gpus = none found", "every path but `cpu` computes on an NVIDIA or AMD GPU"),
        tuple(helps),
        "Another torch build: without a GPU the CPU build is the right one",
    )


def _wrong_maker(facts: Facts, maker: str, code: str, rule: str) -> Wall:
    names = ", ".join(g.name or "unnamed" for g in facts.gpus or () if vendor(g) == maker)
    word = maker.capitalize()
    return Wall(
        code,
        GPU_PATHS,
        f"The GPU is made by {word} ({names}), and no GPU path runs on {word} GPUs",
        (f"gpus = {names}, vendor {maker}", rule),
        (
            Help(
                "Train on the CPU: the `cpu` path works here, best with a small model",
                None,
                "certain",
            ),
            _OTHER_MACHINE,
        ),
        "Installing CUDA, vLLM or another torch build",
    )


def _all_hidden(facts: Facts) -> Wall:
    value = facts.env.get("CUDA_VISIBLE_DEVICES")
    return Wall(
        "GPU-HIDDEN",
        GPU_PATHS,
        "CUDA_VISIBLE_DEVICES hides every GPU from torch",
        (
            f"CUDA_VISIBLE_DEVICES = {value!r}",
            "CUDA shows a program only the devices named there (CUDA programming guide)",
        ),
        (Help("Unset it, or name a card", "unset CUDA_VISIBLE_DEVICES", "certain"),),
    )


def card_walls(facts: Facts, card: Card) -> Iterator[Wall]:
    """What this card's silicon closes."""
    if card.vendor == "amd":
        yield from _amd(card)
        return
    if card.capability is None:
        return
    cc = shown(card.capability)
    if card.capability < BF16_FROM:
        yield Wall(
            "BF16-HARDWARE",
            BF16_PATHS,
            f"{card.label} has compute capability {cc} and no native bfloat16 (bf16)",
            (
                f"compute_capability = {cc}",
                "bf16 needs 8.0 or newer (vLLM lists bf16 only there; torch says yes on older cards, but emulates it)",
            ),
            (
                Help(
                    "Compute in float16: the fp16 paths are made for this card and the plan picks them", None, "certain"
                ),
            ),
            "bf16=True in a trainer's config: it is accepted, and emulated slowly or refused by the first kernel",
        )
    if card.capability < FP8_FROM:
        yield _fp8_hardware(facts, card, cc)


def _fp8_hardware(facts: Facts, card: Card, cc: str) -> Wall:
    because = [
        f"compute_capability = {cc}",
        "FP8 E4M3 matrix units start at 8.9: Ada, Hopper, Blackwell (vLLM's table of quantisation by hardware)",
    ]
    trial = facts.probe("fp8_matmul")
    if trial.ok is False:
        because.append(f"the fp8 matmul trial failed too: {trial.error or 'no message'}")
    below = "16-bit weights" if card.capability and card.capability >= BF16_FROM else "float16 or 4-bit weights"
    return Wall(
        "FP8-HARDWARE",
        FP8_PATHS,
        f"{card.label} has compute capability {cc}, and FP8 needs 8.9",
        tuple(because),
        (Help(f"Use {below}: the plan does", None, "certain"),),
        "FP8 weight-only kernels (Marlin) save memory in vLLM from 7.5 or 8.0 on, but compute no faster; a newer CUDA or vLLM "
        "adds no matrix units",
    )


def _amd(card: Card) -> Iterator[Wall]:
    gfx = card.gpu.gfx
    if gfx and _NO_BF16_GFX.match(gfx):
        yield Wall(
            "BF16-HARDWARE",
            BF16_PATHS,
            f"{card.label} is {gfx}, which has no native bfloat16 (bf16)",
            (f"gfx = {gfx}", "bf16 starts with gfx908, the MI100 (AMD's CDNA white paper)"),
            (Help("Compute in float16: the plan picks the fp16 path", None, "certain"),),
        )
    if gfx and not _FP8_GFX.match(gfx):
        yield Wall(
            "FP8-AMD",
            FP8_PATHS,
            f"{card.label} is {gfx}, which has no FP8 matrix units that vLLM uses",
            (
                f"gfx = {gfx}",
                "vLLM takes FP8 on gfx94x, gfx95x and gfx12xx only (vllm/platforms/rocm.py, supports_fp8)",
            ),
            (Help("Use 16-bit weights: the plan does", None, "certain"),),
        )
    else:
        yield Wall(
            "FP8-AMD",
            ("fp8-hf",),
            f"{card.label} is an AMD card, and the portable FP8 copy is made for NVIDIA's E4M3",
            (
                f"vendor = amd{f', gfx = {gfx}' if gfx else ''}",
                "MI300 computes the fnuz variant of FP8 (vLLM, is_fp8_fnuz)",
            ),
            (Help("Use 16-bit weights: the plan does", None, "certain"),),
        )


def unproven_fp8(card: Card, shape: Shape | None = None) -> Wall | None:
    """fp8-hf is offered only where it was measured to pay: on this kind of card, with a model of at least such a size."""
    if card.vendor == "amd" or card.capability is None or card.capability < FP8_FROM:
        return None
    paid = [size for size, gain in FP8_HF_MEASURED.get(card.capability, ()) if gain >= FP8_HF_PAYS]
    if paid and (shape is None or shape.params >= 0.9e9 * paid[0]):  # a tenth less: sizes in names are round
        return None
    because = (
        "at rollout batch sizes casting to FP8 can cost more than its matmuls save; the path opens where a "
        "measurement says otherwise (FP8_HF_MEASURED in doctor/walls_gpu.py)"
    )
    what = f"a model below {paid[0]:g} B parameters" if paid else "this kind of card"
    size = (f"{shape.params / 1e9:.2g} B parameters",) if paid and shape is not None else ()
    return Wall(
        "FP8-HF-UNPROVEN",
        ("fp8-hf",),
        f"Without vLLM, FP8 rollouts have not been measured to be faster than bfloat16 ones on {what}",
        (f"compute_capability = {shown(card.capability)}", *size, because),
        (Help("Use bf16-hf or qlora-hf; FP8 pays off with vLLM", None, "certain"),),
    )


def warnings(facts: Facts) -> Iterator[Wall]:
    """What closes nothing but explains slowness, a start that is refused, or a wrong card."""
    ours = cards(facts) or ()
    for card in ours:
        yield from filter(None, (_busy(facts, card), _unified(card)))
    yield from filter(None, (_order(facts, ours), _mig(ours)))


def held_gib(card: Card) -> float | None:
    """GiB that somebody else holds, None when that is unknown or no more than a desktop takes."""
    total, free = card.gpu.total_gib, card.gpu.free_gib
    if card.gpu.unified_memory or total is None or free is None:
        return None
    held = total - free
    return held if held > max(_BUSY_GIB, _BUSY_SHARE * total) else None


def _busy(facts: Facts, card: Card) -> Wall | None:
    held = held_gib(card)
    if held is None:
        return None
    holders = [h for h in _rows(facts.extra.get("memory_holders")) if h.get("gpu") in (card.index, None)]
    named = ", ".join(f"{h.get('name')} ({h.get('gib')} GiB)" for h in holders[:3])
    return Wall(
        "GPU-BUSY",
        (),
        f"Other programs hold {held:.1f} GiB of {card.label}: {card.gpu.free_gib:.1f} of {card.gpu.total_gib:.1f} GiB are free",
        (
            f"free_gib = {card.gpu.free_gib}, total_gib = {card.gpu.total_gib}"
            + (f"; held by {named}" if named else ""),
            "the plan counts free memory, and vLLM refuses to start when free < its share x total (vllm#20305)",
        ),
        (Help("Stop what holds it, then ask again", _LIST_HOLDERS["amd" if card.vendor == "amd" else "nvidia"]),),
        "A smaller gpu_memory_utilization helps vLLM start, but gives it no more room",
    )


def _rows(raw: Any) -> list[Mapping[str, Any]]:
    return [r for r in raw if isinstance(r, Mapping)] if isinstance(raw, (list, tuple)) else []


def _unified(card: Card) -> Wall | None:
    if not card.gpu.unified_memory:
        return None
    return Wall(
        "GPU-UNIFIED",
        (),
        f"{card.label} shares its memory with the system",
        (
            "unified_memory = true",
            "what the GPU takes is gone for the system: a share of it is no bound, and the host can hang",
        ),
        (Help("Leave the system a few GiB: close other programs and keep rollout_rows modest", None, "likely"),),
    )


def _mig(ours: tuple[Card, ...]) -> Wall | None:
    sliced = next((c for c in ours if c.gpu.mig), None)
    if sliced is None:
        return None
    return Wall(
        "GPU-MIG",
        (),
        f"{sliced.label} is a MIG slice, and tools that ask NVML see the parent's memory",
        ("mig = true", "NVML by index answers for the whole card; only CUDA knows the slice (vLLM PR 41776)"),
        (Help("Name the slice by number, not by UUID, where vLLM is used", "export CUDA_VISIBLE_DEVICES=0"),),
    )


def _order(facts: Facts, ours: tuple[Card, ...]) -> Wall | None:
    kinds = {(c.gpu.name, c.capability) for c in ours}
    if len(kinds) < 2 or facts.env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return None
    listed = "; ".join(c.label for c in ours)
    return Wall(
        "GPU-ORDER",
        (),
        "The cards differ, and CUDA counts them by speed while NVML and vLLM's checks count by slot",
        (
            f"gpus = {listed}",
            "CUDA_DEVICE_ORDER is not PCI_BUS_ID, so index 0 may mean two different cards (vLLM PR 53834)",
        ),
        (
            Help(
                "Make both count alike before anything imports torch", "export CUDA_DEVICE_ORDER=PCI_BUS_ID", "certain"
            ),
        ),
    )
