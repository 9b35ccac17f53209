"""Recipe + diagnosis → a complete recipe: every `auto` replaced by a value that carries its reason.

Pure: the machine was looked at by the doctor, the hub by `reach.py`; nothing is loaded here. The settled recipe is what the
run folder keeps, so that running it again without `--auto` repeats the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from doctor import memory
from doctor.diagnosis import PATHS, Diagnosis
from grpo_portable.errors import PathClosed, RecipeError
from grpo_portable.recipe import Recipe, check

UNKNOWN_MICRO_BATCH, UNKNOWN_ROWS = 4, 64  # where the model's shape is not known


@dataclass(frozen=True)
class Settled:
    """`ledger` is the memory of the path that runs, None when the model's shape is not known."""

    recipe: Recipe
    reasons: tuple[str, ...]
    ledger: memory.Settled | None = None


def settle(
    recipe: Recipe,
    diagnosis: Diagnosis,
    *,
    auto: bool,
    can_run: Mapping[str, str | None],
    ledger_of: Callable[[str], memory.Settled | None],
) -> Settled:
    """The complete recipe and the reasons of what was chosen.

    `can_run` maps each path to None, or to the reason why this installation has no engine for it; `ledger_of` gives what a
    path needs of this machine's memory. PathClosed when the path asked for is closed, or none is open; RecipeError when
    something is `auto` and the user did not say `--auto`.
    """
    if not auto:
        open_keys = [key for key in ("path", "model", "data") if getattr(recipe, key) == "auto"]
        if open_keys:
            raise RecipeError(
                f"`{open_keys[0]}` is `auto` and nothing may choose it", help=f"add --auto, or --set {open_keys[0]}=..."
            )
    path, reasons = _path(recipe, diagnosis, can_run)
    if recipe.dora and path == "qlora-hf":
        reasons.append(
            "DoRA de-quantises every base weight in every forward pass: expect slow updates on 4-bit weights"
        )
    settled = replace(recipe, path=path, eval_data=recipe.data if recipe.eval_data == "auto" else recipe.eval_data)
    ledger = ledger_of(path)
    settled = _sizes(settled, ledger, reasons)
    check(settled, "the settled recipe")
    return Settled(settled, tuple(reasons), ledger)


def _path(recipe: Recipe, diagnosis: Diagnosis, can_run: Mapping[str, str | None]) -> tuple[str, list[str]]:
    if recipe.path != "auto":
        state = diagnosis.paths.get(recipe.path)
        if state is not None and not state.open:
            wall = next((w for w in diagnosis.walls if w.code in state.walls), None)
            raise PathClosed(
                f"path {recipe.path} is closed on this machine",
                because=wall.fact if wall else None,
                help=_first_help(wall) or f"the best open path is {diagnosis.plan.path}: --path {diagnosis.plan.path}",
            )
        if can_run.get(recipe.path):
            raise PathClosed(f"path {recipe.path} cannot run", because=can_run[recipe.path])
        return recipe.path, [f"path {recipe.path} was asked for"]
    reasons = list(diagnosis.plan.reasons)
    for path in PATHS:
        state = diagnosis.paths.get(path)
        if state is None or not state.open or state.fits is False:
            continue
        if can_run.get(path):
            reasons.append(f"{path} is passed over: {can_run[path]}")
            continue
        if recipe.lora_rank == 0 and path in ("qlora-hf", "fp8-vllm"):
            reasons.append(f"{path} is passed over: quantised weights cannot be trained without an adapter")
            continue
        return path, reasons
    wall = diagnosis.walls[0] if diagnosis.walls else None
    raise PathClosed(
        "no path is open on this machine" if wall else f"no path has room for {recipe.model}",
        because=wall.fact if wall else None,
        help=_first_help(wall) or "`grpo-doctor` shows every wall",
    )


def _sizes(recipe: Recipe, ledger: memory.Settled | None, reasons: list[str]) -> Recipe:
    """Micro-batch, rows and checkpointing: the ledger's where it knows the model, small and safe where it does not."""
    completions = recipe.prompts_per_step * recipe.group_size
    changes: dict[str, int | bool | str] = {}
    if recipe.micro_batch == "auto":
        room = min(ledger.micro_batch if ledger else UNKNOWN_MICRO_BATCH, completions)
        changes["micro_batch"] = max(d for d in range(1, room + 1) if completions % d == 0)
        reasons.append(f"micro-batch {changes['micro_batch']} of {completions} completions a step")
    if recipe.rollout_rows == "auto":
        changes["rollout_rows"] = max(1, ledger.rollout_rows if ledger else min(UNKNOWN_ROWS, completions))
    if recipe.gradient_checkpointing == "auto":
        changes["gradient_checkpointing"] = ledger.checkpointing if ledger else recipe.path != "cpu"
    if recipe.optimizer == "auto":
        changes["optimizer"] = "adamw"
    return replace(recipe, **changes)  # type: ignore[arg-type]


def _first_help(wall: object) -> str | None:
    helps = getattr(wall, "help", ())
    return next((h.command or h.text for h in helps), None)
