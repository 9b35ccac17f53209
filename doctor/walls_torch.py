"""Walls between torch and the card: not installed, the wrong build, a driver too old, no code for the card, no CUDA at all.

Each of these closes every GPU path. One cause gives one wall: a failed trial is told by the rule that explains it, and by
its own text (`doctor.causes_cuda`) only where no rule does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from doctor.causes_cuda import cuda_cause, driver_in_text
from doctor.diagnosis import GPU_PATHS, PATHS, Help, Wall
from doctor.facts import Facts
from doctor.install_lines import torch_helps, torch_line, torch_reaches
from doctor.install_sets import best_card, python_serves
from doctor.readings import (
    OLDEST_BRANCH,
    Card,
    branch_for,
    build,
    build_cuda,
    cards,
    driver_cuda,
    driver_loaded,
    driver_shown,
    driver_upgrade,
)
from doctor.versions import Pair, shown
from doctor.walls_stack import NEW_PYTHON
from doctor.walls_vllm import later_wall, platform_wall, ways_to_vllm

_REPLACE = "Replace it by the torch build"
_ENTRY = re.compile(r"(sm|compute)_(\d{1,2})(\d)([af]?)")
_RDNA = re.compile(r"gfx1\d{3}")
_NO_KERNEL = re.compile(
    r"no kernel image|not compatible with the current PyTorch|invalid device function|NoBinaryForGpu|image is invalid",
    re.IGNORECASE,
)
_NO_TORCH = re.compile(r"No module named '?torch'?$")
_NOT_COMPILED = re.compile(r"not compiled with CUDA|not linked with CUDA|CPU-only", re.IGNORECASE)


def torch_absent(facts: Facts) -> Wall | None:
    """The usual first run: nothing installed, so the help is what counts, for torch and for what comes after it."""
    unseen = facts.version("torch") is None and _NO_TORCH.search(facts.probe("torch_cuda").error or "")
    if not facts.absent("torch") and not unseen:
        return None
    helps = [
        *([] if python_serves(facts) else [NEW_PYTHON]),
        *torch_helps(facts, "Install the torch build"),
        Help(
            "Then the rest of the set; this prints it, exact and dated, for pip and uv",
            "grpo-doctor --install-plan",
            "certain",
        ),
    ]
    obstacles: list[str] = []
    if cards(facts) and platform_wall(facts) is None:
        ways, obstacles = ways_to_vllm(facts)
        helps += [Help(f"For the vLLM paths: {_small(h.text)}", h.command, h.confidence) for h in ways]
    return Wall(
        "TORCH-ABSENT",
        PATHS,
        "torch is not installed, so no path can run yet, the CPU path included",
        ("packages.torch = absent", "every path trains with torch", *obstacles),
        tuple(helps),
        later_wall(facts),
    )


def import_wall(facts: Facts) -> Wall | None:
    """Importing torch raised or killed the child, so not even the CPU path can run; a warning when it only took too long."""
    found = facts.extra.get("torch_import")
    if not isinstance(found, Mapping) or found.get("ok"):
        return None
    said = f'import torch in a child process: "{found.get("error") or "no message"}"'
    look = Help("See what it says here", "python -X importtime -c 'import torch'", "likely")
    if found.get("ok") is None:
        return Wall(
            "TORCH-SLOW",
            (),
            "torch was not imported within the time that a trial has, so nothing of it is known",
            (said, "a first import from a cold or network disk can take minutes; so can a busy machine"),
            (Help("Ask again with more time", "grpo-doctor --timeout 60", "likely"), look),
        )
    return Wall(
        "TORCH-IMPORT",
        PATHS,
        "torch is installed, but importing it fails, so no path can run, the CPU path included",
        (said, f"every path trains with torch; packages.torch = {facts.version('torch') or 'unknown'}"),
        (
            *torch_helps(facts, "Install torch in a fresh environment", "likely"),
            Help("Check that LD_LIBRARY_PATH names no other CUDA, cuDNN or NCCL", "unset LD_LIBRARY_PATH", "try"),
            look,
        ),
        "A smaller model or another path: nothing runs without torch",
    )


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]


def torch_walls(facts: Facts) -> Iterator[Wall]:
    """The one wall, if any, that keeps the installed torch from every card. For machines that have a card."""
    wall = _wrong_build(facts) or _driver_too_old(facts) or _failed_trial(facts)
    if wall is not None:
        yield wall


def _wrong_build(facts: Facts) -> Wall | None:
    version, kind, error = facts.version("torch"), build(facts), facts.probe("torch_cuda").error or ""
    failed = facts.probe("torch_cuda").ok is False
    if kind == "cpu" or (kind is None and failed and _NOT_COMPILED.search(error)):
        return _cpu_build(facts, version)
    ours = cards(facts)
    wanted = {"cuda": "nvidia", "rocm": "amd"}.get(kind or "")
    mismatch = kind == "xpu" or (wanted and ours and all(c.vendor not in (wanted, None) for c in ours))
    if not mismatch or facts.probe("torch_cuda").ok:
        return None
    card = ours[0].label if ours else "the card"
    return Wall(
        "TORCH-VENDOR",
        GPU_PATHS,
        f"torch {version} is a {_BUILD[kind or '']} build, and {card} is not such a card",
        (
            f"packages.torch = {version}",
            "one torch build drives one maker's cards: cuda NVIDIA's, rocm AMD's, xpu Intel's",
        ),
        torch_helps(facts, _REPLACE, replace=True),
    )


_BUILD = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU"}


def _cpu_build(facts: Facts, version: str | None) -> Wall:
    why = {
        "windows": "PyPI's torch for Windows is CPU-only (unsloth#2024)",
        "aarch64": "PyPI's torch for aarch64 was CPU-only up to 2.9, and installing vLLM may have brought it (pytorch#160162)",
    }
    arch = "aarch64" if facts.host.arch in ("aarch64", "arm64") else ""
    reason = why.get(facts.host.platform or "") or why.get(arch)
    return Wall(
        "TORCH-CPU-BUILD",
        GPU_PATHS,
        f"torch {version or 'here'} is a CPU build: it cannot use the GPU{', which is there' if cards(facts) else ''}",
        tuple(
            filter(
                None, (f"packages.torch = {version or 'unknown'}", "a +cpu build carries no CUDA code at all", reason)
            )
        ),
        torch_helps(facts, _REPLACE, replace=True),
        "A newer driver or CUDA toolkit: this torch would not look at them",
    )


def _driver_too_old(facts: Facts) -> Wall | None:
    """CUDA's major version binds: within one major an old driver runs newer builds, across majors it does not."""
    error = facts.probe("torch_cuda").error or ""
    if facts.probe("torch_cuda").ok or not _any_nvidia(facts):
        return None
    ours, theirs = build_cuda(facts), driver_cuda(facts) or driver_in_text(error)
    if ours is None or theirs is None:
        return None
    if theirs[0] >= ours[0]:
        return None
    needed, cuda, serves = OLDEST_BRANCH.get(ours[0]), shown(ours), shown(theirs)
    return Wall(
        "TORCH-DRIVER",
        GPU_PATHS,
        f"torch {facts.version('torch')} is a CUDA {cuda} build, and {driver_shown(facts)} serves CUDA {serves} at most",
        (
            f"driver = {facts.driver.version or 'unknown'}, its CUDA = {serves}; torch's CUDA = {cuda}",
            f"any CUDA {ours[0]}.x build needs driver {needed or 'of that CUDA'} or newer (NVIDIA's CUDA compatibility guide)",
            *((f"torch says: {error}",) if error else ()),
        ),
        _driver_helps(facts, ours, theirs, needed),
        "A newer CUDA toolkit or nvcc: the driver decides what runs",
    )


