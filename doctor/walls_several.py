"""Walls of several cards at once: what NCCL needs to bring their gradients together. They close no path: one card needs none.

Facts in, walls out; the plan reads `no_several` for why it stays with one card.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from doctor.diagnosis import Help, Wall
from doctor.facts import Facts
from doctor.readings import cards

SMALL_SHM_GIB = 1.0


def no_several(facts: Facts) -> str | None:
    """Why several cards of this machine cannot train together as things are, None when nothing speaks against it."""
    if (wall := _nccl(facts)) is not None or (wall := shared_memory(facts)) is not None:
        return f"{wall.fact} ({wall.code})"
    return None


def warnings(facts: Facts) -> Iterator[Wall]:
    """What several cards would meet; nothing on a machine with one."""
    yield from filter(None, (_nccl(facts), shared_memory(facts), _peers(facts), _nvlink(facts)))


def links(facts: Facts) -> Mapping[str, Any]:
    """What was seen between the cards: nvlinks (active links, by card), peers (torch can reach one from another), nccl."""
    found = facts.extra.get("links")
    return found if isinstance(found, Mapping) else {}


def _several(facts: Facts) -> int:
    found = len([c for c in cards(facts) or () if c.nvidia])
    return found if found > 1 else 0


def _nccl(facts: Facts) -> Wall | None:
    told = links(facts).get("nccl")
    if not _several(facts) or told is None or told:  # a version, or nobody looked
        return None
    return Wall(
        "NCCL-ABSENT",
        (),
        "The installed torch has no NCCL, through which several NVIDIA GPUs bring their gradients together",
        (
            f"links.nccl = absent; {_several(facts)} GPUs; host.platform = {facts.host.platform}",
            "torch is built with NCCL on Linux only (torch.distributed.is_nccl_available)",
        ),
        (
            Help("Train on one GPU, which needs none: the plan does", None, "certain"),
            Help("Use Linux or WSL2 with a CUDA build of torch for several", None, "certain"),
        ),
    )


def shared_memory(facts: Facts) -> Wall | None:
    """The wall of a /dev/shm that is too small for NCCL, None where it is large enough, unknown or not needed."""
    shm, several = facts.host.shm_gib, len(facts.gpus or ()) > 1
    if shm is None or shm >= SMALL_SHM_GIB or not several:
        return None
    return Wall(
        "SHM-SMALL",
        (),
        f"/dev/shm has {shm:.2g} GiB, too little for NCCL between several GPUs",
        (
            f"host.shm_gib = {shm}; {len(facts.gpus or ())} GPUs",
            "Docker gives 64 MB; NCCL wants shared memory (vllm#789)",
        ),
        (
            Help("Train on one GPU, which needs none: the plan does", None, "certain"),
            Help("Or start the container with more", "docker run --ipc=host ...", "certain"),
        ),
    )


def _peers(facts: Facts) -> Wall | None:
    if not _several(facts) or links(facts).get("peers") is not False:
        return None
    return Wall(
        "GPU-PEERS",
        (),
        "The cards cannot read each other's memory, so what goes between them takes the way through the host's",
        (
            "links.peers = false",
            "torch.cuda.can_device_access_peer says so; GeForce cards from Ada on have no peer access, and an IOMMU or ACS "
            "on the bus takes it away (NCCL's user guide, troubleshooting)",
        ),
        (
            Help("Nothing for LoRA: a step sends a few hundred MiB at most", None, "likely"),
            Help("Should NCCL hang, tell it not to try", "export NCCL_P2P_DISABLE=1", "likely"),
        ),
    )


def _nvlink(facts: Facts) -> Wall | None:
    counts = links(facts).get("nvlinks")
    if not _several(facts) or not isinstance(counts, (list, tuple)) or not any(counts) or all(counts):
        return None
    dark = ", ".join(f"GPU {index}" for index, count in enumerate(counts) if not count)
    return Wall(
        "GPU-NVLINK",
        (),
        f"Some cards are joined by NVLink and others are not: {dark} has no active link",
        (
            f"links.nvlinks = {list(counts)}",
            "NCCL then takes the slowest way for all of them (PCIe, or the host's memory)",
        ),
        (
            Help("Choose the ones that are joined", "grpo-portable train --auto --gpus ...", "likely"),
            Help(
                "See which links are up, and restart the fabric manager on an NVSwitch machine", "nvidia-smi nvlink -s"
            ),
        ),
    )
