"""Who needs what of whom: what installed packages declare first, the dated table of releases second.

A conflict is a need that the installed version does not meet. A remedy is the smallest set of version changes after which
no need is unmet, with the driver, the card and Python taken into account. Pure; nothing is imported or asked of an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from doctor.facts import ABSENT, Facts
from doctor.readings import all_amd, build, cards, driver_cuda, jetson
from doctor.releases import OURS, READ_ON, TORCH_CUDA, asked, asked_of, asked_python, versions
from doctor.versions import allows, base, specifiers, version

State = Mapping[str, Version]

# Ranges that hold in fact though no metadata says so: package, versions, of, range, source.
_IN_FACT = (
    (
        "vllm",
        "<0.11.1",
        "transformers",
        "<5",
        "it declares no upper bound, but calls what Transformers 5 removed (verl#4337)",
    ),
)
# What a change costs: swapping torch swaps everything compiled against it.
_COST = {"torch": 5, "vllm": 3, "unsloth": 2}
_DOWN = 0.5
_CANDIDATES = 4
_EXPANSIONS = 300


@dataclass(frozen=True)
class Need:
    """`who` at `version` needs `of` within `range`; `source` says who says so."""

    who: str
    version: str
    of: str
    range: SpecifierSet
    source: str

    def __str__(self) -> str:
        return f"{self.who} {self.version} needs {self.of} {shown_range(self.range)} ({self.source})"


def shown_range(spec: SpecifierSet) -> str:
    """A range with its bounds first and at most three of its holes."""
    clauses = sorted(str(c) for c in spec)
    bounds = sorted((c for c in clauses if not c.startswith("!=")), key=lambda c: c.startswith("<"))
    holes = [c for c in clauses if c.startswith("!=")]
    more = [f"and {len(holes) - 3} more holes"] if len(holes) > 3 else []
    return ", ".join([*bounds, *holes[:3], *more]) or "any version"


def installed(facts: Facts) -> dict[str, Version]:
    """Package → version, for all that are installed with a readable version."""
    found = {}
    for name in facts.packages:
        parsed = version(facts.version(name))
        if parsed is not None:
            found[name] = parsed
    return found


def need(facts: Facts, who: str, v: Version, of: str) -> Need | None:
    """What `who` at version `v` asks of another package, None when it asks nothing or nobody can say.

    The metadata of the installed distribution speaks for the installed version, the table for every other.
    """
    declared = _declared(facts, who, of) if version(facts.version(who)) == v else None
    if declared is not None:
        return Need(who, str(v), of, declared, "its installed metadata")
    clauses, source = asked(who, v, of), f"released metadata, read {READ_ON}"
    for name, those, what, limit, why in _IN_FACT:
        if (name, what) == (who, of) and v in specifiers(those):
            clauses, source = ",".join(filter(None, (clauses, limit))), why
    return Need(who, str(v), of, specifiers(clauses), source) if clauses else None


def _declared(facts: Facts, who: str, of: str) -> SpecifierSet | None:
    found = [
        r.specifier
        for line in _lines(facts, who)
        if (r := _requirement(line)) and _names(r, of) and _applies(r, facts, of)
    ]
    total = SpecifierSet()
    for spec in found:
        total &= spec
    return total if found and len(total) else None


def _lines(facts: Facts, who: str) -> list[object]:
    requires = facts.extra.get("requires")
    lines = requires.get(who) if isinstance(requires, Mapping) else None
    return list(lines) if isinstance(lines, (list, tuple)) else []


@cache
def _parse(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _requirement(line: object) -> Requirement | None:
    return _parse(line) if isinstance(line, str) and len(line) < 2000 else None


def _names(requirement: Requirement, package: str) -> bool:
    name = requirement.name.lower().replace("-", "_")
    return name == package or (name, package) == ("flashinfer_python", "flashinfer")


def _applies(requirement: Requirement, facts: Facts, of: str) -> bool:
    """Whether a requirement holds on this machine. Optional ones count when the extra bears the package's own name:
    that is where TRL declares the vLLM it was made for."""
    marker: Marker | None = requirement.marker
    if marker is None:
        return True
    platform = facts.host.platform or "linux"
    environment = {
        "extra": of if "extra" in str(marker) else "",
        "sys_platform": {"windows": "win32", "darwin": "darwin"}.get(platform, "linux"),
        "platform_system": {"windows": "Windows", "darwin": "Darwin"}.get(platform, "Linux"),
        "platform_machine": facts.host.arch or "x86_64",
        "python_version": facts.host.python or "3.12",
        "python_full_version": facts.host.python or "3.12",
    }
    try:
        return marker.evaluate(environment)
    except (UndefinedComparison, UndefinedEnvironmentName, ValueError):
        return False


def conflicts(facts: Facts, state: State | None = None) -> list[Need]:
    """The needs that the state (by default: what is installed) does not meet."""
    state = installed(facts) if state is None else state
    found = []
    for who, v in state.items():
        for of in _asks_of(facts, who):
            wanted = need(facts, who, v, of) if of in state else None
            if wanted is not None and not allows(wanted.range, state[of]):
                found.append(wanted)
    return found


def _asks_of(facts: Facts, who: str) -> list[str]:
    """The packages that `who` may ask something of."""
    declared = (r.name.lower().replace("-", "_") for line in _lines(facts, who) if (r := _requirement(line)))
    names = {*asked_of(who), *declared} - {who}
    return sorted("flashinfer" if name == "flashinfer_python" else name for name in names)


def missing_parts(facts: Facts) -> list[Need]:
    """Needs of packages that are looked for and absent, where the one is useless without the other."""
    v = version(facts.version("unsloth"))
    if v is None or facts.packages.get("unsloth_zoo") != ABSENT:
        return []
    return [
        need(facts, "unsloth", v, "unsloth_zoo") or Need("unsloth", str(v), "unsloth_zoo", SpecifierSet(), "its import")
    ]


def no_common(facts: Facts, one: str, other: str, of: str) -> tuple[Need, Need] | None:
    """The needs of two installed packages that no known release of a third meets together."""
    state = installed(facts)
    if one not in state or other not in state:
        return None
    needs = need(facts, one, state[one], of), need(facts, other, state[other], of)
    if needs[0] is None or needs[1] is None:
        return None
    both = (needs[0], needs[1])
    known = [Version(v) for v in versions(of)]
    known += [state[of]] if of in state else []
    return None if any(all(allows(n.range, v) for n in both) for v in known) else both


def remedy(facts: Facts, scope: Iterable[Need]) -> dict[str, str] | None:
    """Package → version: the cheapest changes that leave no package in `scope` with an unmet need; {} when there is
    nothing to change, None when none is found. Cheapest is fewest packages, torch counted with all that is built on it.
    """
    names = {name for n in scope for name in (n.who, n.of)}
    order = count()
    queue: list[tuple[float, int, dict[str, Version], dict[str, str]]] = [(0.0, next(order), installed(facts), {})]
    for _ in range(_EXPANSIONS):
        if not queue:
            return None
        cost, _, state, changed = heappop(queue)
        unmet = next((n for n in conflicts(facts, state) if {n.who, n.of} & (names | set(changed))), None)
        if unmet is None:
            return changed
        for package in sorted({unmet.who, unmet.of} - set(changed)):
            for rank, candidate in enumerate(_candidates(facts, state, unmet, package)):
                step = _COST.get(package, 1) + 0.01 * rank + (_DOWN if Version(candidate) < state[package] else 0)
                after = {**state, package: Version(candidate)}
                heappush(queue, (cost + step, next(order), after, {**changed, package: candidate}))
    return None


def _candidates(facts: Facts, state: State, unmet: Need, package: str) -> list[str]:
    """Versions of one side of an unmet need that would meet it, newest first."""
    fitting = []
    for text in reversed(versions(package)):
        v = Version(text)
        if package == unmet.of:
            meets = allows(unmet.range, v)
        else:
            wanted = need(facts, package, v, unmet.of)
            meets = wanted is None or allows(wanted.range, state[unmet.of])
        ours = _stays_ours(package, v, state) and runs_here(facts, package, v)
        if meets and v != base(state[package]) and ours and _pip_brings(facts, package, v):
            fitting.append(text)
    return fitting[:_CANDIDATES]


def _stays_ours(package: str, v: Version, state: State) -> bool:
    """A remedy never leaves what this project itself asks, where the installed version meets it."""
    ours = specifiers(OURS.get(package, ""))
    return allows(ours, v) or not allows(ours, state[package])


def runs_here(facts: Facts, package: str, v: Version) -> bool:
    """Whether this Python, driver and card take a version, as far as the table knows."""
    python, range_ = version(facts.host.python), asked_python(package, v)
    if python is not None and range_ is not None and not allows(specifiers(range_), python):
        return False
    return package != "torch" or torch_runs_here(facts, v)


def _pip_brings(facts: Facts, package: str, v: Version) -> bool:
    """Whether `pip install` of a number is enough: PyPI's torch and vLLM are CUDA builds (for Windows torch is a CPU build),
    and a vLLM brings the torch it pins."""
    if package not in ("torch", "vllm"):
        return True
    windows = facts.host.platform == "windows"
    if build(facts) in ("cpu", "rocm", "xpu") or all_amd(facts) or jetson(facts) or windows:
        return False
    pinned = asked("vllm", v, "torch") if package == "vllm" else None
    return pinned is None or torch_runs_here(facts, Version(pinned.removeprefix("==")))


def torch_runs_here(facts: Facts, v: Version) -> bool:
    """Whether PyPI's build of a torch version runs on this driver and card."""
    cuda, serves = TORCH_CUDA.get(str(v)), driver_cuda(facts)
    if cuda is None:
        return True
    if serves is not None and serves[0] < cuda[0]:
        return False
    if facts.host.arch in ("aarch64", "arm64") and v < Version("2.10"):
        return False  # PyPI's was CPU-only there (pytorch#160162)
    known = [c.capability for c in cards(facts) or () if c.capability is not None]
    if not known:
        return True
    best = max(known)
    return (best[0] < 10 or cuda >= (12, 8)) and (best >= (7, 5) or cuda[0] < 13)


def pip_line(change: Mapping[str, str]) -> str:
    """The command that makes the changes."""
    return "pip install " + " ".join(f'"{package}=={v}"' for package, v in sorted(change.items()))
