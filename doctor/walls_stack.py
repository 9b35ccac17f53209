"""Walls of bitsandbytes and of what every training needs; warnings about what else is installed, the Python and the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from packaging.version import Version

from doctor.diagnosis import PATHS, Help, Wall
from doctor.facts import Facts
from doctor.locks import installed, need
from doctor.readings import Card, all_amd, build, cards, jetson
from doctor.releases import OUR_PYTHON, OURS, versions
from doctor.versions import allows, pair, shown, specifiers, version

_SET = Help("Install a set that belongs together, in a fresh environment", "grpo-doctor --install-plan", "likely")
NEW_PYTHON = Help("Make an environment with another Python", "uv venv --python 3.12", "certain")
_TRITON_ALONE, _IN_TORCH_TOO = ">=1.15,<1.16", ">=1.16,<1.17"  # releases of TRL
_NEEDED = ("transformers", "trl", "peft", "accelerate", "datasets")  # by every training, beside torch


def bitsandbytes_wall(facts: Facts) -> Wall | None:
    """4-bit weights need bitsandbytes with code for this card: absent, or a first 4-bit product that failed."""
    trial = facts.probe("bnb_4bit")
    if facts.absent("bitsandbytes"):
        return Wall(
            "BNB-ABSENT",
            ("qlora-hf",),
            "bitsandbytes is not installed, and 4-bit weights need it",
            ("packages.bitsandbytes = absent", "NF4 quantisation is bitsandbytes' (QLoRA, arXiv 2305.14314)"),
            (Help("Install it", 'pip install "bitsandbytes>=0.49"', "likely" if all_amd(facts) else "certain"),),
        )
    if trial.ok is not False:
        return None
    error = trial.error or ""
    rule, helps = _bnb_cause(facts, error)
    return Wall(
        "BNB-FAILED",
        ("qlora-hf",),
        "bitsandbytes is installed, but its first 4-bit product failed",
        (f'bnb_4bit failed: "{error or "no message"}"', rule),
        helps,
        "A successful `import bitsandbytes`: the native code is loaded at the first call",
    )


def _bnb_cause(facts: Facts, error: str) -> tuple[str, tuple[Help, ...]]:
    missing = re.search(r"libbitsandbytes_cuda(\d{2,3})", error)
    if missing and re.search(r"not found|cannot open|no such file", error, re.IGNORECASE):
        return (
            f"bitsandbytes has one library for each CUDA version, and here none for {missing[1]} (bitsandbytes#1848)",
            (
                Help("Upgrade it", 'pip install -U "bitsandbytes>=0.50.2"', "likely"),
                Help("Or make it take the library of a near CUDA version", "export BNB_CUDA_VERSION=130", "likely"),
            ),
        )
    if re.search(r"no kernel image|invalid device function|named symbol not found", error, re.IGNORECASE):
        return (
            "its wheels carry code for some architectures only: CUDA 13 builds none below 7.5, aarch64 builds none for Jetson "
            "(bitsandbytes#1930)",
            (_SET, Help("Or build it from source for this card", None, "try")),
        )
    if jetson(facts):
        return "its aarch64 wheels are for servers, not for JetPack (bitsandbytes installation page)", (
            Help("Use NVIDIA's Jetson index, or build from source", None, "try"),
        )
    return (
        "4-bit weights are tried by quantising and multiplying a few numbers, since the import alone proves nothing",
        (
            Help("See what it looks for and finds", "python -m bitsandbytes", "try"),
            Help("Reinstall it", 'pip install --force-reinstall --no-deps "bitsandbytes>=0.49"', "try"),
        ),
    )


def warnings(facts: Facts) -> Iterator[Wall]:
    """Closes nothing: each of these breaks a run later, or a backend that no path needs."""
    makers = (_python, _out_of_range, _unsloth_import, _offline, _bnb_build, _compiler)
    yield from filter(None, (make(facts) for make in makers))


def _python(facts: Facts) -> Wall | None:
    here = version(facts.host.python)
    if here is None or allows(specifiers(OUR_PYTHON), here):
        return None
    return Wall(
        "PYTHON-RANGE",
        (),
        f"Python {facts.host.python} is outside the range {OUR_PYTHON} that grpo-portable and current TRL ask for",
        (
            f"host.python = {facts.host.python}",
            "trl 1.15 and newer need Python 3.11, vLLM ends at 3.14 (released metadata)",
        ),
        (NEW_PYTHON,),
    )


def stack_walls(facts: Facts) -> Iterator[Wall]:
    """What closes every path alike, whatever the card: a package that is missing, a TRL that cannot train without another."""
    yield from filter(None, (_incomplete(facts), _fused_head(facts)))


def for_evaluation(facts: Facts) -> Facts:
    """The facts as an evaluation has them: it computes no loss, so the Triton that only a loss needs is not asked for."""
    return facts if _fused_head(facts) is None else replace(facts, packages={**facts.packages, "triton": None})


def _incomplete(facts: Facts) -> Wall | None:
    gone = [name for name in _NEEDED if facts.absent(name)]
    if not gone:
        return None
    return Wall(
        "STACK-INCOMPLETE",
        PATHS,
        f"Packages that training needs are not installed: {', '.join(gone)}",
        ("; ".join(f"packages.{name} = absent" for name in gone), "every path trains with them"),
        (
            Help("Install them", _install({name: OURS[name] for name in gone}), "likely"),
            Help("Or the whole set, exact and dated", "grpo-doctor --install-plan", "certain"),
        ),
    )


def _install(ranges: Mapping[str, str]) -> str:
    return "pip install " + " ".join(f'"{name}{wanted}"' for name, wanted in ranges.items())


def _out_of_range(facts: Facts) -> Wall | None:
    """Installed packages that this project was not made for: a run fails on them where no path does."""
    seen = {name: version(facts.version(name)) for name in ("torch", "vllm", *_NEEDED, "bitsandbytes")}
    out = {name: OURS[name] for name, v in seen.items() if v is not None and not allows(specifiers(OURS[name]), v)}
    if not out:
        return None
    # Of torch and vLLM, build, driver and card decide; beside an Unsloth the rest is not free either.
    by_pip = not {"torch", "vllm"} & set(out) and facts.version("unsloth") is None
    return Wall(
        "STACK-RANGE",
        (),
        f"Installed packages are not those that grpo-portable is made for: {', '.join(out)}",
        tuple(
            f"packages.{name} = {facts.version(name)}, and pyproject.toml asks {wanted}" for name, wanted in out.items()
        ),
        (
            *([Help("Change them", _install(out), "likely")] if by_pip else []),
            Help("Install the whole set, in a fresh environment", "grpo-doctor --install-plan", "certain"),
        ),
    )


def _fused_head(facts: Facts) -> Wall | None:
    """TRL 1.15 has its loss in Triton alone; from 1.16 on also in torch (read in both; the first step of 1.15 failed)."""
    trl = version(facts.version("trl"))
    if trl is None or not allows(specifiers(_TRITON_ALONE), trl) or not facts.absent("triton"):
        return None
    return Wall(
        "TRL-TRITON",
        PATHS,
        f"trl {facts.version('trl')} cannot train here: its loss is written in Triton, which is not installed",
        ("packages.triton = absent", "trl 1.15 computes its fused head in Triton alone, 1.16 in torch too"),
        tuple(_without_triton(facts)),
        "Another path: all of them train with it",
    )


def _without_triton(facts: Facts) -> Iterator[Help]:
    """A TRL that does without Triton; or Triton itself, where Unsloth takes no such TRL."""
    newer, state = [v for v in map(Version, versions("trl")) if allows(specifiers(_IN_TORCH_TOO), v)], installed(facts)
    asks = [need(facts, who, state[who], "trl") for who in ("unsloth", "unsloth_zoo") if who in state]
    held = next((n for n in asks if n and not any(allows(n.range, v) for v in newer)), None)
    upgrade = f'pip install "trl{_IN_TORCH_TOO}"'
    if held is None:
        yield Help("Upgrade it", upgrade, "certain")
        return
    wanted = need(facts, "torch", state["torch"], "triton") if "torch" in state else None
    package = "triton-windows" if facts.host.platform == "windows" else f"triton{wanted.range if wanted else ''}"
    yield Help(f"Install Triton, since {held}", f'pip install "{package}"', "likely")
    yield Help("Or go on without Unsloth", f"pip uninstall unsloth unsloth_zoo; {upgrade}", "certain")


def _unsloth_import(facts: Facts) -> Wall | None:
    trial = facts.probe("unsloth_import")
    if trial.ok is not False or facts.absent("unsloth"):
        return None
    return Wall(
        "UNSLOTH-IMPORT",
        (),
        "Unsloth cannot be imported here; no path needs it",
        (f'unsloth_import failed: "{trial.error or "no message"}"', _unsloth_cause(trial.error or "")),
        (
            Help("Go on without it: the portable engine and plain vLLM do not import Unsloth", None, "certain"),
            Help("For the Unsloth backend, install its set", "grpo-doctor --install-plan", "likely"),
        ),
    )


def _unsloth_cause(error: str) -> str:
    known = (
        (
            r"torch accelerator|need a GPU",
            "Unsloth wants a GPU at import (UNSLOTH_ALLOW_CPU=1 skips the check and its rewriting)",
        ),
        (r"No module named '?(\w+)", "Unsloth imports {1} whether it is used or not"),
        (r"xformers", "an attention package lags behind the card; torch's own attention does without"),
        (r"align_completion_tool_mask|unsloth_zoo", "unsloth and unsloth_zoo must be of one month"),
        (r"flash-?attn|kernel", "a prebuilt attention kernel does not exist for this platform; sdpa does without"),
        (r"triton", "Triton does not load here, and Unsloth is built on it"),
    )
    for pattern, meaning in known:
        if found := re.search(pattern, error, re.IGNORECASE):
            return meaning.replace("{1}", found[1] if found.groups() else "")
    return "it checks and rewrites half the stack on import, so any of it may be the reason"


def _offline(facts: Facts) -> Wall | None:
    value = facts.env.get("HF_HUB_OFFLINE")
    if value is None or value.strip().lower() not in ("1", "true", "yes", "on"):
        return None
    return Wall(
        "HUB-OFFLINE",
        (),
        "HF_HUB_OFFLINE is set: models and data must be in the local cache already",
        (f"HF_HUB_OFFLINE = {value}", "huggingface_hub then asks nobody"),
        (Help("Name a local folder as the model, or unset it to download", "unset HF_HUB_OFFLINE", "certain"),),
    )


def _bnb_build(facts: Facts) -> Wall | None:
    """Cards that bitsandbytes' wheels have no code for, where nobody has tried it."""
    if facts.version("bitsandbytes") is None or facts.probe("bnb_4bit").ok is not None:
        return None
    for card in cards(facts) or ():
        if reason := _no_bnb_code(facts, card):
            return Wall(
                "BNB-BUILD",
                (),
                f"bitsandbytes {facts.version('bitsandbytes')} may carry no code for {card.label}",
                (reason, "its wheels cover certain architectures (bitsandbytes installation page)"),
                (Help("Try one 4-bit product", "grpo-doctor", "certain"),),
            )
    return None


