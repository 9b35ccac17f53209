"""The exact set of packages for a machine, as commands for pip and uv, and why nothing newer. Installs nothing itself.

`python -m doctor.install` prints pip's arguments for torch on this machine, for a Makefile.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doctor.facts import Facts
from doctor.install_lines import torch_set
from doctor.install_sets import BY_KEY, RESOLVED_ON, SETS, PackageSet, best_card, python_serves, refusals
from doctor.readings import cards, driver_cuda, driver_shown, jetson
from doctor.versions import pair

WIDTH = 80


@dataclass(frozen=True)
class InstallPlan:
    """`chosen` is None when no set serves the machine. `refused` says of each better set why it does not fit here."""

    date: str
    machine: str
    chosen: PackageSet | None
    packages: Mapping[str, str]
    pip: tuple[str, ...]
    uv: tuple[str, ...]
    alternatives: tuple[PackageSet, ...]
    refused: tuple[tuple[PackageSet, tuple[str, ...]], ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """The plan in 80 columns."""
        lines = [*_wrapped(f"Install plan for {self.machine}", ""), f"Versions resolved on {self.date}", ""]
        if self.chosen is None:
            lines += ["No set fits this machine."]
        else:
            lines += [*_wrapped(f"{self.chosen.key}: {self.chosen.title}", ""), ""]
            lines += _columns(self.packages)
            lines += ["", "With pip:", *_shell(self.pip), "", "With uv:", *_shell(self.uv), ""]
            lines += _wrapped(f"Checked: {self.chosen.evidence}", "")
            lines += ["", "Why nothing newer:", *(line for c in self.chosen.ceilings for line in _wrapped(c, "- "))]
        if self.refused:
            lines += ["", "Why not a faster set:" if self.chosen else "Why none fits:"]
            lines += [line for names, why in _grouped(self.refused) for line in _wrapped(f"{names}: {why}", "- ")]
        if self.alternatives:
            lines += ["", "Also fits:"]
            lines += [line for s in self.alternatives for line in _wrapped(f"{s.key}: {s.title}; {_pins(s)}", "- ")]
        lines += ["", *(line for n in self.notes for line in _wrapped(n, "note: "))] if self.notes else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {
            "schema": 1,
            "date": self.date,
            "machine": self.machine,
            "set": self.chosen and self.chosen.key,
            "title": self.chosen and self.chosen.title,
            "packages": dict(self.packages),
            "pip": list(self.pip),
            "uv": list(self.uv),
            "evidence": self.chosen and self.chosen.evidence,
            "why_nothing_newer": list(self.chosen.ceilings) if self.chosen else [],
            "refused": [{"set": s.key, "title": s.title, "because": list(why)} for s, why in self.refused],
            "alternatives": [
                {"set": s.key, "title": s.title, "packages": s.packages("linux")} for s in self.alternatives
            ],
            "notes": list(self.notes),
        }


def install_plan(facts: Facts, *, source: str | None = None) -> InstallPlan:
    """The best set that serves this machine. `source` is what pip is to install this project from: a clone, else its name."""
    platform = (facts.host.platform or "linux").lower()
    refused: list[tuple[PackageSet, tuple[str, ...]]] = []
    fitting: list[PackageSet] = []
    for candidate in SETS:
        why = tuple(refusals(candidate, facts))
        if not why:
            fitting.append(candidate)
        elif not fitting and candidate.key not in ("vllm-0.24", "jetson", "rocm"):
            refused.append((candidate, why))
    has_card = best_card(facts) is not None
    chosen = fitting[0] if fitting else None
    others = [s for s in fitting[1:] if s.key in ("vllm-0.24", "unsloth", "portable")]
    packages = chosen.packages(platform) if chosen else {}
    return InstallPlan(
        date=RESOLVED_ON,
        machine=_machine(facts),
        chosen=chosen,
        packages=packages,
        pip=tuple(_pip(chosen, facts, source)) if chosen else (),
        uv=tuple(_uv(chosen, facts, source)) if chosen else (),
        alternatives=tuple(others),
        refused=tuple(refused) if has_card or facts.gpus is None else _of_the_cpu(refused),
        notes=tuple(_notes(facts, chosen, has_card)),
    )


def _of_the_cpu(refused: list[tuple[PackageSet, tuple[str, ...]]]) -> tuple[tuple[PackageSet, tuple[str, ...]], ...]:
    """Without a card only the CPU's set says anything."""
    return tuple((s, why) for s, why in refused if s.key == "cpu")


def torch_requirement(facts: Facts) -> list[str]:
    """pip's arguments for torch alone: the portable set's build where this machine has a card, else the CPU build."""
    platform = (facts.host.platform or "linux").lower()
    chosen = torch_set(facts) or BY_KEY["cpu"]  # where none serves, pip is the one to say so
    index = chosen.index(platform, facts.host.arch)
    # Beside PyPI, not instead of it: a machine that cannot reach PyTorch's index still gets a torch.
    return [f"torch=={chosen.torch}", *(["--extra-index-url", index] if index else [])]


def _pip(chosen: PackageSet, facts: Facts, source: str | None) -> Iterator[str]:
    platform = (facts.host.platform or "linux").lower()
    yield from _environment(facts, "python -m venv .venv", f"python{_python(facts)} -m venv .venv")
    yield from _installs(chosen, facts, source, "pip install", platform)