def _driver_helps(facts: Facts, ours: Pair, theirs: Pair, needed: int | None) -> tuple[Help, ...]:
    upgrade = Help(f"{driver_upgrade(facts, needed)}, then {driver_loaded(facts)}", None, "certain")
    card, line = best_card(facts), torch_line(facts, replace=True)
    if card is not None and not torch_reaches(facts, card):
        return torch_helps(facts, _REPLACE, replace=True)
    if theirs[0] < 12 or line is None:
        return (upgrade,)
    back = Help(f"Or take a torch built for CUDA {theirs[0]}.x, which this driver runs", line, "certain")
    # The reinstall needs no root and no reboot; but a vLLM that pins this torch would pull it back in.
    return (upgrade, back) if facts.version("vllm") else (back, upgrade)


def _any_nvidia(facts: Facts) -> bool:
    ours = cards(facts)
    return ours is None or any(c.nvidia for c in ours)


def _failed_trial(facts: Facts) -> Wall | None:
    """torch_cuda failed and no rule explains it; a missing arch is told by `arch_wall`, with this trial's text."""
    trial = facts.probe("torch_cuda")
    if trial.ok is not False:
        return None
    ours = cards(facts) or ()
    if _NO_KERNEL.search(trial.error or "") and ours and all(arch_wall(facts, card) for card in ours):
        return None
    return cuda_cause(facts, trial.error or "")


def covers(arch_list: tuple[str, ...], capability: Pair, *, jit: bool) -> bool:
    """Whether a wheel's arch list has code for a card: the same major and no newer minor (`a` code: exactly that minor),
    or, where the driver can compile it (`jit`), PTX of any older architecture."""
    for entry in arch_list:
        found = _ENTRY.fullmatch(entry.strip())
        if not found:
            continue
        kind, target, suffix = found[1], (int(found[2]), int(found[3])), found[4]
        if target == capability:
            return True
        if suffix == "a":
            continue
        if target[0] == capability[0] and target[1] <= capability[1]:
            return True
        if kind == "compute" and not suffix and jit and target <= capability:
            return True
    return False


