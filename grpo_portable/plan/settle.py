"""Recipe + diagnosis → a complete recipe: every `auto` replaced by a value that carries its reason.

Pure: the machine was looked at by the doctor, the hub by `reach.py`; nothing is loaded here. The settled recipe is what the
run folder keeps, so that running it again without `--auto` repeats the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from doctor import memory
from doctor.diagnosis import PATHS, About, Diagnosis, Reason, Wall
from doctor.readings import cards
from grpo_portable.combinations import UNSLOTH_PATHS, on_path, samples_elsewhere
from grpo_portable.errors import PathClosed, RecipeError
from grpo_portable.recipe import Recipe, check

# Walls of speed alone: who names the path gets it, to measure it for instance.
INSISTED = frozenset({"FP8-HF-UNPROVEN"})
UNSLOTH_WALLS = ("LOCK-UNSLOTH", "LOCK-UNSLOTH-VLLM", "PAIR-ZOO-WARMUP", "PAIR-TOOL-MASK")
UNSLOTH_FP8 = (9, 0)  # unsloth/models/loader_utils.py: _get_fp8_mode_and_check_settings
UNKNOWN_MICRO_BATCH, UNKNOWN_ROWS = 4, 64  # where the model's shape is not known


@dataclass(frozen=True)
class Settled:
    """`ledger` is the memory of the path that runs, None when the model's shape is not known.

    `asked`: whether the recipe named its path; `passed`: open paths above it that could not be taken, and why.
    """

    recipe: Recipe
    reasons: tuple[Reason, ...]
    ledger: memory.Settled | None = None
    asked: bool = False
    passed: Mapping[str, str] = field(default_factory=dict)


def settle(
    recipe: Recipe,
    diagnosis: Diagnosis,
    *,
    auto: bool,
    can_run: Mapping[str, str | None],
    ledger_of: Callable[[str], memory.Settled | None],
    processes: Callable[[str], int] = lambda path: 1,
) -> Settled:
    """The complete recipe and the reasons of what was chosen.

    `can_run` maps each path to None, or to the reason why this installation has no engine for it; `ledger_of` gives what a
    path needs of this machine's memory, `processes` how many share a step's questions. PathClosed when the path asked for is
    closed, or none is open; RecipeError when something is `auto` and the user did not say `--auto`.
    """
    if not auto:
        open_keys = [key for key in ("path", "model", "data") if getattr(recipe, key) == "auto"]
        if open_keys:
            raise RecipeError(
                f"`{open_keys[0]}` is `auto` and nothing may choose it", help=f"add --auto, or --set {open_keys[0]}=..."
            )
    else:
        _named(recipe)
    path, reasons, passed = _path(recipe, diagnosis, can_run, ledger_of)
    if recipe.dora and path == "qlora-hf":
        reasons.append(
            _reason("DoRA de-quantises every base weight in every forward pass: expect slow updates on 4-bit weights")
        )
    backend, why = _backend(recipe, path, diagnosis, auto=auto)
    reasons += why
    fsdp = recipe.fsdp is True and processes(path) > 1
    if fsdp:
        where = f"in parts on {processes(path)} GPUs (FSDP2)"
        reasons.append(_reason(f"the frozen weights lie {where}: one has no room for all of them"))
    settled = replace(
        recipe,
        path=path,
        backend=backend,
        fsdp=fsdp,
        eval_data=recipe.data if recipe.eval_data == "auto" else recipe.eval_data,
    )
    ledger = ledger_of(path)
    settled = _sizes(settled, diagnosis, ledger, processes(path), reasons)
    check(settled, "the settled recipe")
    return Settled(settled, tuple(reasons), ledger, recipe.path != "auto", passed)


def _reason(text: str) -> Reason:
    return Reason(About.RUN, text)


def _backend(recipe: Recipe, path: str, diagnosis: Diagnosis, *, auto: bool) -> tuple[str, list[Reason]]:
    """Who holds the policy and samples from it, and the reasons. PathClosed when Unsloth was asked for and cannot be had.

    Unsloth is never chosen by itself: it changes libraries in the process and holds them to older versions, and what it saves,
    the second copy of the weights, is wanted only where memory is short.
    """
    if samples_elsewhere(recipe):
        told = f"rollouts come from the vLLM server at {recipe.vllm_server}; if it fails, from the path's own engine"
        return "server", [Reason(About.BACKEND, told)]
    if recipe.backend != "unsloth":
        return "plain", []
    why_not = unsloth_refusal(recipe, path, diagnosis)
    if why_not is None:
        told = "the weights are shared between vLLM and the trainer by Unsloth; if it fails, each has its own"
        return "unsloth", [Reason(About.BACKEND, told)]
    if not auto:
        raise PathClosed(
            "the Unsloth backend cannot run here", because=why_not, help="set backend to plain, or see `grpo-doctor`"
        )
    return "plain", [Reason(About.BACKEND, f"the Unsloth backend is passed over: {why_not}")]


def unsloth_refusal(recipe: Recipe, path: str, diagnosis: Diagnosis) -> str | None:
    """Why Unsloth cannot hold the policy of this path on this machine, None when its locks hold."""
    if diagnosis.facts.version("unsloth") is None:
        return "unsloth is not installed"
    wall = next((w for w in diagnosis.walls if w.code in UNSLOTH_WALLS), None)
    if wall is not None:
        return wall.fact
    tried = diagnosis.facts.probe("unsloth_import")
    if tried.ok is False:
        return f"unsloth cannot be imported: {tried.error}"
    if path not in UNSLOTH_PATHS:
        return f"it shares the weights of a vLLM in 16 bit or FP8, and the path is {path}"
    chosen = [card for card in cards(diagnosis.facts) or () if card.index in diagnosis.plan.gpus]
    older = [card for card in chosen if card.capability is not None and card.capability < UNSLOTH_FP8]
    if path == "fp8-vllm" and older and "fp8" not in recipe.model.lower():
        return "it makes FP8 weights only from compute capability 9.0 on; bf16-vllm is open to it"
    return None


def _named(recipe: Recipe) -> None:
    """Raise RecipeError when the recipe leaves to the user what `--auto` cannot choose for it."""
    for key, example in (("model", "Qwen/Qwen3-0.6B"), ("data", "questions.jsonl")):
        if getattr(recipe, key) == "auto":
            raise RecipeError(
                f"the recipe names no {key}", help=f"name one with --{key}, for example --{key} {example}"
            )


def _path(
    recipe: Recipe,
    diagnosis: Diagnosis,
    can_run: Mapping[str, str | None],
    ledger_of: Callable[[str], memory.Settled | None],
) -> tuple[str, list[Reason], dict[str, str]]:
    """The path, the reasons for it, and the open paths that were passed over, each with its own."""
    if recipe.path != "auto":
        path = _asked_for(recipe, diagnosis, can_run)
        told = [f"path {path} was asked for", *(f"but: {wall.fact}" for wall in _insisted(diagnosis, path))]
        return path, [_reason(text) for text in told], {}
    reasons, passed = list(diagnosis.plan.reasons), dict[str, str]()
    for path in PATHS:
        state = diagnosis.paths.get(path)
        if state is None or not state.open or state.fits is False:
            continue
        why_not = can_run.get(path) or _unfit(recipe, path)
        if why_not is None:
            return path, reasons, passed
        passed[path] = why_not
        reasons.append(_reason(f"{path} is passed over: {why_not}"))
    raise _nothing_left(recipe, diagnosis, passed, ledger_of)


def _nothing_left(
    recipe: Recipe, diagnosis: Diagnosis, passed: Mapping[str, str], ledger_of: Callable[[str], memory.Settled | None]
) -> PathClosed:
    """Why no path is left: all are closed, none has room, or the open ones cannot run this recipe.

    `passed`: open path → what kept it from running.
    """
    wall = diagnosis.walls[0] if diagnosis.walls else None
    if not any(state.open for state in diagnosis.paths.values()):
        return PathClosed(
            "no path is open on this machine",
            because=wall.fact if wall else None,
            help=first_help(wall) or "`grpo-doctor` shows every wall",
        )
    too_large = [p for p, state in diagnosis.paths.items() if state.open and state.fits is False]
    needs = [found for p in too_large if (found := ledger_of(p)) is not None and found.fits is False]
    least = min(needs, key=lambda found: found.need_gib, default=None)
    gpu_closed = next((w for w in diagnosis.walls if {"bf16-hf", "fp16-hf"} & set(w.closes)), None)
    because = [least.reason] if least else [gpu_closed.fact] if gpu_closed and set(passed) <= {"cpu"} else []
    once: dict[str, str] = {}
    for path, why_not in passed.items():
        once.setdefault(why_not, path)
    because += [f"{path} is passed over: {why_not}" for why_not, path in once.items()]
    helps = ["`grpo-portable recipes` says what fits here"]
    if least or not gpu_closed:
        helps.append("a smaller model or a lower max_completion_tokens needs less")
    elif first := first_help(gpu_closed):
        helps.insert(0, first)
    return PathClosed(f"no path here can run {recipe.model}", because="; ".join(because) or None, help="; ".join(helps))


def _asked_for(recipe: Recipe, diagnosis: Diagnosis, can_run: Mapping[str, str | None]) -> str:
    """The recipe's own path, refused when it is closed, has no room or cannot run the recipe."""
    path = recipe.path
    state = diagnosis.paths.get(path)
    if state is not None and not state.open and not INSISTED.issuperset(state.walls):
        wall = next((w for w in diagnosis.walls if w.code in state.walls), None)
        best = diagnosis.plan.path
        raise PathClosed(
            f"path {path} is closed on this machine",
            because=wall.fact if wall else None,
            help=first_help(wall) or (f"the best open path is {best}: --path {best}" if best else None),
        )
    why_not = can_run.get(path) or _unfit(recipe, path)
    if why_not:
        raise PathClosed(f"path {path} cannot run", because=why_not)
    return path


