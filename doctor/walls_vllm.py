"""Walls of vLLM: platform, absence, a failed import, a failed start, the card's age. Each closes the three vLLM paths.

Import and start are judged by their trials, not by versions: a wheel's tag lies and a pin may be harmless. What an option
or free memory explains closes nothing. Where vLLM is absent, what stands in the way of installing it is told beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from packaging.version import Version

from doctor.causes_vllm import CAUSES, Cause
from doctor.diagnosis import VLLM_PATHS, Help, Wall
from doctor.facts import ABSENT, Driver, Facts
from doctor.install_sets import BY_KEY, INDEX
from doctor.locks import conflicts, installed, need, no_common, runs_here, shown_range, torch_runs_here
from doctor.readings import (
    Card,
    build,
    build_cuda,
    cards,
    driver_cuda,
    driver_shown,
    driver_upgrade,
    jetson,
    lacks_glibc,
    linux,
    nvcc,
    nvcc_shown,
)
from doctor.releases import OURS, TORCH_CUDA, asked, versions
from doctor.versions import allows, base, shown, specifiers, version
from doctor.walls_fp8 import gate

_SET = Help("Install a set that belongs together, in a fresh environment", "grpo-doctor --install-plan", "likely")
_UNINSTALL = Help(
    "Take the husk away: what finds vLLM installed may import it, and fail", "pip uninstall vllm", "certain"
)
_ROCM = re.compile(r"gfx(?:90a|942|950|110[01]|115[01]|120[01])\b")  # vLLM's installation page, ROCm requirements
_OLDEST = (7, 0)
_OLDEST_CUDA_13 = (7, 5)
_CUDA_12 = "0.25.1"


def vllm_walls(facts: Facts) -> Iterator[Wall]:
    """The wall, if any, that keeps vLLM from running here at all."""
    wall = platform_wall(facts) or _absent(facts) or _failed(facts)
    if wall is not None:
        yield wall


def platform_wall(facts: Facts) -> Wall | None:
    """Windows and macOS close vLLM whatever is installed."""
    platform = (facts.host.platform or "").lower()
    if platform == "windows":
        return Wall(
            "VLLM-WINDOWS",
            VLLM_PATHS,
            "vLLM does not run on Windows itself",
            ("host.platform = windows", "vLLM supports Linux; a pip install on Windows leaves a husk (vllm#32738)"),
            (
                Help(
                    "Install WSL2 and train inside it: it counts as Linux and uses the Windows driver",
                    "wsl --install",
                    "certain",
                ),
                Help("Or stay on Windows with the portable engine: the plan does", None, "certain"),
                *([_UNINSTALL] if facts.version("vllm") else []),
            ),
            "pip install vllm on Windows; some libraries then even fail because the husk is there",
        )
    if platform == "darwin":
        return Wall(
            "VLLM-MACOS",
            VLLM_PATHS,
            "vLLM's GPU engine does not run on macOS",
            ("host.platform = darwin", "vLLM on a Mac is a CPU engine without CUDA (vLLM docs)"),
            (Help("Use the portable engine: the plan does", None, "certain"),),
        )
    return None


def without_unusable(facts: Facts) -> Facts:
    """The facts without a vLLM that this platform cannot run: what it would need is no advice there."""
    if platform_wall(facts) is None or facts.version("vllm") is None:
        return facts
    return replace(facts, packages=MappingProxyType({**facts.packages, "vllm": ABSENT}))


def _absent(facts: Facts) -> Wall | None:
    error = facts.probe("vllm_import").error or ""
    unseen = facts.version("vllm") is None and re.search(r"No module named '?vllm'?$", error)
    if not facts.absent("vllm") and not unseen:
        return None
    ways, obstacles = ways_to_vllm(facts)
    return Wall(
        "VLLM-ABSENT",
        VLLM_PATHS,
        "vLLM is not installed",
        ("packages.vllm = absent", *obstacles),
        (*ways, Help("The portable engine needs no vLLM: the plan uses it", None, "certain")),
        later_wall(facts),
    )


def ways_to_vllm(facts: Facts) -> tuple[list[Help], list[str]]:
    """How vLLM could be installed here, best first, and what stands in the way of newer releases or of all of them."""
    ours = cards(facts)
    reached = [c for c in ours or () if reachable(facts, c)]
    if ours and not reached:
        return [], [f"no vLLM of these days is made for {ours[0].label}"]
    if reached and not any(c.nvidia for c in reached):
        rocm = Help(
            "Take vLLM's own ROCm wheel or image for this card (vLLM docs, installation, ROCm); PyPI's is for CUDA"
        )
        return [rocm], []
    release, obstacles = newest_fitting(facts)
    if release is not None:
        again = _other_build(facts, release)
        brings = (
            f" (with PyPI's build of torch in place of {facts.version('torch')})" if again else _brings(facts, release)
        )
        return [Help(f"Install it: vllm {release} fits this machine{brings}", again or vllm_line(release))], obstacles
    return list(_way_out(facts)), obstacles


def vllm_line(release: str) -> str:
    return f'pip install "vllm=={release}"'


def _other_build(facts: Facts, release: str) -> str | None:
    """The command where torch has the number that the release pins, but another build, which pip would keep."""
    pinned, have = (asked("vllm", Version(release), "torch") or "").removeprefix("=="), version(facts.version("torch"))
    wanted, cuda = TORCH_CUDA.get(pinned), build_cuda(facts)
    if have is None or have.public != pinned or wanted is None:
        return None
    same = build(facts) in (None, "cuda") and (cuda is None or cuda[0] == wanted[0])
    return None if same else f'pip install --force-reinstall "torch=={pinned}" "vllm=={release}"'


def _brings(facts: Facts, release: str) -> str:
    torch, have = asked("vllm", Version(release), "torch"), facts.version("torch")
    if not torch or not have or allows(specifiers(torch), version(have) or Version("0")):
        return ""
    return f" (it brings torch {torch.removeprefix('==')} in place of {have})"


def newest_fitting(facts: Facts) -> tuple[str | None, list[str]]:
    """The newest release within this project's range that Python, driver, card, glibc and the installed packages take,
    and what shuts the newer ones out: one sentence for each rule, told before anything is downloaded."""
    shut_out: dict[str, list[str]] = {}
    for text in reversed(_ours()):
        reasons = list(_unfit(facts, Version(text)))
        if not reasons:
            return text, _sentences(shut_out)
        for reason in reasons:
            shut_out.setdefault(reason, []).append(text)
    return None, _sentences(shut_out)


def _ours() -> list[str]:
    return [text for text in versions("vllm") if allows(specifiers(OURS["vllm"]), Version(text))]


def _sentences(shut_out: dict[str, list[str]]) -> list[str]:
    def those(texts: list[str]) -> str:
        return texts[0] if len(texts) == 1 else f"{texts[-1]} to {texts[0]}"

    return [f"vllm {those(texts)}: {reason}" for reason, texts in shut_out.items()]


def _unfit(facts: Facts, v: Version) -> Iterator[str]:
    """Why a release cannot be used here, as far as is known; nothing when it can."""
    serves = driver_cuda(facts)
    if glibc := _old_glibc(facts):
        yield glibc
    if not runs_here(facts, "vllm", v):
        yield f"Python {facts.host.python} is outside its range"
    torch = (asked("vllm", v, "torch") or "").removeprefix("==")
    if torch and not torch_runs_here(facts, Version(torch)):
        if serves is not None and serves[0] < 13:
            yield f"the torch it pins is a CUDA 13 build on PyPI, which needs driver 580; here is {driver_shown(facts)}"
        else:
            yield "the torch it pins is a CUDA 13 build, without code for this card"
    state = installed(facts)
    for who in ("trl", "unsloth", "unsloth_zoo"):
        for of, wanted in (("vllm", str(v)), ("torch", torch)):
            asks = need(facts, who, state[who], of) if who in state and wanted else None
            if asks and not allows(asks.range, Version(wanted)):
                what = "the torch it pins" if of == "torch" else "it"
                yield f"{what} is outside the range {shown_range(asks.range)} of {who} {state[who]} ({asks.source})"
        beside = replace(facts, packages=MappingProxyType({**facts.packages, "vllm": str(v)}))
        if apart := no_common(beside, who, "vllm", "transformers"):
            theirs = f"the range {shown_range(apart[0].range)} of {who} {state[who]} ({apart[0].source})"
            yield f"no transformers is both in its range and in {theirs}"


def _old_glibc(facts: Facts) -> str | None:
    """Which C library vLLM's wheels need, where this system's is older."""
    lacks = lacks_glibc(facts, BY_KEY["vllm"].glibc)
    return lacks and f"its wheel needs {lacks}"


def _way_out(facts: Facts) -> Iterator[Help]:
    """What would let vLLM be installed where no release fits as things are."""
    serves, newest, whole = driver_cuda(facts), _ours()[-1], "a set in which everything fits, in a fresh environment"
    if glibc := _old_glibc(facts):
        yield Help(f"Use a newer system, or a container of one: {glibc}", None, "certain")
    elif serves is None or serves[0] >= 13:
        yield Help(f"Install {whole}", "grpo-doctor --install-plan", "likely")
    elif any(_unfit(replace(facts, driver=Driver()), Version(newest))):
        yield Help(f"{driver_upgrade(facts, 580)}, then install {whole}", "grpo-doctor --install-plan", "likely")
    else:
        yield Help(f"{driver_upgrade(facts, 580)}, then install it", vllm_line(newest), "likely")
        if serves[0] == 12:
            wheel = "Or take the last vLLM that was tried as a CUDA 12.9 wheel on 12.x drivers"
            yield Help(wheel, _cuda_12_line(facts), "likely")


def _cuda_12_line(facts: Facts) -> str:
    """vLLM's own CUDA 12.9 build: TRL's team runs these on drivers of the 12 series (trl#6153, trl#6355, trl#6406)."""
    arch = "aarch64" if facts.host.arch in ("aarch64", "arm64") else "x86_64"
    wheel = f"vllm-{_CUDA_12}+cu129-cp38-abi3-manylinux_2_28_{arch}.whl"
    url = f"https://github.com/vllm-project/vllm/releases/download/v{_CUDA_12}/{wheel}"
    return f'pip install "{url}" --extra-index-url {INDEX}/cu129'


def later_wall(facts: Facts) -> str | None:
    """The wall that comes after this one: FlashInfer's toolkit gate, told before anything is downloaded."""
    found = nvcc(facts)
    for card in cards(facts) or ():
        asks = gate(facts, card)
        if asks and found and found < asks[0]:
            older = f"FlashInfer needs CUDA {shown(asks[0])}, and {nvcc_shown(facts)} is older"
            return f"vLLM alone, for FP8: on {card.label} {older}"
    return None


def cause_of(error: str, stage: str) -> Cause | None:
    """The known cause of a failed import or start, by its text."""
    return next((c for c in CAUSES if c.stage in (stage, "any") and c.pattern.search(error)), None)


def _failed(facts: Facts) -> Wall | None:
    for stage, name in (("import", "vllm_import"), ("start", "vllm_start")):
        trial = facts.probe(name)
        if trial.ok is False:
            wall = _failure(facts, stage, name, trial.error or "")
            if wall is not None:
                return wall
    return None


def _failure(facts: Facts, stage: str, name: str, error: str) -> Wall | None:
    said = f'{name} failed: "{error or "no message"}"'
    cause = cause_of(error, stage)
    if cause is None:
        return _unknown_failure(facts, stage, said, error)
    if cause.code == "LOCK-TRL-VLLM" and any((n.who, n.of) == ("trl", "vllm") for n in conflicts(facts)):
        return None  # the lock's own wall tells it, with both versions
    found = cause.pattern.search(error)
    caught = next((g for g in (found.groups() if found else ()) if g), "")
    closes = {"all": VLLM_PATHS, "fp8": ("fp8-vllm",)}.get(cause.closes if stage == "start" else "all", ())
    because = [said, cause.rule, *_suspects(facts, cause.code)]
    if cause.code == "VLLM-GLIBC":
        because.insert(1, f"host.glibc = {facts.host.glibc or 'unknown'}" + (f"; wanted: {caught}" if caught else ""))
    return Wall(cause.code, closes, cause.fact.replace("{1}", caught), tuple(because), cause.helps, cause.wont_help)


def _suspects(facts: Facts, code: str) -> list[str]:
    """Locks of vLLM that are broken too, and are the likely reason of a failure that does not say so itself."""
    if code in ("VLLM-MEMORY", "VLLM-OPTION", "VLLM-MIG", "VLLM-GLIBC", "VLLM-PTX"):
        return []
    return [
        f"{n}, and packages.{n.of} = {facts.packages.get(n.of)}: this pair is a likely reason"
        for n in conflicts(facts)
        if n.who == "vllm"
    ]


_GUILTY = (
    re.compile(r"No module named '?([A-Za-z_]\w*)"),
    re.compile(r"(?:site|dist)-packages/([A-Za-z_]\w*)"),
    re.compile(r"cannot import name '\w+' from (?:partially initialized module )?'([A-Za-z_]\w*)"),
    re.compile(r"module '([A-Za-z_]\w*)[\w.]*' has no attribute"),
    re.compile(r"\b(lib[\w+-]+\.so(?:\.\d+)*)"),
    re.compile(r"\b(unsloth|transformers|triton|numpy|xformers|flashinfer|trl|torch)\b", re.IGNORECASE),
)


# import name → name pip knows it by
_DISTRIBUTIONS = {
    "pkg_resources": "setuptools", "cv2": "opencv-python-headless", "PIL": "pillow", "yaml": "pyyaml", "google": "protobuf",
    "sklearn": "scikit-learn", "zmq": "pyzmq",
}  # fmt: skip


def _unknown_failure(facts: Facts, stage: str, said: str, error: str) -> Wall:
    guilty = next((found[1] for pattern in _GUILTY if (found := pattern.search(error))), None)
    named = f" over {guilty}" if guilty and guilty.lower() != "vllm" else ""
    suspects = _suspects(facts, "")
    if stage == "import":
        missing = re.search(r"No module named", error) is not None
        fact = f"vLLM is installed, but importing it fails{named}"
        rule = "the import and its compiled code are tried in a child process; what fails there fails in training"
        first = (
            Help(f"Install what is missing: {guilty}", f"pip install {guilty}", "try") if guilty and missing else None
        )
    else:
        fact = f"vLLM imports, but its start fails{named}"
        rule = "a start on a tiny model is the test; no option or lack of memory known here explains this text"
        first = Help("See the whole log of the start", "grpo-doctor --prove -v", "try")
    helps = tuple(
        filter(None, (first, _SET, Help("The portable engine needs no vLLM: the plan uses it", None, "certain")))
    )
    return Wall(f"VLLM-{stage.upper()}", VLLM_PATHS, fact, (said, rule, *suspects), helps)


def memory_refused(facts: Facts) -> bool:
    """True when a start of vLLM was refused for memory: that outranks what the ledger thinks would fit."""
    trial = facts.probe("vllm_start")
    cause = cause_of(trial.error or "", "start") if trial.ok is False else None
    return cause is not None and cause.closes == "memory"


def card_wall(facts: Facts, card: Card) -> Wall | None:
    """A card that no release of vLLM was ever made for. Newer minima are judged by the start trial."""
    if card.capability is None or not card.nvidia or card.capability >= _OLDEST or facts.version("vllm") is None:
        return None
    if facts.probe("vllm_start").ok is not None or facts.probe("vllm_import").ok is False:
        return None  # the trial has spoken
    return Wall(
        "VLLM-CAPABILITY",
        VLLM_PATHS,
        f"{card.label} has compute capability {shown(card.capability)}, and vLLM needs 7.0",
        (
            f"compute_capability = {shown(card.capability)}",
            "every release of vLLM asks for 7.0, newer ones 7.5 (vLLM docs)",
        ),
        (Help("Generate with the portable engine: the plan does", None, "certain"),),
    )


def warnings(facts: Facts) -> Iterator[Wall]:
    """vLLM newer than the card, and vLLM older than any TRL of these days."""
    v, ours = version(facts.version("vllm")), cards(facts) or ()
    if v is None or facts.probe("vllm_import").ok is False:
        return
    known = [c for c in ours if c.nvidia and c.capability is not None]
    best = max(known, key=lambda c: c.capability or (0, 0), default=None)
    untried = facts.probe("vllm_start").ok is None
    if (
        best
        and best.capability
        and _OLDEST <= best.capability < _OLDEST_CUDA_13
        and base(v) >= Version("0.17")
        and untried
    ):
        yield Wall(
            "VLLM-CARD-AGE",
            (),
            f"vllm {v} may have no kernels for {best.label} (compute capability {shown(best.capability)}) any more",
            ("the minimum rose from 7.0 to 7.5 with vLLM's move to CUDA 13 (vLLM PR 39878); only a start tells",),
            (Help("Try a start on a tiny model", "grpo-doctor --prove", "certain"),),
        )
    if base(v) < Version("0.10.2"):
        yield Wall(
            "VLLM-OLD",
            (),
            f"vllm {v} is older than every vLLM that a TRL from 0.24 on accepts",
            (f"packages.vllm = {v}", "TRL 0.24 to 1.0 begin at 0.10.2, later ones later (released metadata)"),
            (_SET,),
        )


def reachable(facts: Facts, card: Card) -> bool:
    """Whether software alone could bring vLLM to this card: what `after_fix` may promise."""
    if facts.host.platform is not None and facts.host.platform.lower() == "darwin":
        return False
    if card.vendor == "amd":
        return linux(facts) is not False and card.gpu.gfx is not None and _ROCM.match(card.gpu.gfx) is not None
    if card.capability is None:
        return True
    return card.capability >= _OLDEST_CUDA_13 and not (jetson(facts) and card.capability < (9, 0))
