"""The command that brings the right torch for a driver and card, what must change before one serves, and the machine after it.

Which build that is stands in `doctor.install_sets`; whole sets are `doctor.install`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from doctor.diagnosis import Help
from doctor.facts import ABSENT, Driver, Facts
from doctor.install_sets import BY_KEY, PackageSet, best_card, refusals
from doctor.readings import Card, branch_for, driver_cuda, driver_loaded, driver_shown, driver_upgrade, lacks_glibc

_ORDER = ("portable", "cu128", "cu126", "jetson", "rocm", "cpu")


def torch_set(facts: Facts) -> PackageSet | None:
    """The best set without vLLM that serves the machine; its torch is the one named. None where no wheel of torch does."""
    fitting = (BY_KEY[key] for key in _ORDER)
    return next((s for s in fitting if not any(refusals(s, facts))), None)


def torch_line(facts: Facts, *, replace: bool = False) -> str | None:
    """`pip install ...` for the torch that drives this machine's card, or its CPU where it has none; None where no build does.

    `replace` where another build is installed, which pip would keep.
    """
    chosen = torch_set(facts)
    return _line(facts, chosen, replace) if chosen is not None and _drives(chosen, facts) else None


def torch_helps(facts: Facts, doing: str, confidence: str = "certain", *, replace: bool = False) -> tuple[Help, ...]:
    """`doing` ("Install the torch build") with its command. Where no build drives the card as things are: what would have to
    change first, and the CPU build, if that runs."""
    chosen, card = torch_set(facts), best_card(facts)
    if chosen is not None and _drives(chosen, facts):
        return (Help(f"{doing} for {_for_what(facts, card)}", _line(facts, chosen, replace), confidence),)
    cpu = [Help("As things are, the CPU build is what runs here", _line(facts, chosen, replace))] if chosen else []
    return (*_changes(facts, card), *cpu)


def torch_reaches(facts: Facts, card: Card) -> bool:
    """Whether a newer driver, system or Python could bring a torch to this card: what `after_fix` may promise."""
    platform = "wsl2" if (facts.host.platform or "").lower() == "windows" else facts.host.platform
    eased = replace(_eased(facts), gpus=(card.gpu,))
    chosen = torch_set(replace(eased, host=replace(eased.host, platform=platform)))
    return chosen is not None and chosen.key != "cpu"


def _drives(chosen: PackageSet, facts: Facts) -> bool:
    """Whether the set is for what is there; where nobody looked that may be a card."""
    return chosen.key != "cpu" or (facts.gpus is not None and best_card(facts) is None)


def _line(facts: Facts, chosen: PackageSet, again: bool) -> str:
    index = chosen.index((facts.host.platform or "linux").lower(), facts.host.arch)
    words = "--force-reinstall " if again else ""
    return f'pip install {words}"torch=={chosen.torch}"' + (f" --index-url {index}" if index else "")


def _for_what(facts: Facts, card: Card | None) -> str:
    if card is None:
        return "this machine" if facts.gpus is None else "a machine without a usable GPU"
    return f"{card.label} and {driver_shown(facts)}" if card.nvidia else card.label


def _eased(facts: Facts) -> Facts:
    """The facts without what can be made newer: driver, C library, Python."""
    return replace(facts, driver=Driver(), host=replace(facts.host, glibc=None, python=None))


def _changes(facts: Facts, card: Card | None) -> Iterator[Help]:
    """What must change before a build of torch serves: one help each."""
    then, serves = torch_set(_eased(facts)), driver_cuda(facts)
    what = " ".join(filter(None, (facts.host.platform, facts.host.arch)))
    if then is None:
        yield Help(f"Use a Linux container on it: torch has no wheels for {what}; for Linux it has")
        return
    if old := lacks_glibc(facts, then.glibc):
        yield Help(f"Use a newer system, or a container of one: torch's wheels need {old}", None, "certain")
    if card is not None and then.key == "cpu":
        yield Help(f"Train on the CPU: no wheel of torch is made for {card.label} on {what} any more", None, "certain")
    elif then.driver and serves and serves < then.driver:
        yield Help(
            f"{driver_upgrade(facts, branch_for(then.driver))}, {driver_loaded(facts)}, and ask again", None, "certain"
        )


def after_install(facts: Facts, vllm: str | None) -> Facts | None:
    """The facts once that torch, this vLLM release (None: no vLLM) and the rest of the set are installed, nothing tried yet.
    None where no torch can be installed as things are."""
    chosen = torch_set(facts)
    if chosen is None:
        return None
    tag = "" if chosen.build in ("pypi", "jp6") else f"+{chosen.build}"
    rest = dict.fromkeys((*chosen.pins, "gguf"))  # there, in a release that nobody has tried
    packages = {**facts.packages, **rest, "torch": chosen.torch + tag, "vllm": vllm or ABSENT, "bitsandbytes": None}
    nothing: MappingProxyType = MappingProxyType({})
    return replace(facts, packages=MappingProxyType(packages), probes=nothing, torch_arch_list=None, extra=nothing)
