"""From a command to a finished run: recipe → diagnosis → settled recipe → run folder → supervisor → scores → report.

The I/O around the pure parts: probing the machine, asking for the hub, printing the plan. Torch-free.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from doctor.diagnosis import PATHS, About, Diagnosis, Reason, diagnosis_to_json
from doctor.facts import Facts, FactsError, facts_from_json, facts_to_json
from doctor.walls import machine_walls
from doctor.walls_model import Model
from doctor.walls_stack import for_evaluation
from grpo_portable import reach
from grpo_portable.data import sets
from grpo_portable.data.rows import SUFFIXES
from grpo_portable.errors import (
    DataError,
    GrpoPortableError,
    Interrupted,
    PathClosed,
    RecipeError,
    RunFolderError,
    UsageError,
    wrapped,
)
from grpo_portable.eval_task import EvalTask
from grpo_portable.plan import announce, catalogue, planning
from grpo_portable.plan.settle import Settled, first_help
from grpo_portable.recipe import Recipe, is_template, load, parsed, with_template
from grpo_portable.rollout.available import unavailable
from grpo_portable.run import edited, saved
from grpo_portable.run import folder as run_folder
from grpo_portable.supervision import supervisor

RUNS = Path("runs")


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
        refused, notes = (None, ()) if facts_file else _outlook(settled.recipe)
        if below := announce.outlook_text(refused, notes):
            print(below, flush=True)
        return refused.exit_code if refused else 0
    _may_start(settled.recipe)
    folder = new_folder(prepared, out)
    _say(f"\nrun folder: {folder.path}\n")
    finish(folder, fallback=fallback)
    return 0


def resume(out: Path | None, *, fallback: bool, retry_fast: bool = False, gpus: tuple[int, ...] | None = None) -> None:
    """Go on with a run: the stages that are complete are kept, training goes on from its last whole checkpoint.

    A run that had to go lower stays there, with the sizes it had; `retry_fast` begins on its first rung again. It also stays
    on its GPUs, unless others are named. Of a finished run it says so.
    """
    folder = run_folder.open_run(out or _to_go_on_with(trains=True))
    if _was_finished(folder):
        if _trains(folder.path):
            steps = folder.recipe().steps
            longer = f"grpo-portable train {folder.word}/recipe.yaml --set steps={2 * steps} --out NEW"
            _say_wrapped(f"its {steps} steps are made; to train longer begin a new run: {longer}")
        return
    _may_go_on(folder.recipe())
    _say(f"run folder: {folder.path}\n")
    if told := _go_on(folder, gpus=gpus, retry_fast=retry_fast):
        _say(told)
    finish(folder, fallback=fallback)


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
    """Whether nothing was left to do; says so then, with verdict and report. RunFolderError where its recipe was edited."""
    if saved.missing(folder):
        return False
    with supervisor.alone(folder):
        edited.take_over(folder, made=True)
    _say(f"run folder: {folder.path}\n\nthis run is finished, nothing is left to do")
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
    _may_start(prepared.settled.recipe, trains=False)
    folder = new_folder(replace(prepared, name="eval"), out)
    folder.write_json("task.json", task.to_json())
    _say(f"run folder: {folder.path}\n")
    finish(folder, fallback=True)
    if task.adapter and not task.base_too:
        _say_wrapped(f"the delta against the base: grpo-portable eval --resume --out {folder.word} --base-too")


def resume_evaluation(out: Path | None, *, base_too: bool) -> None:
    """Go on with an evaluation; `base_too` asks the model without its adapter as well."""
    # the base may also be asked for of an evaluation that is finished
    folder = run_folder.open_run(out or (_newest(trains=False) if base_too else _to_go_on_with(trains=False)))
    if base_too:
        if not folder.read_json("task.json").get("adapter"):
            raise UsageError(f"`{folder.path}` evaluates no adapter", help="start one with --adapter and --base-too")
        with supervisor.alone(folder):
            folder.update_json("task.json", base_too=True)
    if _was_finished(folder):
        return
    _may_go_on(folder.recipe(), trains=False)
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
    own = {"model", "data"} & parsed(
        overrides
    ).keys()  # first: a typing mistake is told before the machine is looked at
    file = catalogue.find(name) if name is not None else None
    recipe = load(file, overrides) if file is not None else None
    facts = saved_facts(facts_file) if facts_file else _probe()
    notes: list[str] = []
    if recipe is None:
        recipe, notes = _auto_recipe(facts, overrides)
        name = notes.pop(0)
    recipe = with_template(recipe, Path.cwd())
    known_rewards(recipe)
    known_template(recipe)
    if not facts_file:  # another machine has its own files
        known_files(recipe)
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
    rows = listing.rows(facts, None if facts_file else listing.Here(unavailable, _lacking()))
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


def known_rewards(recipe: Recipe) -> None:
    """RecipeError for a reward's name that is not known; a reward of one's own is looked for when the run starts."""
    from grpo_portable import rewards

    for name in recipe.rewards:
        if ":" not in name and name not in rewards.NAMES:
            rewards.resolve([name], recipe.answer_style)


def whole_rewards(recipe: Recipe) -> None:
    """RecipeError for a reward of ours that lacks what it needs, such as a package."""
    from grpo_portable import rewards

    ours = [name for name in recipe.rewards if ":" not in name]
    rewards.resolve(ours, recipe.answer_style, max_completion_tokens=recipe.max_completion_tokens)


def known_template(recipe: Recipe) -> None:
    """RecipeError for a chat template that is no file."""
    if recipe.chat_template not in ("auto", "none") and not is_template(recipe.chat_template):
        raise RecipeError(
            f"chat template `{recipe.chat_template}` cannot be used",
            because="it is neither Jinja text nor a file in the working directory or beside the recipe",
            help="`auto`, `none`, or a Jinja file",
        )


def known_files(recipe: Recipe) -> None:
    """DataError or ModelError for a file or folder that is not there, or holds no model, before libraries are loaded."""
    for source in (recipe.data, recipe.eval_data, recipe.bootstrap_data):
        if reach.names_a_file(source, SUFFIXES) and not reach.is_there(source):
            raise DataError(
                f"data file `{source}` is not there", help="check the path; hub data sets are named owner/name"
            )
    if recipe.model not in reach.BUILT_IN:
        reach.located(recipe.model)


def _looked_at(recipe: Recipe, *, trains: bool = True) -> tuple[str | None, tuple[str, ...]]:
    """(that the run stays offline, None where it does not; notes on the questions) of a plan that is about to start.

    Raises what a start is refused for before anything is loaded or written: a reward that lacks its package, a model or
    questions that are neither here nor to be had, or that cannot be used.
    """
    if trains:
        whole_rewards(recipe)
    offline = within_reach(recipe, trains=trains)
    if offline:
        reach.stay_offline()
        offline = f"the hub is out of reach ({offline}): model and data are this machine's own copies"
    return offline, _look_at_questions(recipe, trains=trains)


def _may_start(recipe: Recipe, *, trains: bool = True) -> None:
    """Raise what a start is refused for, and say whether the run stays offline."""
    offline, _ = _looked_at(recipe, trains=trains)
    if offline:
        _say(offline)


def _may_go_on(recipe: Recipe, *, trains: bool = True) -> None:
    """`_may_start` of a run that was planned before, maybe with other packages: PathClosed where every path is closed now."""
    facts = _untried()
    for wall in machine_walls(facts if trains else for_evaluation(facts), Model(recipe.model)):
        if set(wall.closes) >= set(PATHS):
            raise PathClosed(wall.fact, because=wall.because[-1], help=first_help(wall))
    _may_start(recipe, trains=trains)


def _outlook(recipe: Recipe) -> tuple[GrpoPortableError | None, tuple[str, ...]]:
    """What a start of a training would be refused for now, None for nothing, and what it would note."""
    try:
        offline, notes = _looked_at(recipe)
    except GrpoPortableError as error:
        return error, ()
    return None, (*([offline] if offline else []), *notes)


def _look_at_questions(recipe: Recipe, *, trains: bool = True) -> tuple[str, ...]:
    """Notes on the questions that lie here (a hub's may be gigabytes). DataError for ones that cannot be used."""
    parts = sets.parts(recipe, trains=trains)
    here = [part for part, source in parts.items() if source in reach.BUILT_IN or reach.is_there(source)]
    if len(here) < len(parts):
        found = {part: sets.load(recipe, part) for part in here}
        if "train" in found:
            sets.enough(recipe, found["train"], trains=trains)
        return sets.notes(recipe, found)
    asked = sets.gather(recipe, trains=trains)
    return (*sets.notes(recipe, asked.by_part()), *asked.told)


def within_reach(recipe: Recipe, *, trains: bool = True) -> str | None:
    """ModelError or DataError, in seconds, for what is neither here nor to be had; else what `reach.require` returns."""
    return reach.require(recipe.model, _sources(recipe, trains=trains))


def _lacking() -> Callable[[Recipe], str | None]:
    """Why a training could not have its rewards, model or questions, None for a yes; the hub is asked once for all recipes."""
    hub = functools.cache(reach.hub)

    def why_not(recipe: Recipe) -> str | None:
        try:
            whole_rewards(recipe)
            reach.require(recipe.model, _sources(recipe), hub)
        except GrpoPortableError as error:
            return error.fact + (f" ({error.because})" if error.because else "")
        return None

    return why_not


def _sources(recipe: Recipe, *, trains: bool = True) -> tuple[str, ...]:
    """Where the questions of a run come from, each once."""
    return tuple(dict.fromkeys(s for s in sets.parts(recipe, trains=trains).values() if s not in ("", "auto")))


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
    path = out or RUNS / f"{prepared.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    header = (
        f"{prepared.name}, settled on {time.strftime('%Y-%m-%d')}: every choice is written out.\n"
        "Run it again with: grpo-portable train recipe.yaml"
    )
    folder = run_folder.create(path, prepared.settled.recipe, header)
    with supervisor.folder_errors(folder):
        folder.write_json("facts.json", facts_to_json(prepared.diagnosis.facts))
        folder.write_json("plan.json", _answer(prepared))
        told = {"schema": run_folder.SCHEMA, "recipe": prepared.name, "command": _command()}
        folder.write_json("run.json", {**told, "planned_memory": _planned_memory(prepared.settled)})
    return folder


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


