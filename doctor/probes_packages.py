"""Installed packages and what they ask of each other, read from metadata: nothing is imported."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from doctor.facts import ABSENT, PACKAGES
from doctor.ledger import Ledger

# import name -> names of the distributions that may bring it, most usual first
_DISTRIBUTIONS = {
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "triton": ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm", "pytorch-triton-xpu"),
}
_EXTRAS = ("flashinfer-cubin", "flashinfer-jit-cache", "torchvision", "huggingface-hub", "tokenizers", "nvidia-ml-py")
_KNOWN = {"flashinfer-python": "flashinfer", **{name.replace("_", "-"): name for name in PACKAGES}}


def packages(ledger: Ledger) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Version of each package (ABSENT when looked for and not there, None when unknown), and what else the metadata
    tells: `requires` and `requires_python` by package, `torch_build`, `also_installed`.
    """
    found: dict[str, str | None] = {}
    requires: dict[str, list[str]] = {}
    pythons: dict[str, str] = {}

    def look(name: str) -> str | None:
        distribution = _distribution(name)
        if distribution is None:
            return _without_metadata(name, ledger)
        requires[name] = _requires(distribution)
        if wanted := distribution.metadata["Requires-Python"]:
            pythons[name] = str(wanted)
        if version := distribution.metadata["Version"]:
            return str(version)
        ledger.unknown(f"packages.{name}", "its metadata carries no version (an interrupted install?)")
        return None

    for name in PACKAGES:
        found[name] = ledger.total(f"packages.{name}", partial(look, name))
    build = ledger.total("torch_build", torch_build) or {}
    if found["torch"] is not None:
        if build.get("version") and found["torch"] != ABSENT:
            build["metadata"] = found["torch"]
        found["torch"] = tagged(found["torch"], build)
    also = {name: v for name in _EXTRAS if (v := ledger.total(f"also_installed.{name}", partial(_plain_version, name)))}
    return found, {"requires": requires, "requires_python": pythons, "torch_build": build, "also_installed": also}


def _distribution(name: str) -> metadata.Distribution | None:
    for candidate in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.distribution(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


def _plain_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError):
        return None


def _without_metadata(name: str, ledger: Ledger) -> str | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # no origin: a bare folder of that name
        return ABSENT
    ledger.unknown(f"packages.{name}", "it can be imported but carries no metadata (a source tree?)")
    return None


def _requires(distribution: metadata.Distribution) -> list[str]:
    """Requirements on packages the doctor knows. Of optional ones only those whose extra bears the package's own name
    (`vllm...; extra == "vllm"`): that is where TRL and others declare the range they were made for.
    """
    kept = []
    for line in distribution.requires or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        known = _KNOWN.get(name.group().lower().replace("_", "-")) if name else None
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if known and (extra is None or extra.group(1).lower().replace("-", "_") == known):
            kept.append(line)
    return kept


def torch_build() -> dict[str, str | None]:
    """`version`, `cuda`, `hip` and `xpu` as written in torch/version.py on disk; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    return parse_version_file((Path(spec.submodule_search_locations[0]) / "version.py").read_text("utf-8"))


def parse_version_file(text: str) -> dict[str, str | None]:
    """The assignments of a torch/version.py: `cuda: Optional[str] = '13.0'` gives {"cuda": "13.0"}."""
    build: dict[str, str | None] = {}
    for name, value in re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*(.+?)\s*$", text, re.MULTILINE):
        key = {"__version__": "version"}.get(name, name)
        if key in ("version", "cuda", "hip", "xpu"):
            build[key] = None if value == "None" else value.strip("'\"")
    return build


def tagged(version: str | None, build: dict[str, str | None]) -> str | None:
    """torch's version with its build tag (+cu130, +rocm6.4, +xpu, +cpu), which PyPI's metadata leaves out."""
    exact = build.get("version") or version
    if not build or exact is None or exact == ABSENT or "+" in exact:
        return exact
    if build.get("cuda"):
        return f"{exact}+cu{str(build['cuda']).replace('.', '')}"
    if build.get("hip"):
        return f"{exact}+rocm{'.'.join(str(build['hip']).split('.')[:2])}"
    if build.get("xpu"):
        return f"{exact}+xpu"
    return exact if sys.platform == "darwin" else f"{exact}+cpu"  # a Mac's wheels carry no tag
