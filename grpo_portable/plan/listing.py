"""The recipes beside this machine: does each fit, why or why not, on which path, and for how long? Facts → rows → text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from doctor.facts import Facts
from doctor.readings import system_gib
from doctor.speed import duration
from grpo_portable.errors import GrpoPortableError
from grpo_portable.plan import catalogue, planning
from grpo_portable.recipe import Recipe, load

WIDTH = 80
STAND_IN = "Qwen/Qwen3-0.6B"  # for recipes that leave the model to the user
MEASURED = "Measured:"  # header line of a recipe with the time that a report shows for the CPU
TOO_LONG_S = 3 * 86400  # nobody waits longer than this for a recipe
SLOW_S = 8 * 3600  # what does not end overnight is marked
ESTIMATES = (
    "`about`: an estimate of the training alone; --dry-run says how far off it may be. A CPU is measured anew at each "
    "look, and is slower while other programs run."
)


@dataclass(frozen=True)
class Row:
    """One recipe here. `why` is the reason for no, or what a yes rests on; `time` is None where nothing is known.

    `slow`: it has room, but its steps would take longer than a night. `estimated`: its time was not measured.
    """

    name: str
    purpose: str
    fits: bool | None  # None: it could not be judged, or the user's own model decides
    path: str | None
    time: str | None
    why: str
    slow: bool = False
    estimated: bool = False


@dataclass(frozen=True)
class Here:
    """What is asked of this machine besides its facts: None as an answer is a yes.

    `can_run`: what its installation has no engine for. `lacking`: why rewards, model or questions are not to be had.
    """

    can_run: Callable[[Recipe], dict[str, str | None]]
    lacking: Callable[[Recipe], str | None]


def rows(facts: Facts, here: Here | None) -> list[Row]:
    """A row for every recipe that comes along, those that fit first, the slow ones after the others.

    `here` is None for a machine that is not this one.
    """
    found = [row(entry, facts, here) for entry in catalogue.entries()]
    return sorted(found, key=lambda r: (r.fits is False, r.slow, r.name))


def row(entry: catalogue.Entry, facts: Facts, here: Here | None) -> Row:
    """The row of one recipe; a recipe that cannot be planned is a no with its reason, never an error."""
    open_model = False

    def no(why: str, path: str | None = None, time: str | None = None, estimated: bool = False) -> Row:
        if open_model:  # another model may fit
            return Row(
                entry.name, entry.purpose, None, None, None, f"depends on your own --model; not for {STAND_IN}: {why}"
            )
        return Row(entry.name, entry.purpose, False, path, time, why, estimated=estimated)

    try:
        recipe = load(entry.file)
        open_model = recipe.model == "auto"
        if open_model:
            recipe = replace(recipe, model=STAND_IN)
        settled, diagnosis = planning.plan(recipe, facts, auto=True, can_run=here.can_run(recipe) if here else None)
    except GrpoPortableError as error:
        return no((error.because or error.fact).partition("; ")[0])
    path, ledger = settled.recipe.path, settled.ledger
    if ledger is not None and ledger.fits is False:
        return no(ledger.reason, path)
    step = planning.step_seconds(settled, diagnosis)
    measured = _measured(entry, path)
    time = measured or (f"about {duration(step.total_s * recipe.steps)}" if step else None)
    estimated = time is not None and not measured
    if step and estimated and step.low_s * recipe.steps > TOO_LONG_S:
        return no(f"{path} has room, but would take {time}", path, time, estimated)
    lacks = here.lacking(replace(recipe, model="embedded") if open_model else recipe) if here else None
    if lacks and not open_model:
        return no(lacks, path, time, estimated)
    room = "memory unknown"
    if ledger is not None:
        have = f" of {ledger.have_gib:.1f}" if ledger.have_gib is not None else ""
        room = f"{ledger.need_gib:.1f}{have} GiB"
    if open_model:
        own = "--model and --data" if lacks else "--model"
        room, time, estimated = f"with your own {own}; {room} for {STAND_IN}", None, False
    slow = estimated and step is not None and step.total_s * recipe.steps > SLOW_S
    return Row(entry.name, entry.purpose, True, path, time, room, slow, estimated)


def text(found: Iterable[Row], machine: str) -> str:
    """Two lines a recipe: name, yes or no, path, time; what it is for and why it does not fit."""
    table = list(found)
    width = max((len(r.name) for r in table), default=0)
    lines = [f"fits here? ({machine})", ""]
    for r in table:
        answer = "slow" if r.slow else {True: "yes", False: "no", None: "?"}[r.fits]
        told = ", ".join(part for part in (r.path, r.time or "time not known", r.why) if part) if r.fits else r.why
        lines += textwrap.wrap(
            f"{r.name:<{width}}  {answer:<4}  {told}", WIDTH, subsequent_indent=" " * (width + 8), drop_whitespace=True
        )
        lines += textwrap.wrap(r.purpose, WIDTH, initial_indent="    ", subsequent_indent="    ")
    if any(r.estimated for r in table):
        lines += ["", *textwrap.wrap(ESTIMATES, WIDTH)]
    lines += ["", "show one: grpo-portable recipes NAME"]
    best = next((r.name for r in table if r.fits and not r.slow), "NAME")
    lines += [f"plan one: grpo-portable train {best} --auto --dry-run"]
    return "\n".join(lines)


def plain() -> str:
    """Names and purposes alone, for when the machine cannot be looked at."""
    entries = catalogue.entries()
    width = max((len(entry.name) for entry in entries), default=0)
    return "\n".join(f"{entry.name:<{width}}  {entry.purpose}" for entry in entries)


def machine(facts: Facts) -> str:
    """This machine in a few words."""
    if facts.gpus:
        kinds = Counter(gpu.name or "a GPU" for gpu in facts.gpus)
        return " + ".join(f"{count} x {name}" if count > 1 else name for name, count in kinds.items())
    if facts.gpus is None:
        return "no GPU was looked for"
    free = system_gib(facts)
    return "no GPU" + (f", {free:.0f} GiB of memory free" if free is not None else "")


def _measured(entry: catalogue.Entry, path: str) -> str | None:
    if path != "cpu":
        return None
    line = next((line for line in catalogue.header(entry.file) if line.startswith(MEASURED)), None)
    return f"measured {line.removeprefix(MEASURED).partition('(')[0].strip().rstrip('.')}" if line else None