def arch_wall(facts: Facts, card: Card) -> Wall | None:
    """torch's wheel has no code for this card."""
    listed = facts.torch_arch_list or ()
    if card.vendor == "amd":
        return _gfx_wall(facts, card, tuple(e for e in listed if e.startswith("gfx")))
    entries = tuple(e for e in listed if _ENTRY.fullmatch(e.strip()))
    if not entries or card.capability is None or covers(entries, card.capability, jit=_can_jit(facts)):
        return None
    sm, line = f"sm_{card.capability[0]}{card.capability[1]}", torch_line(facts, replace=True)
    wheel = Help(f"Install a torch whose wheel has {sm}{_which_wheel(card.capability)}", line)
    error = facts.probe("torch_cuda").error
    return Wall(
        "TORCH-ARCH",
        GPU_PATHS,
        f"torch {facts.version('torch') or 'here'} carries no code for {card.label} ({sm})",
        (
            f"torch arch list = {' '.join(entries)}; compute_capability = {shown(card.capability)}",
            "code for X.y runs on X.z with z >= y, never across majors (CUDA programming guide, binary compatibility)",
            *((f"torch says: {error}",) if error else ()),
        ),
        (wheel,) if line else torch_helps(facts, _REPLACE, replace=True),
        "A newer driver or toolkit: the code would still not be in the wheel",
    )


def _can_jit(facts: Facts) -> bool:
    """PTX is compiled by the driver, which must be as new as the compiler that wrote it. Unknown counts as able."""
    ours, theirs = build_cuda(facts), driver_cuda(facts)
    return ours is None or theirs is None or theirs >= ours


def _which_wheel(capability: Pair) -> str:
    if capability[0] >= 12 or capability[0] == 10:
        return ": CUDA 12.8 builds and newer do"
    if capability[0] == 11:
        return ": CUDA 13.0 builds and newer do"
    if capability < (7, 5):
        return ": the CUDA 12.6 builds do, up to torch 2.14"
    return ""


def _gfx_wall(facts: Facts, card: Card, entries: tuple[str, ...]) -> Wall | None:
    gfx = (card.gpu.gfx or "").partition(":")[0]
    if (
        not gfx
        or not entries
        or any(e.partition(":")[0] == gfx or _generic(e, gfx) for e in entries)
        or facts.probe("torch_cuda").ok
    ):
        return None
    return Wall(
        "TORCH-ARCH",
        GPU_PATHS,
        f"torch {facts.version('torch') or 'here'} carries no code for {card.label} ({gfx})",
        (
            f"torch arch list = {' '.join(entries)}; gfx = {gfx}",
            "ROCm code runs on the gfx target it was built for only",
        ),
        (
            Help("Install a ROCm torch whose wheel lists this target (AMD's own index has more of them)"),
            *_pretend(gfx, entries),
        ),
    )


def _pretend(gfx: str, entries: tuple[str, ...]) -> Iterator[Help]:
    """Cards from RDNA on that differ in the last digit only run each other's code; before, they do not."""
    kin = next((e for e in entries if _RDNA.fullmatch(e) and e[:-1] == gfx[:-1]), None)
    if kin:
        told = f"export HSA_OVERRIDE_GFX_VERSION={kin[3:5]}.{kin[5]}.{kin[6]}"
        yield Help(f"Or pretend to be its relative {kin}, which the wheel has code for", told, "try")


def _generic(entry: str, gfx: str) -> bool:
    """gfx11-generic and its kin cover a whole generation."""
    stem, dash, _ = entry.partition("-generic")
    return bool(dash) and gfx.startswith(stem)


def warnings(facts: Facts) -> Iterator[Wall]:
    """A driver older than torch's CUDA within one major: runs compiled code, cannot compile PTX. And two torches."""
    ours, theirs = build_cuda(facts), driver_cuda(facts)
    if ours and theirs and _any_nvidia(facts) and ours[0] == theirs[0] and theirs < ours and facts.gpus:
        yield Wall(
            "PTX-DRIVER",
            (),
            f"torch is a CUDA {shown(ours)} build on {driver_shown(facts)}: compiled code runs, PTX does not",
            (
                f"torch's CUDA = {shown(ours)}, the driver's CUDA = {shown(theirs)}",
                "minor-version compatibility covers compiled code; PTX and run-time compiled kernels need a driver as new as "
                "their compiler (NVIDIA's compatibility guide; vllm#31700)",
            ),
            (Help(driver_upgrade(facts, branch_for(ours)), None, "likely"),),
        )
    loaded, disk = facts.extra.get("loaded"), facts.version("torch")
    live = loaded.get("torch") if isinstance(loaded, Mapping) else None
    if isinstance(live, str) and disk and not _same_build(live, disk):
        yield Wall(
            "TORCH-KERNEL",
            (),
            f"torch {live[:40]} is loaded in this kernel, and {disk} is installed on disk",
            (
                f"torch in memory = {live[:40]}, on disk = {disk}",
                "an install under a running kernel swaps half of torch",
            ),
            (Help("Restart the kernel or runtime before anything else imports torch", None, "certain"),),
        )


def _same_build(one: str, other: str) -> bool:
    """Equal versions; a build tag that only one of them carries does not count."""
    (a, _, tag_a), (b, _, tag_b) = one.partition("+"), other.partition("+")
    return a == b and (tag_a == tag_b or not tag_a or not tag_b)
