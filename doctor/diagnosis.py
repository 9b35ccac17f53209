"""What the doctor says of a machine: walls, the state of each path, and the plan. Records only, and their JSON form.

The vocabulary of paths is fixed, best first, and is the same in recipes, run records, reports and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from doctor.facts import Facts, facts_to_json

PATHS = ("fp8-vllm", "bf16-vllm", "fp16-vllm", "fp8-hf", "bf16-hf", "fp16-hf", "qlora-hf", "cpu")
GPU_PATHS = PATHS[:-1]
VLLM_PATHS = PATHS[:3]
FP8_PATHS = ("fp8-vllm", "fp8-hf")
BF16_OF = {"fp16-vllm": "bf16-vllm", "fp16-hf": "bf16-hf"}  # for cards without BF16 → the same for the others
FP16_PATHS, BF16_PATHS = tuple(BF16_OF), tuple(BF16_OF.values())
CPU_PARAMETERS_LIMIT = 500_000_000  # a model larger than this would train on `cpu` for days to weeks
SPREAD_PATHS = ("bf16-hf", "fp16-hf")  # whose frozen weights may lie in parts on several cards


@dataclass(frozen=True)
class Help:
    text: str
    command: str | None = None
    confidence: str = "likely"  # certain | likely | try


@dataclass(frozen=True)
class Wall:
    """One cause that closes paths (or, with `closes` empty, a warning): fact, then because, then help."""

    code: str
    closes: tuple[str, ...]
    fact: str
    because: tuple[str, ...] = ()
    help: tuple[Help, ...] = ()
    wont_help: str | None = None


class About(StrEnum):
    """What a reason is about: who tells only some of them chooses by this, never by their words."""

    CHOICE = "choice"  # which path is taken, or that none is
    MEMORY = "memory"  # what it takes of what is free
    CLOSED = "closed"  # a better path is closed, by `wall`
    ROOM = "room"  # a better path is open and has no room
    UNKNOWN = "unknown"  # what nobody knows, and what is assumed
    GPUS = "gpus"  # which cards are used
    PROMISE = "promise"  # what the machine becomes
    BACKEND = "backend"  # who holds a run's policy and samples from it
    RUN = "run"  # what else was asked for, or settled for a run


@dataclass(frozen=True)
class Reason:
    """One sentence; `wall` is the code of the wall it repeats."""

    about: About
    text: str
    wall: str | None = None


@dataclass(frozen=True)
class Memory:
    """Need and have in GiB; `ledger` names each part in GiB and sums to `need_gib`."""

    need_gib: float | None
    have_gib: float | None
    ledger: Mapping[str, float]


@dataclass(frozen=True)
class PathState:
    open: bool
    fits: bool | None
    walls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    path: str | None
    engine: str | None  # vllm | portable
    dtype: str | None  # bfloat16 | float16 | float32
    quantization: str | None  # fp8 | nf4 | None
    gpus: tuple[int, ...]
    model: str | None
    memory: Memory | None
    micro_batch: int | None  # completions in one backward pass
    rollout_rows: int | None  # completions generated at once
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Diagnosis:
    plan: Plan
    walls: tuple[Wall, ...]
    paths: Mapping[str, PathState]
    after_fix: str | None
    facts: Facts


def diagnosis_to_json(d: Diagnosis) -> dict[str, Any]:
    """The answer of `--json`, schema 1."""
    plan, memory = d.plan, d.plan.memory
    return {
        "schema": 1,
        "plan": {
            "path": plan.path,
            "engine": plan.engine,
            "dtype": plan.dtype,
            "quantization": plan.quantization,
            "gpus": list(plan.gpus),
            "model": plan.model,
            "memory": None
            if memory is None
            else {"need_gib": memory.need_gib, "have_gib": memory.have_gib, "ledger": dict(memory.ledger)},
            "micro_batch": plan.micro_batch,
            "rollout_rows": plan.rollout_rows,
            "reasons": [reason.text for reason in plan.reasons],
        },
        "walls": [
            {
                "code": w.code,
                "closes": list(w.closes),
                "fact": w.fact,
                "because": list(w.because),
                "help": [{"text": h.text, "command": h.command, "confidence": h.confidence} for h in w.help],
                "wont_help": w.wont_help,
            }
            for w in d.walls
        ],
        "paths": {
            name: {"open": state.open, "fits": state.fits, "walls": list(state.walls)}
            for name, state in d.paths.items()
        },
        "after_fix": d.after_fix,
        "facts": facts_to_json(d.facts),
    }
