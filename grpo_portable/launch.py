"""From a command to a finished run: recipe → diagnosis → settled recipe → run folder → supervisor → scores → report.

The I/O around the pure parts: probing the machine, asking for the hub, printing the plan. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from doctor.diagnosis import About, Diagnosis, Reason, diagnosis_to_json
from doctor.facts import Facts, FactsError, facts_from_json, facts_to_json
from doctor.walls_stack import for_evaluation
from grpo_portable import preflight, reach
from grpo_portable.data.rows import SUFFIXES
from grpo_portable.errors import Interrupted, PathClosed, RecipeError, RunFolderError, UsageError, wrapped
from grpo_portable.eval_task import EvalTask
from grpo_portable.plan import announce, catalogue, planning
from grpo_portable.plan.settle import Settled
from grpo_portable.recipe import Recipe, load, parsed, with_template
from grpo_portable.rollout.available import unavailable
from grpo_portable.run import edited, saved, unfinished
from grpo_portable.run import folder as run_folder
from grpo_portable.supervision import supervisor


@dataclass(frozen=True)
class Prepared:
    name: str
    settled: Settled
    diagnosis: Diagnosis


def train(
    name: str | None,
    *,
    auto: bool,
    overrides: Sequence[str],
    out: Path | None,
    dry_run: bool,
    fallback: bool,
    facts_file: str | None = None,
    gpus: tuple[int, ...] | None = None,
) -> int:
    """Train from a recipe's name or file, or let `--auto` pick one; print the plan, run it, print the verdict.

    `facts_file` plans for a saved machine, and only with `dry_run`. `gpus`: those to take, by the doctor's index. Returns the
    exit code: of a `dry_run` that of what a start would be refused for, else 0.
    """
    if facts_file and not dry_run:
        raise UsageError("--facts plans for another machine", help="add --dry-run")
    prepared = prepare(name, auto=auto, overrides=overrides, facts_file=facts_file, gpus=gpus)
    settled, diagnosis = prepared.settled, prepared.diagnosis
    minutes, others = (look(settled, diagnosis) for look in (planning.minutes, planning.others))
    text = announce.plan_text(settled, diagnosis, minutes, others)
    print(text, flush=True) if dry_run else _say(text)
    if dry_run:
        refused, notes = (None, ()) if facts_file else preflight.outlook(settled.recipe, _place(prepared, out))
        if below := announce.outlook_text(refused, notes):
            print(below, flush=True)
        return refused.exit_code if refused else 0
    if told := preflight.may_start(settled.recipe):
        _say(told)
    folder = new_folder(prepared, out)
    _say(f"\nrun folder: {folder.path}\n")
    finish(folder, fallback=fallback)
    return 0


def resume(out: Path | None, *, fallback: bool, retry_fast: bool = False, gpus: tuple[int, ...] | None = None) -> None:
    """Go on with a run: the stages that are complete are kept, training goes on from its last whole checkpoint.

    A run that had to go lower stays there, with the sizes it had; `retry_fast` begins on its first rung again. It also stays
    on its GPUs, unless others are named. Of a finished run it says so.
    """
    taken = _chosen(out, trains=True)
    folder = taken.run
    if _was_finished(folder):
        if folder.trains():
            steps = folder.recipe().steps
            longer = f"grpo-portable train {folder.word}/recipe.yaml --set steps={2 * steps} --out NEW"
            _say_wrapped(f"its {steps} steps are made; to train longer begin a new run: {longer}")
        return
    with _ways_on(taken):
        if told := preflight.may_go_on(folder.recipe(), _untried()):
            _say(told)
        _say(f"run folder: {folder.path}\n")
        if told := _go_on(folder, gpus=gpus, retry_fast=retry_fast):
            _say(told)
        finish(folder, fallback=fallback)


def _chosen(out: Path | None, *, trains: bool) -> unfinished.Taken:
    """The run that was named; else the newest that is not finished, and says which."""
    if out:
        return unfinished.Taken(run_folder.open_run(out), "")
    taken = unfinished.take(trains=trains)
    _say(taken.told)
    return taken


@contextlib.contextmanager
def _ways_on(taken: unfinished.Taken) -> Iterator[None]:
    """Inside, what only the user can put right also says how to begin anew where nothing is made, and which run waits."""
    try:
        yield
    except RunFolderError:
        raise
    except (UsageError, PathClosed) as error:
        run, ways = taken.run, [error.help or "put that right and resume"]
        if run.trains() and not any(saved.made(run)):
            ways.append(f"begin anew: grpo-portable train {run.word}/recipe.yaml --set KEY=VALUE")
        if taken.waiting:
            command = "train" if run.trains() else "eval"
            ways.append(f"go on with another: grpo-portable {command} --resume --out {taken.waiting[0].word}")
        raise type(error)(error.fact, because=error.because, help="; or ".join(ways)) from error


def _go_on(folder: run_folder.RunFolder, *, gpus: tuple[int, ...] | None, retry_fast: bool) -> str:
    """Write down how a run is to go on, and say what is lower than it began. RunFolderError for a run that is at work."""
    with supervisor.alone(folder):
        if gpus is not None:
            take(folder, gpus)
        lower = _lower(folder)
        undone = f"as it began: {lower} is undone" if lower and retry_fast else ""
        if undone:
            folder.write_json("rung.json", {})
        folder.event("resume", f"the run goes on {undone}".rstrip())
    return undone or (f"still {lower} (--retry-fast undoes it)" if lower else "")


def _was_finished(folder: run_folder.RunFolder) -> bool:
    """Whether nothing was left to make but its report; says so then, with verdict and report. RunFolderError where its recipe
    was edited.
    """
    if saved.missing(folder):
        return False
    with supervisor.alone(folder):
        edited.take_over(folder, made=True)
    left = "nothing is left to do" if saved.is_reported(folder) else "only its report is to be written"
    _say(f"run folder: {folder.path}\n\nthis run is finished, {left}")
    _conclude(folder)
    return True


def _lower(folder: run_folder.RunFolder) -> str:
    """What the ladder changed of the settled recipe, `path fp8-vllm → bf16-hf`; empty when the run is on its first rung."""
    first, now, rung = load(folder.recipe_file), folder.recipe(), folder.rung()
    changed = [key for key in rung if hasattr(first, key) and getattr(first, key) != getattr(now, key)]
    told = [f"{key} {getattr(first, key)} → {getattr(now, key)}" for key in changed]
    planned = (folder.read_json("plan.json").get("plan") or {}).get("gpus") or []
    if rung.get("gpus") and len(rung["gpus"]) < len(planned):
        told.append(f"GPUs {', '.join(map(str, planned))} → {', '.join(map(str, rung['gpus']))}")
    return ", ".join(told)


def take(folder: run_folder.RunFolder, gpus: tuple[int, ...]) -> None:
    """Let a run go on with other GPUs than its plan's. UsageError for ones the run's machine has not, or that are not equal."""
    answer = folder.read_json("plan.json")
    diagnosis = planning.on_gpus(folder.recipe(), _facts_of(folder), gpus)
    answer["plan"] = {**(answer.get("plan") or {}), "gpus": list(diagnosis.plan.gpus)}
    folder.write_json("plan.json", answer)
    folder.write_json("rung.json", {k: v for k, v in folder.rung().items() if k not in ("gpus", "processes")})


def evaluate(task: EvalTask, *, out: Path | None) -> None:
    """Evaluate a model, with or without an adapter, in a run folder of its own."""
    if task.told:
        _say(task.told)
    prepared = prepare(task.recipe, auto=True, overrides=task.overrides, trains=False)
    if told := preflight.may_start(prepared.settled.recipe, trains=False):
        _say(told)
    folder = new_folder(replace(prepared, name="eval"), out)
    folder.write_json("task.json", task.to_json())
    _say(f"run folder: {folder.path}\n")
    finish(folder, fallback=True)
    if task.adapter and not task.base_too:
        _say_wrapped(f"the delta against the base: grpo-portable eval --resume --out {folder.word} --base-too")


def resume_evaluation(out: Path | None, *, base_too: bool) -> None:
    """Go on with an evaluation; `base_too` asks the model without its adapter as well."""
    # the base may also be asked for of an evaluation that is finished
    newest = base_too and not out
    taken = unfinished.Taken(unfinished.newest(trains=False), "") if newest else _chosen(out, trains=False)
    folder = taken.run
    if base_too:
        if not folder.read_json("task.json").get("adapter"):
            raise UsageError(f"`{folder.path}` evaluates no adapter", help="start one with --adapter and --base-too")
        with supervisor.alone(folder):
            folder.update_json("task.json", base_too=True)
    if _was_finished(folder):
        return
    with _ways_on(taken):
        if told := preflight.may_go_on(folder.recipe(), _untried(), trains=False):
            _say(told)
        _say(f"run folder: {folder.path}\n")
        finish(folder, fallback=True)


def prepare(
    name: str | None,
    *,
    auto: bool,
    overrides: Sequence[str],
    facts_file: str | None = None,
    gpus: tuple[int, ...] | None = None,
    trains: bool = True,
) -> Prepared:
    """Look at the machine, or at the facts of a saved one, choose or read the recipe, and settle it. Nothing is written.

    `trains` is False for an evaluation, which needs less.
    """
    if name is None and not auto:
        raise RecipeError(
            "no recipe was named", help="`grpo-portable train --auto`, or name one of `grpo-portable recipes`"
        )
    given = parsed(overrides)  # first: a typing mistake is told before the machine is looked at
    own = {"model", "data"} & given.keys()  # not the recipe's: the run is named after them
    file = catalogue.find(name) if name is not None else None
    recipe = load(file, overrides) if file is not None else None
    facts = saved_facts(facts_file) if facts_file else _probe()
    notes: list[str] = []
    if recipe is None:
        recipe, notes = _auto_recipe(facts, overrides)
        name = notes.pop(0)
    recipe = with_template(recipe, Path.cwd())
    preflight.known_rewards(recipe)
    preflight.known_template(recipe)
    if not facts_file:  # another machine has its own files
        preflight.known_files(recipe)
    can_run = None if facts_file else unavailable(recipe)
    judged = facts if trains else for_evaluation(facts)
    settled, diagnosis = planning.plan(recipe, judged, auto=auto, can_run=can_run, asked=gpus)
    told = [Reason(About.RUN, note) for note in notes]
    name = _named(settled.recipe) if own else Path(str(name)).stem
    return Prepared(name, replace(settled, reasons=(*told, *settled.reasons)), replace(diagnosis, facts=facts))


def _named(recipe: Recipe) -> str:
    """`questions-embedded`: a run's name where model or data are not a recipe's own, after both as recipes are named."""
    data, model = (
        os.path.basename(os.path.abspath(os.path.expanduser(place))) for place in (recipe.data, recipe.model)
    )
    kinds = "|".join(map(re.escape, (*SUFFIXES, ".gguf")))
    parts = (re.sub(rf"({kinds})(\.gz)?$", "", part, flags=re.I) for part in (data, model))
    return "-".join(re.sub(r"[^\w.-]+", "-", part) for part in parts).lower()


def recipes(*, plain: bool, as_json: bool, facts_file: str | None) -> str:
    """The list of recipes as text or JSON, judged for this machine (a look without trials) or a saved one."""
    from dataclasses import asdict

    from grpo_portable.plan import listing

    if plain:
        return listing.plain()
    facts = saved_facts(facts_file) if facts_file else _quick_look()
    rows = listing.rows(facts, None if facts_file else listing.Here(unavailable, preflight.lacking()))
    if as_json:
        return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)
    return listing.text(rows, listing.machine(facts))


def saved_facts(file: str) -> Facts:
    """The facts that `grpo-doctor --save-facts` wrote; UsageError when the file holds none."""
    try:
        return facts_from_json(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, FactsError) as error:
        raise UsageError(f"facts file `{file}` cannot be read", because=str(error)) from error


def _facts_of(folder: run_folder.RunFolder) -> Facts:
    try:
        return facts_from_json(folder.read_json("facts.json"))
    except FactsError as error:
        raise folder.unreadable("facts.json", str(error)) from error


def _probe() -> Facts:
    from doctor import probes

    return probes.probe()


def _untried() -> Facts:
    """The facts without trials, in a moment."""
    from doctor import probes

    return probes.probe(children=False)


def _quick_look() -> Facts:
    """The facts without trials; a machine without a card has its CPU measured, since time is what decides there."""
    from doctor import probes

    facts = _untried()
    return facts if facts.gpus else probes.with_cpu_rates(facts)


def finish(folder: run_folder.RunFolder, *, fallback: bool) -> None:
    """Supervise the run to its end, score it, write the report, and print the verdict."""
    supervisor.supervise(folder, fallback=fallback)
    _conclude(folder)


def _conclude(folder: run_folder.RunFolder) -> None:
    """Score a run that is done, write its report, and print the verdict."""
    from grpo_portable.report import page

    try:
        with supervisor.folder_errors(folder):
            file = page.write_report(folder)
    except KeyboardInterrupt:
        raise Interrupted(
            "the run is done, its report is not written", help=f"write it with: grpo-portable report {folder.word}"
        ) from None
    _say_wrapped(page.verdict(folder))
    _say(f"report: {file}")


def _say(text: str) -> None:
    """Print; a pipe that was closed or a full disk ends the printing, not the run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also for what is still in its buffer


