"""Recipe + facts → what would run on that machine: diagnosis, settled recipe, memory, minutes.

Pure: the facts may be of this machine or of a saved one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from doctor import memory, speed, speed_cpu
from doctor.diagnosis import BF16_OF, PATHS, SPREAD_PATHS, About, Diagnosis
from doctor.facts import Facts
from doctor.plan import diagnose
from doctor.readings import card_memory, cards, system_gib
from doctor.shapes import Shape, shape_of
from doctor.spread import most_sharing
from doctor.together import equal
from doctor.walls import better
from doctor.walls_model import slow_on_a_cpu
from doctor.walls_several import no_several
from grpo_portable.combinations import on_path, samples_elsewhere
from grpo_portable.errors import PathClosed
from grpo_portable.plan import gpus
from grpo_portable.plan.settle import Settled, settle
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.vllm_settings import block_refusal


@dataclass(frozen=True)
class _Request:
    """What `plan` was asked."""

    recipe: Recipe
    facts: Facts
    asked: tuple[int, ...] | None
    auto: bool
    can_run: Mapping[str, str | None]

    def diagnosis(self, spread: int) -> Diagnosis:
        return on_gpus(self.recipe, self.facts, self.asked, spread)


def plan(
    recipe: Recipe,
    facts: Facts,
    *,
    auto: bool,
    can_run: Mapping[str, str | None] | None = None,
    asked: tuple[int, ...] | None = None,
) -> tuple[Settled, Diagnosis]:
    """The settled recipe and the diagnosis it rests on, with the GPUs of the run in its plan. Raises what `settle` raises.

    `can_run`: what this installation has no engine for (`rollout.available.unavailable`); left out for a machine that is not
    this one. `asked`: the GPUs the user named, by the doctor's index; None takes the equal ones the doctor chose.
    """
    request = _Request(recipe, facts, asked, auto, can_run or {})
    in_parts = replace(request, recipe=replace(recipe, fsdp=True))
    spread = _spread_over(recipe, facts, asked)
    if recipe.fsdp is True:
        return _planned(request, spread)
    try:
        found = _planned(request, 1)
        if recipe.fsdp == "auto" and _wants_parts(recipe, found[0], spread):
            return _planned(in_parts, spread)
        return found
    except PathClosed as closed:
        if recipe.fsdp != "auto" or spread == 1:
            raise
        if samples_elsewhere(recipe):
            return _planned(in_parts, spread)
        raise _with_spread_help(closed, request, spread) from None


def _wants_parts(recipe: Recipe, settled: Settled, spread: int) -> bool:
    """Whether the path that was asked for has no room on one GPU, and its weights may lie in parts on several."""
    too_large = settled.ledger is not None and settled.ledger.fits is False
    return too_large and spread > 1 and settled.recipe.path in SPREAD_PATHS and samples_elsewhere(recipe)


def _planned(request: _Request, spread: int) -> tuple[Settled, Diagnosis]:
    """What `plan` returns, for weights in parts on `spread` GPUs."""
    recipe = request.recipe
    taken = len(request.diagnosis(spread).plan.gpus) if spread > 1 else 0
    spread = taken or spread  # fewer where one of them is full

    def settled_on(recipe: Recipe) -> tuple[Settled, Diagnosis]:
        diagnosis = replace(request, recipe=recipe).diagnosis(spread)
        whole = {PATHS[-1]: "it keeps its weights whole"} if spread > 1 else {}
        settled = settle(
            recipe,
            diagnosis,
            auto=request.auto,
            can_run={**request.can_run, **_blocks(recipe), **_not_on_a_cpu(recipe), **whole},
            ledger_of=lambda path: ledger_of(recipe, diagnosis, path, spread),
            processes=lambda path: gpus.processes(diagnosis, path),
        )
        return settled, diagnosis

    settled, diagnosis = settled_on(recipe)
    if recipe.backend == "unsloth" and settled.recipe.backend == "plain":  # no weights are shared: another memory
        why = [reason for reason in settled.reasons if reason.about is About.BACKEND]
        settled, diagnosis = settled_on(replace(recipe, backend="plain"))
        settled = replace(settled, reasons=(*settled.reasons, *why))
    if settled.recipe.path != "cpu":  # where the path was asked for, the doctor's reasons are not among its own
        settled = replace(
            settled, reasons=(*settled.reasons, *(r for r in gpus.reasons(diagnosis) if r not in settled.reasons))
        )
    return settled, diagnosis


def _spread_over(recipe: Recipe, facts: Facts, asked: tuple[int, ...] | None) -> int:
    """On how many GPUs the frozen weights could lie in parts: those asked for, or the best ones that are equal; 1 on one."""
    found = cards(facts) or ()
    best = max(found, key=better, default=None)
    if best is None or no_several(facts) or recipe.lora_rank == 0:
        return 1
    count = len(asked) if asked is not None else sum(equal(card, best) for card in found)
    return most_sharing(count, recipe.prompts_per_step)


def _with_spread_help(closed: PathClosed, request: _Request, spread: int) -> PathClosed:
    """The refusal, with what would make it run where the weights would fit in parts."""
    recipe, diagnosis = request.recipe, request.diagnosis(spread)
    ledger = ledger_of(recipe, diagnosis, SPREAD_PATHS[0], spread)
    if ledger is None or ledger.fits is False or not diagnosis.paths[SPREAD_PATHS[0]].open:
        return closed
    return PathClosed(
        closed.fact,
        because=closed.because,
        help=f"in parts on {spread} GPUs it takes {ledger.need_gib:.1f} GiB of each: start `vllm serve {recipe.model} "
        "--tensor-parallel-size N ...` on other GPUs (docs/fast-path.md) and --set vllm_server=http://host:port",
    )


def on_gpus(recipe: Recipe, facts: Facts, asked: tuple[int, ...] | None, spread: int = 1) -> Diagnosis:
    """The diagnosis with the GPUs that were asked for in its plan. UsageError for ones that cannot be had together."""
    named = [card for card in cards(facts) or () if asked is None or card.index in asked]
    seen = replace(facts, gpus=tuple(replace(c.gpu, index=c.index) for c in named)) if named else facts
    found = diagnose(seen, shape_name(recipe), sizes(recipe, spread=spread))
    return gpus.on_gpus(recipe, replace(found, facts=facts), asked)


def sizes(recipe: Recipe, processes: int = 1, spread: int = 1) -> memory.Sizes:
    """What a recipe asks of a machine; of several processes each has its share of a step's questions."""
    return memory.Sizes(
        group_size=recipe.group_size,
        prompts_per_step=max(1, recipe.prompts_per_step // processes),
        prompt_tokens=recipe.max_prompt_tokens,
        completion_tokens=answer_tokens(recipe),
        lora_rank=recipe.lora_rank,
        dora=recipe.dora,
        dropout=recipe.lora_dropout > 0,
        optimizer="adamw_8bit" if recipe.optimizer == "adamw_8bit" else "adamw",
        shared=recipe.backend == "unsloth",  # policy and vLLM lie on one copy of the weights
        spread=spread,
    )


def answer_tokens(recipe: Recipe) -> int:
    """The longest answer: with context_tokens what a prompt of no length would leave."""
    return min(recipe.max_completion_tokens, recipe.context_tokens or recipe.max_completion_tokens)


def shape_name(recipe: Recipe) -> str | None:
    """The model by the name the doctor knows its shape by."""
    return None if recipe.model == "auto" else recipe.model


def ledger_of(recipe: Recipe, diagnosis: Diagnosis, path: str, spread: int = 1) -> memory.Settled | None:
    """What a path needs of each of the run's GPUs (`cpu`: of the system), None when the model's shape is not known.

    The one with the least free memory decides.
    """
    shape = _shape(recipe)
    if shape is None:
        return None
    facts, chosen = diagnosis.facts, diagnosis.plan.gpus
    free = [card_memory(facts, card.gpu)[0] for card in cards(facts) or () if not chosen or card.index in chosen]
    free = free if chosen else free[:1]
    have = system_gib(facts) if path == "cpu" else min((gib for gib in free if gib is not None), default=None)
    asked = sizes(recipe, gpus.processes(diagnosis, path), spread).on(facts)
    return _as_pinned(recipe, shape, memory.settle(shape, path, have, asked))


def _as_pinned(recipe: Recipe, shape: Shape, free: memory.Settled) -> memory.Settled:
    """The ledger with the sizes that the recipe fixes in place of those that memory would allow."""
    fixed: dict[str, Any] = {}
    for name, value in (("micro_batch", recipe.micro_batch), ("rollout_rows", recipe.rollout_rows)):
        if value != "auto":
            fixed[name] = int(value)
    if recipe.gradient_checkpointing != "auto":
        fixed["checkpointing"] = bool(recipe.gradient_checkpointing)
    if not fixed:
        return free
    setting = replace(free.setting, **fixed)
    parts = memory.ledger(shape, setting)
    need = sum(parts.values())
    fits = None if free.have_gib is None else need <= free.have_gib
    reason = free.reason
    if fits is False and free.fits:
        told = ", ".join(f"{name} {value}" for name, value in fixed.items())
        reason = f"{need:.1f} GiB are needed with the recipe's {told}, and {free.have_gib:.1f} GiB are free"
    return replace(
        free,
        need_gib=need,
        ledger=parts,
        micro_batch=setting.micro_batch,
        rollout_rows=setting.rollout_rows,
        checkpointing=setting.checkpointing,
        fits=fits,
        reason=reason,
        phase=memory.phase(shape, setting),
        setting=setting,
    )


def step_seconds(settled: Settled, diagnosis: Diagnosis) -> speed.StepEstimate | None:
    """Seconds of one step on the path that runs, None when the machine or the model is not known, and for weights in parts.

    On a CPU from the rates that the doctor measured there; a card's come from its data sheet.
    """
    if settled.recipe.fsdp is True:
        return None  # nothing of this kind has been measured
    if settled.recipe.path == "cpu":
        shape, rates = _shape(settled.recipe), speed_cpu.rates(diagnosis.facts)
        if shape is None or rates is None or settled.ledger is None:
            return None
        counts = {"prompts": settled.recipe.prompts_per_step, "group_size": settled.recipe.group_size}
        return speed.cpu_step_estimate(shape, settled.ledger.setting, rates, **counts)
    share = sizes(settled.recipe, gpus.processes(diagnosis, str(settled.recipe.path)))
    return speed.estimate(_on_path(settled, diagnosis), share)


def minutes(settled: Settled, diagnosis: Diagnosis) -> str | None:
    """The length of the training as text with its error, on a CPU why there is none; None as in `step_seconds`."""
    step = step_seconds(settled, diagnosis)
    if settled.recipe.path != "cpu":
        return None if step is None else speed.in_words(step, settled.recipe.steps)
    if step is None:
        known = _shape(settled.recipe) is not None
        return f"not estimated: {'this CPU was not measured' if known else 'the shape of the model is not known'}"
    more = "bootstrap and evaluations" if settled.recipe.bootstrap_epochs else "evaluations"
    return f"{speed.in_words(step, settled.recipe.steps)}, by a measurement of this CPU; {more} come on top"


def others(settled: Settled, diagnosis: Diagnosis) -> str | None:
    """Seconds of a step on the other open paths of a GPU, by the same estimate and the fastest first; None where it has none.

    Which path is best is decided by what it can do; which is fastest depends on the model, and vLLM is not always.
    """
    recipe = settled.recipe
    own = recipe.path != "cpu" and recipe.backend in ("auto", "plain") and recipe.fsdp is not True
    if not own or step_seconds(settled, diagnosis) is None:
        return None
    there = {path for path, state in diagnosis.paths.items() if state.open and state.fits is not False}
    worse = {path for path in there if BF16_OF.get(path) in there}
    refused = {path for path in there if on_path(recipe, path) or _blocks(recipe).get(path)}
    seen: list[tuple[float, str]] = []
    for path in there - worse - refused - {"cpu", recipe.path}:
        step = step_seconds(replace(settled, recipe=replace(recipe, path=path)), diagnosis)
        if step is not None:
            seen.append((step.total_s, path))
    told = ", ".join(f"{path} {seconds:.1f} s" for seconds, path in sorted(seen))
    return f"{told} a step, by the same estimate (--path takes one)" if told else None


def _on_path(settled: Settled, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with the recipe's path in place of the doctor's choice."""
    return replace(diagnosis, plan=replace(diagnosis.plan, path=settled.recipe.path))


def _shape(recipe: Recipe) -> Shape | None:
    name = shape_name(recipe)
    return shape_of(name) if name else None


def _blocks(recipe: Recipe) -> dict[str, str | None]:
    """FP8 with a scale a block is no choice for a model whose sizes are no multiples of a block."""
    shape = _shape(recipe)
    if shape is None or shape.stored == "fp8" or recipe.fp8_scales != "block":
        return {}
    reason = block_refusal(shape)
    return {"fp8-vllm": f"{reason} (--set fp8_scales=row)"} if reason else {}


def _not_on_a_cpu(recipe: Recipe) -> dict[str, str | None]:
    """The CPU is no choice for a model it would train for days or weeks; who wants it says so with `path: cpu`."""
    too_slow = slow_on_a_cpu(_shape(recipe))
    return {PATHS[-1]: f"{too_slow} (--path cpu insists)"} if too_slow and recipe.path == "auto" else {}