def _to_go_on_with(*, trains: bool) -> Path:
    """The newest run that is not finished: one that was at work before one that never got there. Says which, and the others.

    Where all are finished, the newest.
    """
    runs = _runs(trains=trains)
    open_ = [run for run in runs if _is_open(run)]
    begun = [run for run in open_ if not _never_began(run)]
    taken, *others = begun or open_ or runs
    if not open_:
        _say(f"every {'run' if trains else 'evaluation'} in {RUNS}/ is finished; the newest is {taken.path}")
        return taken.path
    _say_wrapped(f"going on with {taken.path}, the newest that is not finished")
    if begun and others:
        _say_wrapped("interrupted too: " + ", ".join(f"`--out {run.word}`" for run in others))
    return taken.path


def _is_open(run: run_folder.RunFolder) -> bool:
    """Whether something is left to do, also of a run whose files cannot be read: who goes on with it is told what is wrong."""
    try:
        return bool(saved.missing(run))
    except GrpoPortableError:
        return True


def _never_began(run: run_folder.RunFolder) -> bool:
    """Whether the run's start was refused: it stopped for a user's mistake before it had made anything."""
    try:
        return run.read_json("failure.json").get("kind") == "user" and not any(supervisor.made(run))
    except GrpoPortableError:
        return False


def _newest(*, trains: bool) -> Path:
    """The newest training run, or the newest evaluation: neither goes on with the other."""
    return _runs(trains=trains)[0].path


def _runs(*, trains: bool) -> list[run_folder.RunFolder]:
    """The training runs, or the evaluations, newest first. RunFolderError where there is none."""
    files = [f for f in RUNS.glob("*/recipe.yaml") if _trains(f.parent) == trains]
    if not files:
        kind = "run" if trains else "evaluation"
        raise RunFolderError(
            f"there is no {kind} to go on with", because="runs/ holds none", help="name its folder with --out"
        )
    newest_first = sorted(files, key=lambda f: f.stat().st_mtime, reverse=True)
    return [run_folder.open_run(f.parent) for f in newest_first]


def _trains(folder: Path) -> bool:
    return run_folder.open_run(folder).read_json("task.json").get("only") != "evaluate"
