"""What the rules read out of the facts: the cards that count, torch's build, the driver's CUDA, the toolkit as FlashInfer
finds it. Readings only; whether any of it is good enough is a wall's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from doctor.cards import CardError, find_card
from doctor.facts import Facts, Gpu
from doctor.versions import Pair, base, capability, dotted, pair, shown, torch_build, torch_cuda, version

# First driver branch of each CUDA version that brought one (NVIDIA's CUDA release notes, table of driver versions).
_BRANCHES: tuple[tuple[int, Pair], ...] = (
    (595, (13, 2)), (590, (13, 1)), (580, (13, 0)), (575, (12, 9)), (570, (12, 8)), (565, (12, 7)), (560, (12, 6)),
    (555, (12, 5)), (550, (12, 4)), (545, (12, 3)), (535, (12, 2)), (530, (12, 1)), (525, (12, 0)), (520, (11, 8)),
    (515, (11, 7)), (510, (11, 6)), (495, (11, 5)), (470, (11, 4)), (465, (11, 3)), (460, (11, 2)), (455, (11, 1)),
    (450, (11, 0)), (440, (10, 2)), (418, (10, 1)), (410, (10, 0)), (384, (9, 0)),
)  # fmt: skip
# Oldest branch that runs a build of this CUDA major (NVIDIA's compatibility guide, minor-version compatibility).
OLDEST_BRANCH = {11: 450, 12: 525, 13: 580}
_SLICE = re.compile(r"\b\dg\.(\d+)gb\b", re.IGNORECASE)  # of a MIG profile's name
_HIDES_ALL = ("", "-1", "none", "nodevfiles")


@dataclass(frozen=True)
class Card:
    """One card that torch could train on. `label` is how sentences name it."""

    index: int
    gpu: Gpu
    vendor: str | None
    capability: Pair | None
    label: str

    @property
    def nvidia(self) -> bool:
        """True also where nobody knows: an unknown card is judged by what is known of it."""
        return self.vendor in ("nvidia", None)


def vendor(gpu: Gpu) -> str | None:
    """The maker, from the field or what only one maker has."""
    if gpu.vendor:
        return gpu.vendor.strip().lower()
    if gpu.gfx:
        return "amd"
    return "nvidia" if gpu.compute_capability else None


def cards(facts: Facts) -> tuple[Card, ...] | None:
    """The cards the rules judge; None when nobody looked. Intel and Apple GPUs have no path and are left out, as is any
    card under macOS, and cards that the installed torch is not built for while there is one that it is.
    """
    if facts.gpus is None:
        return None
    found = []
    for place, gpu in enumerate(facts.gpus):
        maker = vendor(gpu)
        if maker in ("intel", "apple") or (facts.host.platform or "").lower() == "darwin":
            continue  # macOS has neither CUDA nor ROCm, whoever made the card
        index = gpu.index if gpu.index is not None else place
        found.append(Card(index, gpu, maker, _capability(gpu), _label(gpu, index, len(facts.gpus))))
    ours = {"cuda": "nvidia", "rocm": "amd"}.get(build(facts) or "")
    fitting = tuple(c for c in found if c.vendor in (ours, None))
    return fitting if ours and fitting else tuple(found)


def cards_or_unknown(facts: Facts) -> tuple[Card, ...]:
    """The cards; one of which nothing is known where nobody looked, since unknown is not none."""
    ours = cards(facts)
    if ours is None or (not ours and facts.probe("torch_cuda").ok):
        return (Card(0, Gpu(), None, None, "a GPU of which nothing is known"),)
    return ours


def _capability(gpu: Gpu) -> Pair | None:
    """The compute capability as told, else that of the card its name names: an old nvidia-smi tells names only."""
    told = capability(gpu.compute_capability)
    if told is not None or gpu.compute_capability or not gpu.name or vendor(gpu) not in ("nvidia", None):
        return told
    try:
        return find_card(gpu.name)[0].pair
    except CardError:
        return None


def _label(gpu: Gpu, index: int, count: int) -> str:
    name = gpu.name or "GPU of unknown name"
    return f"GPU {index} ({name})" if count > 1 else name


def hidden(facts: Facts) -> bool:
    """True when CUDA_VISIBLE_DEVICES leaves no card."""
    value = facts.env.get("CUDA_VISIBLE_DEVICES")
    return value is not None and value.strip().lower() in _HIDES_ALL


def build(facts: Facts) -> str | None:
    """What the installed torch was built for: cuda, cpu, rocm, xpu, or None."""
    by_tag = torch_build(facts.version("torch"))
    if by_tag:
        return by_tag
    on_disk = _on_disk(facts)
    return next((kind for key, kind in (("cuda", "cuda"), ("hip", "rocm"), ("xpu", "xpu")) if on_disk.get(key)), None)


def build_cuda(facts: Facts) -> Pair | None:
    """The CUDA version the installed torch was built with."""
    if facts.version("torch") is None:
        return None
    on_disk = _on_disk(facts).get("cuda")
    return torch_cuda(facts.version("torch")) or pair(on_disk if isinstance(on_disk, str) else None)


def _on_disk(facts: Facts) -> Mapping[str, object]:
    found = facts.extra.get("torch_build")
    return found if isinstance(found, Mapping) else {}


def driver_branch(facts: Facts) -> int | None:
    numbers = dotted(facts.driver.version)
    return numbers[0] if numbers else None


def driver_cuda(facts: Facts) -> Pair | None:
    """The CUDA version the driver serves: as it says itself, else by its branch."""
    said = pair(facts.driver.cuda)
    if said is not None:
        return said
    branch = driver_branch(facts)
    if branch is None:
        return None
    return next((cuda for first, cuda in _BRANCHES if branch >= first), None)


def branch_for(cuda: Pair) -> int | None:
    """The first driver branch that serves this CUDA version in full; None when the table does not reach that far."""
    fitting = [branch for branch, version in _BRANCHES if version >= cuda]
    return min(fitting, default=None)


def driver_shown(facts: Facts) -> str:
    """The driver as sentences name it: "driver 570.86 (CUDA 12.8)"."""
    version, cuda = facts.driver.version, driver_cuda(facts)
    if version and cuda:
        return f"driver {version} (CUDA {cuda[0]}.{cuda[1]})"
    if cuda:
        return f"a driver for CUDA {cuda[0]}.{cuda[1]}"
    return f"driver {version}" if version else "a driver of unknown version"


def driver_upgrade(facts: Facts, branch: int | None) -> str:
    """The advice to upgrade to a branch, with where the driver lives: on a Jetson, in WSL2 and in a container not here."""
    if jetson(facts):
        return "Flash a JetPack of that CUDA, since the driver comes with it"
    outside = " on the host" if facts.host.container else ""
    if facts.host.platform == "wsl2":
        outside = " in Windows (WSL2 has none of its own)"
    return f"Upgrade the NVIDIA driver{outside} to {branch or 'the newest branch'}" + (" or newer" if branch else "")


def driver_loaded(facts: Facts) -> str:
    """What loads a driver that was upgraded."""
    if facts.host.platform == "wsl2":
        return "`wsl --shutdown` in Windows"
    return "reboot the host" if facts.host.container else "reboot"


def nvcc(facts: Facts) -> Pair | None:
    """The version of the nvcc that FlashInfer would find, None when absent or unknown."""
    return pair(facts.toolkit.nvcc) if facts.toolkit.state != "absent" else None


def nvcc_absent(facts: Facts) -> bool:
    return facts.toolkit.state == "absent"


def nvcc_shown(facts: Facts) -> str:
    where = f" ({facts.toolkit.where})" if facts.toolkit.where else ""
    return f"nvcc {facts.toolkit.nvcc}{where}"


def jetson(facts: Facts) -> bool:
    """True on NVIDIA's embedded boards, whose driver comes with the system image."""
    texts = [facts.host.os or "", *((g.name or "") for g in facts.gpus or ())]
    return any(re.search(r"\b(L4T|JetPack|Jetson|Orin|Xavier|Tegra)\b", t, re.IGNORECASE) for t in texts)


