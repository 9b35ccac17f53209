"""From a command to a finished run: recipe → diagnosis → settled recipe → run folder → supervisor → scores → report.

The I/O around the pure parts: probing the machine, asking for the hub, printing the plan. Torch-free.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from doctor import memory
from doctor.diagnosis import Diagnosis, diagnosis_to_json
from doctor.facts import Facts, facts_to_json
from doctor.shapes import shape_of
from grpo_portable import announce, catalogue, reach, supervise
from grpo_portable import run as run_folder
from grpo_portable.embedded import model_folder
from grpo_portable.errors import PathClosed, RecipeError, RunFolderError
from grpo_portable.recipe import Recipe, load, override
from grpo_portable.rollout.available import unavailable
from grpo_portable.settle import Settled, settle

RUNS = Path("runs")
TRAINING_STACK = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


@dataclass(frozen=True)
class Prepared:
    name: str
    settled: Settled
    diagnosis: Diagnosis


def train(
    name: str | None, *, auto: bool, overrides: Sequence[str], out: Path | None, dry_run: bool, fallback: bool
) -> None:
    """Train from a recipe's name or file, or let `--auto` pick one; print the plan, run it, print the verdict."""
    prepared = prepare(name, auto=auto, overrides=overrides)
    recipe = prepared.settled.recipe
    text = announce.plan_text(prepared.settled, prepared.diagnosis, minutes(recipe, prepared.diagnosis))
    print(text, flush=True)
    if dry_run:
        return
    _need_training_stack()
    folder = _new_folder(prepared, out)
    print(f"\nrun folder: {folder.path}\n", flush=True)
    finish(folder, fallback=fallback)


def resume(out: Path | None, *, fallback: bool) -> None:
    """Go on with a run: the stages that are complete are kept, training goes on from its last whole checkpoint."""
    folder = run_folder.open_run(out or _newest())
    _need_training_stack()
    folder.event("resume", "the run goes on")
    finish(folder, fallback=fallback)


def evaluate(
    name: str | None, *, adapter: Path | None, overrides: Sequence[str], out: Path | None, resuming: bool
) -> None:
    """Evaluate a model, with or without an adapter, in a run folder of its own."""
    if resuming:
        folder = run_folder.open_run(out or _newest())
    else:
        prepared = prepare(name, auto=True, overrides=overrides)
        _need_training_stack()
        folder = _new_folder(replace(prepared, name="eval"), out)
        task = {"only": "evaluate", "adapter": str(adapter.resolve()) if adapter else None}
        folder.write_json("task.json", task)
    finish(folder, fallback=True)


def prepare(name: str | None, *, auto: bool, overrides: Sequence[str]) -> Prepared:
    """Look at the machine, choose or read the recipe, and settle it. Nothing is written."""
    from doctor import plan, probes

    if name is None and not auto:
        raise RecipeError(
            "no recipe was named", help="`grpo-portable train --auto`, or name one of `grpo-portable recipes`"
        )
    override(Recipe(), overrides)  # a typing mistake is told before the machine is looked at
    file = catalogue.find(name) if name is not None else None
    recipe = load(file, overrides) if file is not None else None
    facts = probes.probe()
    notes: list[str] = []
    if recipe is None:
        recipe, notes = _auto_recipe(facts, overrides)
        name = notes.pop(0)
    diagnosis = plan.diagnose(facts, recipe.model, **shape_options(recipe))
    settled = settle(
        recipe,
        diagnosis,
        auto=auto,
        can_run=unavailable(recipe),
        ledger_of=lambda path: ledger_of(recipe, diagnosis, path),
    )
    stem = Path(str(name)).stem
    return Prepared(stem, replace(settled, reasons=(*notes, *settled.reasons)), diagnosis)


def shape_options(recipe: Recipe) -> dict[str, int]:
    """What the memory ledger must know of a recipe."""
    return {
        "group_size": recipe.group_size,
        "prompts_per_step": recipe.prompts_per_step,
        "prompt_tokens": recipe.max_prompt_tokens,
        "completion_tokens": recipe.max_completion_tokens,
        "lora_rank": recipe.lora_rank,
    }


def ledger_of(recipe: Recipe, diagnosis: Diagnosis, path: str) -> memory.Settled | None:
    """What a path needs of the card the doctor chose (`cpu`: of the system), None when the model's shape is not known."""
    from doctor.plan import card_memory

    shape = shape_of(str(model_folder()) if recipe.model == "embedded" else recipe.model)
    if shape is None:
        return None
    facts, chosen = diagnosis.facts, diagnosis.plan.gpus
    card = next((g for g in facts.gpus or () if path != "cpu" and (not chosen or g.index == chosen[0])), None)
    have = facts.host.ram_gib if path == "cpu" else card_memory(facts, card)[0] if card else None
    return memory.settle(shape, path, have, **shape_options(recipe))


def minutes(recipe: Recipe, diagnosis: Diagnosis) -> str | None:
    """An estimate of the run's length as text with its error, None when the machine or the model is not known."""
    from doctor import speed

    return speed.estimate_text(diagnosis, steps=recipe.steps, **shape_options(recipe))


def finish(folder: run_folder.RunFolder, *, fallback: bool) -> None:
    """Supervise the run to its end, score it, write the report, and print the verdict."""
    from grpo_portable import report, scoring

    supervise.supervise(folder, fallback=fallback)
    scoring.score_run(folder)
    file = report.write_report(folder)
    print(report.verdict(folder))
    print(f"report: {file}")


def _auto_recipe(facts: Facts, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe `--auto` picks for this machine, and [its name, the reason]."""
    from doctor import plan

    hub = reach.hub()

    def fits(recipe: Recipe) -> str | None:
        chosen = plan.diagnose(facts, recipe.model, **shape_options(recipe)).plan.path
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


def _new_folder(prepared: Prepared, out: Path | None) -> run_folder.RunFolder:
    path = out or RUNS / f"{prepared.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    header = (
        f"{prepared.name}, settled on {time.strftime('%Y-%m-%d')}: every choice is written out.\n"
        "Run it again with: grpo-portable train recipe.yaml"
    )
    folder = run_folder.create(path, prepared.settled.recipe, header)
    folder.write_json("facts.json", facts_to_json(prepared.diagnosis.facts))
    folder.write_json("plan.json", {**diagnosis_to_json(prepared.diagnosis), "settled": list(prepared.settled.reasons)})
    folder.write_json("run.json", {"schema": run_folder.SCHEMA, "recipe": prepared.name, "command": _command()})
    return folder


def _command() -> str:
    """The command as a report may show it: of a file's or folder's place only its name."""

    def shown(argument: str) -> str:
        key, equals, value = argument.rpartition("=")
        return key + equals + (Path(value).name if value.startswith(("/", "~", ".")) else value)

    return shlex.join(["grpo-portable", *map(shown, sys.argv[1:])])


def _newest() -> Path:
    runs = sorted(RUNS.glob("*/recipe.yaml"), key=lambda f: f.stat().st_mtime)
    if not runs:
        raise RunFolderError(
            "there is no run to go on with", because="runs/ holds none", help="name its folder with --out"
        )
    return runs[-1].parent


def _need_training_stack() -> None:
    missing = [name for name in TRAINING_STACK if importlib.util.find_spec(name) is None]
    if missing:
        raise PathClosed(
            f"{', '.join(missing)} not installed",
            because="the base install is only the doctor, so that the right torch can be chosen first",
            help="`grpo-doctor --install-plan` prints the commands for this machine",
        )