def _say_wrapped(text: str) -> None:
    _say("\n".join(wrapped(text, "  ")))


def _auto_recipe(facts: Facts, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe `--auto` picks for this machine, and [its name, the reason]."""
    from doctor import plan

    hub = reach.hub()

    def fits(recipe: Recipe) -> str | None:
        chosen = plan.diagnose(facts, recipe.model, planning.sizes(recipe)).plan.path
        return None if chosen not in (None, "cpu") else "no GPU path is open and has room for it"

    def obtainable(model: str) -> str | None:
        return None if hub.ok or reach.have_model(model).ok else f"it is not on this machine and {hub.reason}"

    model = next((setting.partition("=")[2] for setting in overrides if setting.startswith("model=")), None)
    if model is not None:
        name, reason = ("arithmetic-embedded" if model == "embedded" else "gsm8k-base"), f"{model} was asked for"
    else:
        picked = catalogue.pick(catalogue.BY_SIZE, fits, obtainable)
        name, reason = picked.name, picked.reason
    return load(catalogue.find(name), overrides), [name, reason]


def new_folder(prepared: Prepared, out: Path | None) -> run_folder.RunFolder:
    """A run folder with the settled recipe, the machine's facts and the plan."""
    header = (
        f"{prepared.name}, settled on {time.strftime('%Y-%m-%d')}: every choice is written out.\n"
        "Run it again with: grpo-portable train recipe.yaml"
    )
    folder = run_folder.create(_place(prepared, out), prepared.settled.recipe, header)
    with supervisor.folder_errors(folder):
        folder.write_json("facts.json", facts_to_json(prepared.diagnosis.facts))
        folder.write_json("plan.json", _answer(prepared))
        told = {"schema": run_folder.SCHEMA, "recipe": prepared.name, "command": _command()}
        folder.write_json("run.json", {**told, "planned_memory": _planned_memory(prepared.settled)})
    return folder


def _place(prepared: Prepared, out: Path | None) -> Path:
    return out or run_folder.RUNS / f"{prepared.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _answer(prepared: Prepared) -> dict[str, Any]:
    """The doctor's answer and what was settled, with its reasons; a local model by its name, not by where it lies."""
    settled = prepared.settled
    answer = {**diagnosis_to_json(prepared.diagnosis), "settled": [reason.text for reason in settled.reasons]}
    answer |= {"asked": settled.recipe.path if settled.asked else None, "passed": dict(settled.passed)}
    model = answer["plan"]["model"]
    if model and Path(model).expanduser().exists():
        answer["plan"]["model"] = Path(model).name
    return answer


def _planned_memory(settled: Settled) -> dict[str, Any] | None:
    """The ledger of the path that was settled on, for the report to hold against the peak."""
    if settled.ledger is None:
        return None
    parts = {name: round(gib, 3) for name, gib in settled.ledger.ledger.items()}
    return {"path": settled.recipe.path, "ledger_gib": parts}


def _command() -> str:
    """The command as a report may show it: of a file's or folder's place only its name."""

    def shown(argument: str) -> str:
        key, equals, value = argument.rpartition("=")
        return key + equals + (Path(value).name if value.startswith(("/", "~", ".")) else value)

    return shlex.join(["grpo-portable", *map(shown, sys.argv[1:])])