def all_amd(facts: Facts) -> bool:
    """True where there are cards and all are AMD's."""
    ours = cards(facts)
    return bool(ours) and all(card.vendor == "amd" for card in ours or ())


def lacks_glibc(facts: Facts, needed: Pair | None) -> str | None:
    """`glibc 2.34, and this system has 2.31` where a wheel's C library is newer than this one; None where nobody knows."""
    here = pair(facts.host.glibc)
    if here is None or needed is None or here >= needed or linux(facts) is False:
        return None
    return f"glibc {shown(needed)}, and this system has {facts.host.glibc}"


def linux(facts: Facts) -> bool | None:
    """True on Linux and WSL2, None when nobody knows."""
    return None if facts.host.platform is None else facts.host.platform.lower() in ("linux", "wsl2")


def system_gib(facts: Facts) -> float | None:
    """GiB of system memory that a run could have: what is free, all there is where nobody said what is free."""
    return facts.host.ram_gib if facts.host.free_gib is None else facts.host.free_gib


def card_memory(facts: Facts, gpu: Gpu) -> tuple[float | None, bool]:
    """GiB a run could have, and whether that is known to be free. A MIG slice has no more than its profile says."""
    have, known = gpu.free_gib, True
    if have is None and gpu.unified_memory:
        have = system_gib(facts)
    elif have is None:
        have, known = gpu.total_gib, False
    profile = _SLICE.search(gpu.name or "") if gpu.mig else None
    if have is not None and profile:
        have = min(have, float(profile[1]))
    return have, known and have is not None


def repeats_keys(facts: Facts) -> bool:
    """Whether an update repeats keys and values for each head (updates/few_kernels.py): on cards before Ampere."""
    return any(card.capability is not None and card.capability < (8, 0) for card in cards(facts) or ())


def fused_norms(facts: Facts) -> bool:
    """Whether torch is known to have a fused RMS norm for the card, one that keeps its input as it came.

    Seen in torch 2.11's CUDA build (`aten::_fused_rms_norm`); earlier ones and ROCm's were not looked at.
    """
    found = version(facts.version("torch"))
    return build(facts) == "cuda" and found is not None and base(found) >= Version("2.11")