def _uv(chosen: PackageSet, facts: Facts, source: str | None) -> Iterator[str]:
    platform = (facts.host.platform or "linux").lower()
    yield from _environment(facts, f"uv venv --python {_python(facts)}", f"uv venv --python {_python(facts)}")
    yield from _installs(chosen, facts, source, "uv pip install", platform)


def _environment(facts: Facts, same: str, other: str) -> Iterator[str]:
    yield same if python_serves(facts) else other
    yield ".venv\\Scripts\\activate" if (facts.host.platform or "").lower() == "windows" else ". .venv/bin/activate"


def _installs(chosen: PackageSet, facts: Facts, source: str | None, install: str, platform: str) -> Iterator[str]:
    index = chosen.index(platform, facts.host.arch)
    packages = chosen.packages(platform)
    pins = [f"{name}=={v}" for name, v in packages.items()]
    if index:  # torch by itself first: PyTorch's index mirrors other packages too, and older ones
        yield f"{install} {pins[0]} --index-url {index}"
    yield f"{install} {' '.join(pins)} {_project(chosen.extra, source)}"


def _project(extra: str, source: str | None) -> str:
    """How pip names this project: the clone the doctor runs from, else the published name."""
    clone = Path(__file__).resolve().parent.parent / "pyproject.toml"
    found = source or ("." if clone.is_file() else "grpo-portable")
    return f'-e "{found}[{extra}]"' if found == "." else f'"{found}[{extra}]"'


def _python(facts: Facts) -> str:
    here = pair(facts.host.python)
    return f"{here[0]}.{here[1]}" if here and python_serves(facts) else "3.12"


def _notes(facts: Facts, chosen: PackageSet | None, has_card: bool) -> Iterator[str]:
    platform = (facts.host.platform or "linux").lower()
    if not python_serves(facts):
        yield f"Python {facts.host.python} is outside 3.11 to 3.14, so the commands make an environment with 3.12"
    if platform == "windows" and has_card:
        yield "vLLM has no Windows wheels; the same machine under WSL2 can take the vLLM set"
    yield from _driver_notes(facts)
    capabilities = {c.capability for c in cards(facts) or () if c.nvidia and c.capability}
    if capabilities and min(capabilities) < (7, 5) <= max(capabilities):
        yield "Cards before Turing beside newer ones: no build from torch 2.11 on serves both, this one serves the newest"
    if chosen and chosen.key == "cpu" and facts.gpus and not has_card:
        yield "This GPU has no path of its own here yet, so the CPU set is named"


def _driver_notes(facts: Facts) -> Iterator[str]:
    card, serves = best_card(facts), driver_cuda(facts)
    if card is None or not card.nvidia:
        return
    if serves is None:
        yield "The driver is unknown here; CUDA 13.0 builds need 580 or newer (nvidia-smi shows it)"
    elif serves < (12, 0):
        yield f"{driver_shown(facts)} is too old for every CUDA set here: update it to 525 at least, better 580"
    elif serves < (13, 0) and (card.capability or (7, 5)) >= (7, 5) and not jetson(facts):
        yield "A driver of 580 or newer opens the vLLM set"


def _machine(facts: Facts) -> str:
    card, host = best_card(facts), facts.host
    nothing = "a machine without a usable GPU" if facts.gpus is not None else "a machine nobody looked at"
    parts = [(card.gpu.name or card.label) if card else nothing]
    parts += [driver_shown(facts)] if card and card.nvidia else []
    parts += [f"Python {host.python}"] if host.python else []
    parts += [" ".join(x for x in (host.platform, host.arch) if x)] if host.platform else []
    return ", ".join(parts)


def _pins(chosen: PackageSet) -> str:
    return " ".join(f"{n}=={v}" for n, v in {"torch": chosen.torch, **chosen.pins}.items())


def _grouped(refused: tuple[tuple[PackageSet, tuple[str, ...]], ...]) -> Iterator[tuple[str, str]]:
    """Names of the sets that are refused for the same reasons, and those reasons."""
    by_reason: dict[str, list[str]] = {}
    for candidate, why in refused:
        by_reason.setdefault("; ".join(why), []).append(candidate.key)
    for reason, names in by_reason.items():
        yield ", ".join(names), reason


def _wrapped(text: str, lead: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def _columns(packages: Mapping[str, str]) -> list[str]:
    return [f"  {name:<14} {version}" for name, version in packages.items()]


def _shell(commands: tuple[str, ...]) -> list[str]:
    """Commands indented by two, long ones continued with a backslash, so that they can be pasted (not so on Windows)."""
    lines = []
    for command in commands:
        whole = command.replace(' -e "', ' -e\0"')  # an option and its value stay on one line
        rows = textwrap.wrap(whole, WIDTH - 4, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        rows = [command] if any("\\Scripts\\" in c for c in commands) else [row.replace("\0", " ") for row in rows]
        lines += [f"  {row} \\" for row in rows[:-1]] + [f"  {rows[-1]}"]
    return lines


def main() -> None:
    """Print pip's arguments for torch on this machine, quoted for a shell."""
    from doctor.probes import probe

    print(shlex.join(torch_requirement(probe(children=False))))


if __name__ == "__main__":
    main()
