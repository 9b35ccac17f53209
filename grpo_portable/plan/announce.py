"""The plan as text, printed before anything starts: what will run, on which path, why, and what closed the better paths."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from doctor.diagnosis import PATHS, Diagnosis, Wall
from doctor.render import command_lines
from grpo_portable.errors import WIDTH, GrpoPortableError, clause, wrapped
from grpo_portable.plan.settle import Settled
from grpo_portable.recipe import Recipe

HELPS = 2  # of a wall, the most certain ones; `grpo-doctor` has them all


def plan_text(settled: Settled, diagnosis: Diagnosis, minutes: str | None, others: str | None = None) -> str:
    """A block of lines; every choice with its reason, readable without colour. `others`: what the other open paths take."""
    recipe, ledger = settled.recipe, settled.ledger
    several = recipe.path != "cpu" and len(diagnosis.plan.gpus) > 1
    completions = recipe.prompts_per_step * recipe.group_size
    mine = f"{completions // len(diagnosis.plan.gpus)} in each process" if several else str(completions)
    rows = [
        ("path", f"{recipe.path} ({_engine(recipe)})"),
        ("model", _model(recipe)),
        ("data", f"{recipe.data} ({recipe.data_split}) → held out: {recipe.eval_data} ({recipe.eval_split})"),
        ("rewards", " + ".join(recipe.rewards)),
        (
            "a step",
            f"{recipe.prompts_per_step} questions x {recipe.group_size} completions of at most {_room(recipe)}; "
            f"micro-batch {recipe.micro_batch} of {mine}",
        ),
        (
            "steps",
            str(recipe.steps)
            + (f", after a bootstrap of {_epochs(recipe.bootstrap_epochs)}" if recipe.bootstrap_epochs else ""),
        ),
    ]
    if several:
        rows.insert(1, ("GPUs", _gpus(recipe, diagnosis.plan.gpus)))
    if ledger is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {gib:.2f}" for name, gib in ledger.ledger.items() if gib >= 0.005)
        have = f" of {ledger.have_gib:.1f}" if ledger.have_gib is not None else ""
        rows.append(("memory", f"{ledger.need_gib:.2f}{have} GiB: {parts}"))
    if minutes:
        rows.append(("time", minutes))
    if others:
        rows.append(("others", others))
    below = {wall.code for wall in _in_the_way(recipe, diagnosis)}  # told there, with their helps
    reasons = [reason.text for reason in settled.reasons if reason.wall not in below]
    rows += [("because" if i == 0 else "", clause(reason)) for i, reason in enumerate(reasons)]
    lines = ["plan"] + [line for name, text in rows for line in _row(name, text)]
    closing = _closing(recipe, diagnosis)
    return "\n".join(lines + (["", "what closed the faster paths", *closing] if closing else []))


def outlook_text(refused: GrpoPortableError | None, notes: Sequence[str]) -> str:
    """Below a plan: what a start on this machine would note of its questions, or be refused for, and what helps."""
    lines = (
        ["", "what a start would note", *(line for note in notes for line in wrapped(f"  {note}", "    "))]
        if notes
        else []
    )
    if refused is not None:
        lines += ["", "it would not start now", *wrapped(f"  {refused}", "    ")]
        lines += wrapped(f"    help: {refused.help}", " " * 10) if refused.help else []
    return "\n".join(lines)


def _engine(recipe: Recipe) -> str:
    engine = "vLLM" if recipe.path.endswith("-vllm") else "portable engine, no vLLM"
    if recipe.backend == "server":
        engine = f"rollouts by the vLLM server at {recipe.vllm_server}"
    elif recipe.backend == "unsloth":
        engine = "vLLM, weights shared with the trainer by Unsloth"
    weights = {
        "fp8": "FP8 weights",
        "bf16": "BF16 weights",
        "fp16": "FP16 weights",
        "qlora": "4-bit NF4 weights",
        "cpu": "on the CPU",
    }
    return f"{weights[recipe.path.split('-')[0]]}, {engine}"


def _model(recipe: Recipe) -> str:
    if recipe.lora_rank == 0:
        return f"{recipe.model}, all weights trained"
    kind = ("DoRA" if recipe.dora else "LoRA") + (" (rsLoRA)" if recipe.rslora else "")
    return f"{recipe.model}, {kind} of rank {recipe.lora_rank}"


def _room(recipe: Recipe) -> str:
    """How long an answer may be; with context_tokens the prompts decide, which are not tokenised yet."""
    if recipe.context_tokens and recipe.context_tokens <= recipe.max_completion_tokens:
        return f"{recipe.context_tokens} tokens less the longest prompt"
    return f"{recipe.max_completion_tokens} tokens"


def _gpus(recipe: Recipe, gpus: tuple[int, ...]) -> str:
    share = recipe.prompts_per_step // len(gpus)
    return f"{', '.join(map(str, gpus))}, one process each: {share} of {recipe.prompts_per_step} questions a step"


def _epochs(count: float) -> str:
    return f"{count:g} epoch" + ("" if count == 1 else "s")


def _row(name: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - 12) or [""]
    return [f"  {name:<9} {wrapped[0]}"] + [f"  {'':<9} {line}" for line in wrapped[1:]]


def _in_the_way(recipe: Recipe, diagnosis: Diagnosis) -> list[Wall]:
    better = set(PATHS[: PATHS.index(recipe.path)])
    return [wall for wall in diagnosis.walls if better & set(wall.closes)]


def _closing(recipe: Recipe, diagnosis: Diagnosis) -> list[str]:
    lines: list[str] = []
    for wall in _in_the_way(recipe, diagnosis):
        lines += textwrap.wrap(f"{wall.code}: {wall.fact}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        for help_ in wall.help[:HELPS]:
            lines += textwrap.wrap(help_.text, WIDTH, initial_indent="    help: ", subsequent_indent="          ")
            lines += [f"          {line}" for line in command_lines(help_.command, WIDTH - 10)]
    return lines
