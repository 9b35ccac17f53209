"""Dated sets of packages that go together, and for which machines. Data and one pure rule each; nothing is installed.

Each set was resolved with uv from PyPI's metadata on `RESOLVED_ON`, for every Python and platform named in `evidence`.
PyTorch's own index could not be asked, so what stands on it is from PyTorch's release matrices (pull requests 175253, 187075).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from doctor.cards import CardError, find_card
from doctor.facts import Facts
from doctor.readings import Card, cards, driver_cuda, driver_shown, jetson, lacks_glibc
from doctor.versions import Pair, pair, shown

RESOLVED_ON = "2026-11-29"
INDEX = "https://download.pytorch.org/whl"
PYTHON = ((3, 11), (3, 14))  # TRL 1.15 needs 3.11; vLLM, unsloth and this project stop before 3.15
_COMMON = {"peft": "0.21.2", "accelerate": "1.15.0", "bitsandbytes": "0.50.2"}
_NEWEST = {"trl": "1.16.0", "transformers": "5.24.0", **_COMMON, "datasets": "5.2.0"}
_LINUX = ("linux", "wsl2")


@dataclass(frozen=True)
class PackageSet:
    """One set. `capability` is the range of compute capabilities its torch has code for; `path` the kind of run it brings."""

    key: str
    title: str
    torch: str
    build: str  # cu130 | cu128 | cu126 | rocm7.2 | jp6 | cpu | pypi
    pins: dict[str, str]
    extra: str  # of grpo-portable: train | vllm | unsloth
    platforms: tuple[str, ...]
    driver: Pair | None = None  # the CUDA the driver must serve
    capability: tuple[Pair, Pair] | None = None
    glibc: Pair | None = None
    evidence: str = ""
    ceilings: tuple[str, ...] = field(default=())  # why nothing newer
    python_to: Pair = PYTHON[1]
    dropped: tuple[tuple[str, str], ...] = ()  # platform, package that has no wheel there

    def packages(self, platform: str) -> dict[str, str]:
        """Name → version, torch first, without what this platform has no wheel of."""
        left_out = {name for where, name in self.dropped if where == platform}
        return {"torch": self.torch, **{n: v for n, v in self.pins.items() if n not in left_out}}

    def index(self, platform: str, arch: str | None) -> str | None:
        """The index torch comes from; None is PyPI, whose own build is the right one."""
        if self.build == "pypi" or platform == "darwin":
            return None
        if self.build == "jp6":
            return "https://pypi.jetson-ai-lab.io/jp6/cu126"
        if self.build == "cu130" and platform in _LINUX:
            return None  # PyPI's torch 2.13 for Linux is the CUDA 13.0 build, on x86-64 and aarch64
        if self.build == "cpu" and platform == "windows":
            return None  # PyPI's torch for Windows is CPU-only
        return f"{INDEX}/{self.build}"


_TORCH_CEILINGS = ("torch 2.15.0 (CUDA 13.2) resolves as well; 2.13.0 is what this project is tested on",)
_VLLM_CEILINGS = (
    "vLLM 0.32.0 and 0.33.0 are outside TRL 1.16's declared range (0.22.0 to 0.31.0), and 0.33 needs torch 2.14",
    "torch 2.14 and 2.15: vLLM 0.31.0 pins torch 2.13.0, and no released vLLM takes 2.15",
    "transformers 5.18 and newer: vLLM 0.31.0 asks for <5.18",
)
_UNSLOTH_CEILINGS = (
    "TRL 1.16.0: unsloth 2026.10.9 asks for <=1.15.0",
    "datasets 5: unsloth 2026.10.9 asks for <5.0",
    *_VLLM_CEILINGS[1:],
)
SETS: tuple[PackageSet, ...] = (
    PackageSet(
        "vllm",
        "vLLM rollouts (fp8-vllm, bf16-vllm)",
        "2.13.0",
        "cu130",
        {"vllm": "0.31.0", "trl": "1.16.0", "transformers": "5.17.0", **_COMMON, "torchao": "0.18.0", "datasets": "5.2.0"},
        "vllm",
        _LINUX,
        driver=(13, 0),
        capability=((7, 5), (12, 9)),
        glibc=(2, 31),
        evidence="by metadata, not run: resolves on Python 3.11 to 3.14, x86-64 from glibc 2.31 (llguidance has no older "
        "wheel), aarch64 with 2.35",
        ceilings=_VLLM_CEILINGS,
    ),
    PackageSet(
        "unsloth",
        "Unsloth with vLLM (one copy of the weights for both)",
        "2.13.0",
        "cu130",
        {
            "vllm": "0.31.0", "unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "trl": "1.15.0", "transformers": "5.17.0",
            **_COMMON, "torchao": "0.18.0", "datasets": "4.8.5",
        },
        "vllm,unsloth",
        _LINUX,
        driver=(13, 0),
        capability=((7, 5), (12, 9)),
        glibc=(2, 31),
        evidence="by metadata, not run: resolves on Python 3.11 to 3.14, x86-64 from glibc 2.31, aarch64 with 2.35",
        ceilings=_UNSLOTH_CEILINGS,
    ),
    PackageSet(
        "vllm-0.24",
        "vLLM 0.24 on torch 2.11, older than need be",
        "2.11.0",
        "cu130",
        {"vllm": "0.24.0", **_NEWEST, "torchao": "0.18.0"},
        "vllm",
        _LINUX,
        driver=(13, 0),
        capability=((7, 5), (12, 9)),
        glibc=(2, 31),
        evidence="vLLM 0.24.0 with torch 2.11.0 generated on an H200 (driver 580, Python 3.12), training with the set was "
        "not tried there; "
        "resolves on Python 3.11 to 3.13, x86-64 from glibc 2.31, aarch64 with 2.35",
        ceilings=("vLLM 0.24.0 pins torch 2.11.0; the vllm set is the newer one",),
        python_to=(3, 13),
    ),
    PackageSet(
        "portable",
        "the portable engine on CUDA 13.0, without vLLM (fp8-hf, bf16-hf, qlora-hf)",
        "2.13.0",
        "cu130",
        {**_NEWEST, "torchao": "0.18.0"},
        "train",
        (*_LINUX, "windows"),
        driver=(13, 0),
        capability=((7, 5), (12, 9)),
        glibc=(2, 28),
        evidence="resolves on Python 3.11 to 3.14, Linux x86-64 and aarch64, Windows; the CPU build of it runs our tests",
        ceilings=_TORCH_CEILINGS,
        dropped=(("windows", "torchao"),),
    ),
    PackageSet(
        "cu128",
        "the portable engine on CUDA 12.8, without vLLM, for drivers from 570 on",
        "2.10.0",
        "cu128",
        {**_NEWEST, "torchao": "0.16.0"},
        "train",
        (*_LINUX, "windows"),
        driver=(12, 8),
        capability=((7, 5), (12, 9)),
        glibc=(2, 28),
        evidence="resolves on Python 3.11 to 3.14, Linux x86-64 and Windows",
        ceilings=(
            "torch 2.11 is the last with a CUDA 12.8 build, and PyPI's own is CUDA 13.0 from there on (driver 580)",
            "vLLM 0.19.1 is the last on CUDA 12 from PyPI, and TRL 1.15 and 1.16 ask for 0.21 or 0.22 at least",
        ),
        dropped=(("windows", "torchao"),),
    ),
    PackageSet(
        "cu126",
        "the portable engine on CUDA 12.6, without vLLM, for cards before Turing and older drivers",
        "2.13.0",
        "cu126",
        {**_NEWEST, "torchao": "0.18.0"},
        "train",
        (*_LINUX, "windows"),
        driver=(12, 0),
        capability=((5, 0), (9, 0)),
        glibc=(2, 28),
        evidence="resolves with PyPI's torch 2.13.0; that a CUDA 12.6 build exists is from PyTorch's release matrix",
        ceilings=(
            "torch 2.15 has no CUDA 12.6 build any more (pytorch#190385), so no code for cards before Turing",
            "CUDA 13 builds start at compute capability 7.5 and at driver 580",
        ),
        dropped=(("windows", "torchao"),),
    ),
    PackageSet(
        "jetson",
        "the portable engine on JetPack 6, torch from NVIDIA's Jetson index",
        "2.8.0",
        "jp6",
        _NEWEST,
        "train",
        ("linux",),
        driver=(12, 0),
        capability=((8, 7), (8, 7)),
        evidence="not resolved: the index could not be asked; torch 2.8.0 is what reports name there",
        ceilings=("wheels for Arm servers, PyPI's among them, do not know JetPack 6's integrated GPU",),
    ),
    PackageSet(
        "rocm",
        "the portable engine on AMD ROCm 7.2",
        "2.13.0",
        "rocm7.2",
        _NEWEST,
        "train",
        _LINUX,
        evidence="not resolved: the index could not be asked; ROCm 7.2 for torch 2.13 is from PyTorch's release matrix",
        ceilings=("older targets (gfx906 among them) are not in this build's list: see rocm.docs.amd.com for theirs",),
    ),
    PackageSet(
        "cpu",
        "the CPU, for small models and for trying things out",
        "2.13.0",
        "cpu",
        {**_NEWEST, "torchao": "0.18.0"},
        "train",
        (*_LINUX, "windows", "darwin"),
        glibc=(2, 28),
        evidence="resolves on Python 3.11 to 3.14, Linux, Windows and macOS 14 on Apple silicon; runs our tests",
        ceilings=_TORCH_CEILINGS,
        dropped=(("windows", "torchao"),),
    ),
)  # fmt: skip
BY_KEY = {s.key: s for s in SETS}


def best_card(facts: Facts) -> Card | None:
    """The card the set is chosen for: the highest capability, then the most memory."""
    known = [replace(c, capability=c.capability or _by_name(c)) for c in cards(facts) or ()]
    return max(known, key=lambda c: (c.capability or (0, 0), c.gpu.total_gib or 0.0), default=None)


def _by_name(card: Card) -> Pair | None:
    """The capability of a card that only its name is known of."""
    if not card.nvidia or not card.gpu.name:
        return None
    try:
        return find_card(card.gpu.name)[0].pair
    except CardError:
        return None


def python_serves(facts: Facts) -> bool:
    """Whether the sets are made for this Python; unknown counts as yes."""
    here = pair(facts.host.python)
    return here is None or PYTHON[0] <= here <= PYTHON[1]


def refusals(wanted: PackageSet, facts: Facts) -> Iterator[str]:
    """Why a set does not serve this machine, one clause each; nothing where it does. Unknown never refuses."""
    host, card = facts.host, best_card(facts)
    platform = (host.platform or "linux").lower()
    if platform not in wanted.platforms:
        yield f"its packages have no wheels for {platform}" if wanted.extra != "train" else f"not for {platform}"
    if platform == "darwin" and host.arch == "x86_64":
        yield "torch has had no wheels for Intel Macs since 2.3"
    if old := lacks_glibc(facts, wanted.glibc):
        yield f"its wheels need {old}"
    python = pair(host.python)
    if python and wanted.python_to < python <= PYTHON[1]:
        yield f"it does not resolve on Python {shown(python)}"
    if wanted.key == "cpu":
        return
    if card is None and facts.gpus is not None:
        yield "no GPU was found"
        return
    amd = card is not None and not card.nvidia
    if amd or wanted.key == "rocm":
        if not (amd and wanted.key == "rocm"):
            yield "an AMD card needs a ROCm build" if amd else "it is for AMD cards"
        return
    yield from _cuda_refusals(wanted, facts, card)


def _cuda_refusals(wanted: PackageSet, facts: Facts, card: Card | None) -> Iterator[str]:
    serves, capability = driver_cuda(facts), card.capability if card else None
    if jetson(facts) and (serves or (12, 6)) < (13, 0) and wanted.key != "jetson":
        yield "JetPack 6 needs torch from NVIDIA's Jetson index"
    if wanted.key == "jetson" and not jetson(facts):
        yield "it is for Jetson"
    if wanted.driver and serves and serves < wanted.driver:
        branch = {13: "580", 12: "525"}[wanted.driver[0]] if wanted.driver != (12, 8) else "570"
        yield f"it needs a driver for CUDA {shown(wanted.driver)} ({branch} or newer), here is {driver_shown(facts)}"
    if wanted.capability and capability:
        low, high = wanted.capability
        if capability < low:
            yield f"it has code from compute capability {shown(low)} on, this card has {shown(capability)}"
        elif capability > high or (capability[0] == 11 and wanted.build != "cu130"):
            yield f"its torch has no code for compute capability {shown(capability)}"
