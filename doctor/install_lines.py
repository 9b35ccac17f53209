"""The command that brings the right torch for a driver and card, and what the machine is like after it.

Which build that is stands in `doctor.install_sets`; whole sets are `doctor.install`'s business.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from doctor.facts import ABSENT, Facts
from doctor.install_sets import BY_KEY, PackageSet, refusals

_ORDER = ("portable", "cu128", "cu126", "jetson", "rocm", "cpu")


def torch_set(facts: Facts) -> PackageSet:
    """The best set without vLLM that serves the machine; its torch is the one named."""
    fitting = (BY_KEY[key] for key in _ORDER)
    return next((s for s in fitting if not any(refusals(s, facts))), BY_KEY["cpu"])


def torch_line(facts: Facts, *, replace: bool = False) -> str:
    """`pip install ...` for this machine's torch; `replace` where another build is installed, which pip would keep."""
    chosen = torch_set(facts)
    index = chosen.index((facts.host.platform or "linux").lower(), facts.host.arch)
    again = "--force-reinstall " if replace else ""
    return f'pip install {again}"torch=={chosen.torch}"' + (f" --index-url {index}" if index else "")


def after_install(facts: Facts, vllm: str | None) -> Facts:
    """The facts once that torch, this vLLM release (None: no vLLM) and the rest of the set are installed, nothing tried yet."""
    chosen = torch_set(facts)
    tag = "" if chosen.build in ("pypi", "jp6") else f"+{chosen.build}"
    packages = {**facts.packages, "torch": chosen.torch + tag, "vllm": vllm or ABSENT, "bitsandbytes": None}
    nothing: MappingProxyType = MappingProxyType({})
    return replace(facts, packages=MappingProxyType(packages), probes=nothing, torch_arch_list=None, extra=nothing)
