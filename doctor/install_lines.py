"""The command that brings the right torch for a driver and card, and what the machine is like after it.

Whole sets are `doctor.install`'s business.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from doctor.facts import ABSENT, Facts
from doctor.readings import cards, driver_cuda, jetson
from doctor.versions import Pair

INDEX = "https://download.pytorch.org/whl"
_BLACKWELL = (10, 0)


def torch_line(facts: Facts, *, replace: bool = False) -> str:
    """`pip install ...` for this machine's torch; `replace` where another build is installed, which pip would keep."""
    package, index = _torch(facts)
    again = "--force-reinstall " if replace else ""
    return f'pip install {again}"{package}"' + (f" --index-url {index}" if index else "")


def _torch(facts: Facts) -> tuple[str, str | None]:
    ours, platform = cards(facts), (facts.host.platform or "").lower()
    if platform == "darwin":
        return "torch==2.13.0", None
    if ours is not None and not ours:
        return "torch==2.13.0", f"{INDEX}/cpu"
    if ours and not any(c.nvidia for c in ours):
        return "torch==2.11.0", f"{INDEX}/rocm6.4"
    if jetson(facts) and (driver_cuda(facts) or (13, 0)) < (13, 0):
        return "torch", "https://pypi.jetson-ai-lab.io/jp6/cu126"
    best: Pair | None = max((c.capability for c in ours or () if c.capability is not None), default=None)
    serves = driver_cuda(facts)
    if best is not None and best < (7, 5):  # the last builds with code for Pascal and Volta
        return "torch==2.13.0", f"{INDEX}/cu126"
    if serves is None or serves >= (13, 0):
        return "torch==2.13.0", f"{INDEX}/cu130"
    if serves >= (12, 8) or (best is not None and best >= _BLACKWELL):
        return "torch==2.10.0", f"{INDEX}/cu128"
    return "torch==2.13.0", f"{INDEX}/cu126"


def after_install(facts: Facts, vllm: str | None) -> Facts:
    """The facts once that torch, this vLLM release (None: no vLLM) and the rest of the set are installed, nothing tried yet."""
    package, index = _torch(facts)
    tag = index.rsplit("/", 1)[-1] if index else ""
    torch = package.partition("==")[2] + (f"+{tag}" if tag and package.partition("==")[2] else "")
    packages = {**facts.packages, "torch": torch or None, "vllm": vllm or ABSENT, "bitsandbytes": None}
    return replace(
        facts,
        packages=MappingProxyType(packages),
        probes=MappingProxyType({}),
        torch_arch_list=None,
        extra=MappingProxyType({}),
    )
