"""Walls of version locks, told like a resolver's proof: because A needs x, and B is y, therefore; one command; what won't help.

Only TRL's declared vLLM range closes paths (its trainer is what drives vLLM); the others warn, since what they break shows in
a trial or concerns the Unsloth backend alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from packaging.version import Version

from doctor.diagnosis import VLLM_PATHS, Help, Wall
from doctor.facts import Facts
from doctor.locks import Need, conflicts, installed, missing_parts, need, no_common, pip_line, remedy, shown_range
from doctor.releases import READ_ON, versions
from doctor.versions import allows, base, version

TRL_AGE = re.compile(r"GuidedDecodingParams|worker_extension_cls", re.IGNORECASE)
_UNSLOTH = ("unsloth", "unsloth_zoo")
_SET = Help("Or install a whole set that is known to fit together", "grpo-doctor --install-plan", "certain")


def lock_walls(facts: Facts) -> Iterator[Wall]:
    """One wall for each kind of lock that does not close."""
    unmet = conflicts(facts)
    apart = list(_unsloth_apart(facts))
    yield from apart
    told = {(n.who, n.of) for pair in _apart_needs(facts) for n in pair}
    rest = [n for n in unmet if (n.who, n.of) not in told]
    yield from _trl_vllm(facts, [n for n in rest if (n.who, n.of) == ("trl", "vllm")])
    yield from _vllm(facts, [n for n in rest if n.who == "vllm"])
    yield from _unsloth(facts, [n for n in rest if n.who in _UNSLOTH], bool(apart))
    yield from _torchao(facts, [n for n in rest if (n.who, n.of) == ("torchao", "torch")])
    others = [n for n in rest if n.who not in ("vllm", *_UNSLOTH) and (n.who, n.of) not in _TOLD]
    yield from _others(facts, others)
    yield from _zoo_warm_up(facts)
    yield from _zoo_ahead(facts)


_TOLD = {("trl", "vllm"), ("torchao", "torch")}


def _have(facts: Facts, package: str) -> str:
    return f"packages.{package} = {facts.packages.get(package)}"


def _helps(facts: Facts, needs: Iterable[Need]) -> tuple[Help, ...]:
    change = remedy(facts, needs)
    if not change:
        return (_SET,)
    names = ", ".join(f"{package} {facts.version(package)} → {v}" for package, v in sorted(change.items()))
    return (Help(f"Change {len(change)} package{'s' * (len(change) > 1)}: {names}", pip_line(change), "likely"), _SET)


def _alone(facts: Facts, unmet: Need) -> str | None:
    """Which single upgrade does not help, and why."""
    state = installed(facts)
    said = []
    for package in (unmet.who, unmet.of):
        newest = Version(versions(package)[-1]) if versions(package) else None
        if newest is None or base(state[package]) >= newest:
            continue
        if package == unmet.of and not allows(unmet.range, newest):
            said.append(f"Upgrading {package} alone: {newest} is outside the range too")
        if package == unmet.who:
            wanted = need(facts, package, newest, unmet.of)
            if wanted is not None and not allows(wanted.range, state[unmet.of]):
                said.append(f"Upgrading {package} alone: {newest} needs {unmet.of} {shown_range(wanted.range)}")
    return "; ".join(said) or None


def _proof(facts: Facts, needs: Iterable[Need], therefore: str) -> tuple[str, ...]:
    lines: list[str] = []
    for n in needs:
        lines += [str(n), f"and {_have(facts, n.of)}"]
    return (*dict.fromkeys(lines), f"therefore {therefore}")


def _trl_vllm(facts: Facts, needs: list[Need]) -> Iterator[Wall]:
    if not needs:
        return
    n = needs[0]
    yield Wall(
        "LOCK-TRL-VLLM",
        VLLM_PATHS,
        f"trl {facts.version('trl')} was made for vllm {shown_range(n.range)}, and vllm {facts.version('vllm')} is installed",
        (*_proof(facts, needs, "the GRPO trainer cannot be relied on with this vLLM"), *_said(facts)),
        _helps(facts, needs),
        _alone(facts, n)
        or "Leaving vllm installed but unused: TRL up to 0.25 imports it whether it is used or not (trl#4617)",
    )


def _said(facts: Facts) -> list[str]:
    """The failure that this lock explains, in its own words."""
    trials = ((name, facts.probe(name)) for name in ("vllm_import", "vllm_start"))
    return [f'{name} failed: "{t.error}"' for name, t in trials if t.ok is False and TRL_AGE.search(t.error or "")]


def _vllm(facts: Facts, needs: list[Need]) -> Iterator[Wall]:
    """vLLM's own pins. A passed trial outranks them; a failed one tells them itself (`walls_vllm`)."""
    if facts.probe("vllm_import").ok is False or facts.probe("vllm_start").ok is not None:
        return
    if facts.probe("vllm_import").ok:
        needs = [n for n in needs if n.of != "torch"]
    if needs:
        first = needs[0]
        yield Wall(
            "LOCK-VLLM",
            (),
            f"vllm {first.version} needs {first.of} {shown_range(first.range)}, and {facts.version(first.of)} is installed",
            _proof(facts, needs, "vLLM may not import or start; nothing has tried it yet"),
            _helps(facts, needs),
            _alone(facts, first),
        )