def _insisted(diagnosis: Diagnosis, path: str) -> list[Wall]:
    """The walls that only say a path is not known to be worth it, where the path was asked for all the same."""
    state = diagnosis.paths.get(path)
    return [w for w in diagnosis.walls if state is not None and w.code in INSISTED.intersection(state.walls)]


def _unfit(recipe: Recipe, path: str) -> str | None:
    """Why an open path is none for this recipe."""
    refused = on_path(recipe, path)
    return refused.because if refused else None


def _no_8_bit_states(recipe: Recipe, diagnosis: Diagnosis) -> str | None:
    """Why the 8-bit optimizer a recipe asks for cannot be had here, None when it can or is not asked for."""
    if recipe.optimizer != "adamw_8bit":
        return None
    if recipe.path == "cpu":
        return "bitsandbytes' 8-bit ones are for GPUs"
    wall = next((w for w in diagnosis.walls if w.code in ("BNB-ABSENT", "BNB-FAILED")), None)
    return wall.fact if wall else None


def _sizes(
    recipe: Recipe, diagnosis: Diagnosis, ledger: memory.Settled | None, processes: int, reasons: list[Reason]
) -> Recipe:
    """Micro-batch, rows and checkpointing: the ledger's where it knows the model, small and safe where it does not."""
    completions = recipe.prompts_per_step * recipe.group_size // processes
    changes: dict[str, int | bool | str] = {}
    if recipe.micro_batch == "auto":
        room = min(ledger.micro_batch if ledger else UNKNOWN_MICRO_BATCH, completions)
        changes["micro_batch"] = memory.largest_divisor(completions, room)
        each = " in each process" if processes > 1 else ""
        reasons.append(_reason(f"micro-batch {changes['micro_batch']} of {completions} completions a step{each}"))
    if recipe.rollout_rows == "auto":
        changes["rollout_rows"] = max(1, ledger.rollout_rows if ledger else min(UNKNOWN_ROWS, completions))
    if recipe.gradient_checkpointing == "auto":
        changes["gradient_checkpointing"] = ledger.checkpointing if ledger else recipe.path != "cpu"
    no_8_bit = _no_8_bit_states(recipe, diagnosis)
    if recipe.optimizer == "auto" or no_8_bit:
        changes["optimizer"] = "adamw"
    if no_8_bit:
        reasons.append(_reason(f"the optimizer keeps 32-bit states: {no_8_bit}"))
    return replace(recipe, **changes)  # type: ignore[arg-type]


def first_help(wall: object) -> str | None:
    """The most certain help of a wall: what it is for, and its command."""
    found = next(iter(getattr(wall, "help", ())), None)
    return None if found is None else found.text + (f": {found.command}" if found.command else "")