def _no_bnb_code(facts: Facts, card: Card) -> str | None:
    if card.capability is None:
        return None
    if card.capability < (6, 0):
        return f"compute_capability = {shown(card.capability)}, and it begins at 6.0"
    torch = facts.version("torch") or ""
    if build(facts) == "cuda" and "+cu13" in torch and card.capability < (7, 5):
        return f"compute_capability = {shown(card.capability)}, and its CUDA 13 libraries begin at 7.5"
    if jetson(facts) and card.capability < (9, 0):
        return "its aarch64 wheels are for servers, not for JetPack"
    return None


def _compiler(facts: Facts) -> Wall | None:
    """Triton compiles its launchers with the system's C compiler."""
    compilers = facts.extra.get("compilers")
    lacking = isinstance(compilers, dict) and compilers.get("cc") == "absent"
    if not lacking or (facts.host.platform or "") not in ("linux", "wsl2") or not cards(facts):
        return None
    glibc = pair(facts.host.glibc)
    return Wall(
        "CC-ABSENT",
        (),
        "There is no C compiler, and Triton compiles a launcher for each of its kernels with one",
        ("compilers.cc = absent", "torch.compile, Unsloth and vLLM use Triton; the portable engine does without"),
        (Help("Install one", "sudo apt-get install -y build-essential python3-dev" if glibc else None, "likely"),),
    )