def _unsloth(facts: Facts, needs: list[Need], apart: bool) -> Iterator[Wall]:
    gone = missing_parts(facts)
    if gone:
        yield Wall(
            "LOCK-UNSLOTH",
            (),
            f"unsloth {gone[0].version} is installed without unsloth_zoo, which it cannot be imported without",
            (
                str(gone[0]),
                "and packages.unsloth_zoo = absent",
                "therefore the Unsloth backend is out; no path needs it",
            ),
            (Help("Install the zoo of the same month, without touching torch", _zoo_line(facts), "likely"), _SET),
        )
    if needs and not (apart and len(needs) == 1):
        others = sorted({n.of for n in needs})
        yield Wall(
            "LOCK-UNSLOTH",
            (),
            f"unsloth {facts.version('unsloth') or facts.version('unsloth_zoo')} and the installed {', '.join(others)} exclude "
            "each other",
            _proof(
                facts,
                needs,
                "the Unsloth backend may fail at import or in training; the paths themselves do not need it",
            ),
            _helps(facts, needs),
            _alone(facts, needs[0]),
        )


def _zoo_line(facts: Facts) -> str:
    month = ".".join((facts.version("unsloth") or "").split(".")[:2])
    later = (
        ".".join([month.split(".")[0], str(int(month.split(".")[1]) + 1)])
        if month.count(".") == 1 and month.replace(".", "").isdigit()
        else ""
    )
    return f'pip install --no-deps "unsloth_zoo>={month},<{later}"' if later else "pip install --no-deps unsloth_zoo"


def _apart_needs(facts: Facts) -> list[tuple[Need, Need]]:
    found = []
    for one in _UNSLOTH:
        for of in ("torch", "transformers"):
            pair = no_common(facts, one, "vllm", of)
            if pair is not None:
                found.append(pair)
    return found


def _unsloth_apart(facts: Facts) -> Iterator[Wall]:
    """Unsloth and vLLM want a third package in versions that do not meet."""
    pairs = _apart_needs(facts)
    if not pairs:
        return
    mine, theirs = pairs[0]
    lines = []
    for a, b in pairs:
        lines += [str(a), f"and {b}", f"therefore no {a.of} released by {READ_ON} satisfies both"]
    yield Wall(
        "LOCK-UNSLOTH-VLLM",
        (),
        f"{mine.who} {mine.version} and vllm {theirs.version} have no {mine.of} in common",
        tuple(dict.fromkeys(lines)),
        _helps(facts, [mine, theirs]) if mine.of in installed(facts) else (_SET,),
        f"Another {mine.of}: whichever is installed, one of the two is broken",
    )


