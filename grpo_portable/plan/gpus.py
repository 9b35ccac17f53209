"""Which GPUs a run takes, one process each: the doctor's equal cards, or those the user named. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from doctor.diagnosis import About, Diagnosis, Memory, Reason
from doctor.readings import Card, card_memory, cards
from doctor.spread import most_sharing
from doctor.together import equal
from doctor.walls_several import links
from grpo_portable.errors import UsageError
from grpo_portable.recipe import Recipe


def parsed(text: str | None) -> tuple[int, ...] | None:
    """`0,1` as (0, 1); None for None. UsageError for anything else."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(f"--gpus cannot be `{text}`", help="numbers of `grpo-doctor`'s list, as --gpus 0,1")
    return tuple(dict.fromkeys(int(number) for number in text.split(",")))


def on_gpus(recipe: Recipe, diagnosis: Diagnosis, asked: tuple[int, ...] | None) -> Diagnosis:
    """The diagnosis with the GPUs of this run in its plan, and why these. UsageError for GPUs that cannot be had together.

    As many are taken as share a step's questions evenly, since a group is never split.
    """
    found = {card.index: card for card in cards(diagnosis.facts) or ()}
    if asked is not None:
        _possible(asked, found, diagnosis)
    if not diagnosis.plan.gpus and asked is None:
        return diagnosis
    chosen, why = _shared(recipe, diagnosis.plan.gpus if asked is None else asked)
    free = [card_memory(diagnosis.facts, found[index].gpu)[0] for index in chosen if index in found]
    kept = [reason for reason in diagnosis.plan.reasons if reason.about is not About.GPUS]
    told = list(reasons(diagnosis))
    if asked is not None:
        told = [_reason(f"GPU {', '.join(map(str, asked))} {'were' if len(asked) > 1 else 'was'} asked for")]
    told += why
    before = diagnosis.plan.memory
    least = min((gib for gib in free if gib is not None), default=None)
    memory = None if before is None else Memory(before.need_gib, least, before.ledger)
    plan = replace(diagnosis.plan, gpus=chosen, memory=memory, reasons=(*kept, *told))
    return replace(diagnosis, plan=plan)


def reasons(diagnosis: Diagnosis) -> tuple[Reason, ...]:
    """Those of the plan's reasons that say why these GPUs are taken."""
    return tuple(reason for reason in diagnosis.plan.reasons if reason.about is About.GPUS)


def _reason(text: str) -> Reason:
    return Reason(About.GPUS, text)


def _possible(asked: Sequence[int], found: dict[int, Card], diagnosis: Diagnosis) -> None:
    unknown = [index for index in asked if index not in found]
    if unknown:
        there = ", ".join(card.label for card in found.values())
        raise UsageError(
            f"there is no GPU {unknown[0]} to train on",
            because=f"this machine has: {there}" if there else "this machine has no GPU that can be used",
            help=f"name some of them: --gpus {','.join(map(str, found))}, or leave --gpus out"
            if there
            else "leave --gpus out",
        )
    if len(asked) == 1:
        return
    first, *others = (found[index] for index in asked)
    unequal = next((card for card in others if not equal(first, card)), None)
    if unequal is not None:
        raise UsageError(
            f"{first.label} and {unequal.label} cannot train together",
            because="each process takes the same part of a step in the same number format, so the cards must be equal",
            help="name equal ones, or one of them",
        )
    if links(diagnosis.facts).get("nccl") == "":
        raise UsageError(
            "several GPUs cannot train together here", because="the installed torch has no NCCL", help="name one GPU"
        )


def _shared(recipe: Recipe, wanted: Sequence[int]) -> tuple[tuple[int, ...], list[Reason]]:
    """The GPUs that share a step evenly, and why fewer than were wanted."""
    if len(wanted) > 1 and recipe.backend == "unsloth":
        return tuple(wanted[:1]), [_reason("One GPU trains: Unsloth holds the weights of one process")]
    count = most_sharing(len(wanted), recipe.prompts_per_step)
    if count == len(wanted):
        return tuple(wanted), []
    told = (
        f"{count} of {len(wanted)} GPUs are used: they share the {recipe.prompts_per_step} questions of a step evenly"
    )
    return tuple(wanted[:count]), [_reason(told)]


def processes(diagnosis: Diagnosis, path: str) -> int:
    """How many processes a path takes: one a GPU, one on the CPU."""
    return max(1, len(diagnosis.plan.gpus)) if path != "cpu" else 1