def _torchao(facts: Facts, needs: list[Need]) -> Iterator[Wall]:
    if needs:
        yield Wall(
            "LOCK-TORCHAO",
            (),
            f"torchao {facts.version('torchao')} was built for another torch than {facts.version('torch')}",
            (
                f"{_have(facts, 'torchao')}, {_have(facts, 'torch')}",
                f"its compiled kernels load beside torch {shown_range(needs[0].range)} only, and are skipped with one warning "
                "line beside others (ao#2919)",
            ),
            (
                *_helps(facts, needs)[:1],
                Help("Or leave it: it matters for torchao's FP8 and int8 kernels only", None, "certain"),
            ),
        )


def _others(facts: Facts, needs: list[Need]) -> Iterator[Wall]:
    if needs:
        listed = "; ".join(f"{n.who} {n.version} needs {n.of} {shown_range(n.range)}" for n in needs[:3])
        yield Wall(
            "LOCK-OTHER",
            (),
            f"Installed packages disagree: {listed}",
            _proof(facts, needs, "what uses both may fail; no trial has shown it yet"),
            _helps(facts, needs),
        )


def _zoo_warm_up(facts: Facts) -> Iterator[Wall]:
    """Known pair: vLLM from 0.21 on calls a hook that Unsloth's own LoRA manager got in zoo 2026.6.6."""
    zoo, vllm = version(facts.version("unsloth_zoo")), version(facts.version("vllm"))
    told = "get_dummy_lora_warmup_rank" in (facts.probe("vllm_start").error or "")
    if (
        zoo
        and vllm
        and not told
        and base(vllm) >= Version("0.21")
        and zoo < Version("2026.6.6")
        and facts.version("unsloth")
    ):
        yield Wall(
            "PAIR-ZOO-WARMUP",
            (),
            f"unsloth_zoo {zoo} beside vllm {vllm} dies in vLLM's LoRA warm-up when Unsloth starts the engine",
            (
                "vLLM >= 0.21 calls get_dummy_lora_warmup_rank on its LoRA manager; unsloth_zoo swaps in its own class, which "
                "has it from 2026.6.6 on (unsloth PR 6496)",
                f"{_have(facts, 'unsloth_zoo')}, {_have(facts, 'vllm')}",
            ),
            zoo_helps(),
            "Changing trl or transformers; vLLM without Unsloth is not affected",
        )


def zoo_helps() -> tuple[Help, ...]:
    """What helps where unsloth and its zoo are of different ages."""
    return (
        Help(
            "Upgrade Unsloth and its zoo together", 'pip install "unsloth>=2026.6.9" "unsloth_zoo>=2026.6.7"', "likely"
        ),
        Help("Or train without it: only a recipe with `backend: unsloth` imports Unsloth", None, "certain"),
    )


def _zoo_ahead(facts: Facts) -> Iterator[Wall]:
    """Known pair: a zoo with tool masks under an unsloth that does not write the function it calls."""
    zoo, unsloth = version(facts.version("unsloth_zoo")), version(facts.version("unsloth"))
    if zoo and unsloth and unsloth < Version("2026.5.5") and zoo >= Version("2026.6.1"):
        yield Wall(
            "PAIR-TOOL-MASK",
            (),
            f"unsloth {unsloth} with unsloth_zoo {zoo} breaks in GRPO's loss: NameError align_completion_tool_mask",
            (
                f"{_have(facts, 'unsloth')}, {_have(facts, 'unsloth_zoo')}",
                "the tool mask came to both at once, in late May 2026 (unsloth PR 5682, unsloth-zoo PR 688); unsloth pins its "
                "zoo from below only, so a later zoo slips in",
            ),
            (
                Help("Bring both to one month", 'pip install "unsloth>=2026.6.9" "unsloth_zoo>=2026.6.7"', "likely"),
                _SET,
            ),
            "Reinstalling the old unsloth: pip takes the newest zoo again",
        )
