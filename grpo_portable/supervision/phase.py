"""What a worker does: a phase, by which the ladder decides, and words for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    STARTING = "starting"  # reading, loading, opening; until the first sign of life as well
    ENGINE = "engine"  # one that takes its memory at its start
    EVALUATION = "evaluation"
    BOOTSTRAP = "bootstrap"
    PROBE = "probe"  # of the bootstrap: it samples
    TRAINING = "training"  # what is part of no step
    ROLLOUT = "rollout"
    REWARDS = "rewards"
    UPDATE = "update"


# rows generated at once take its memory
SAMPLES = frozenset((Phase.ENGINE, Phase.EVALUATION, Phase.PROBE, Phase.ROLLOUT))
LEARNS = frozenset((Phase.BOOTSTRAP, Phase.TRAINING, Phase.UPDATE))  # a micro-batch takes its memory
OF_A_STEP = frozenset((Phase.ROLLOUT, Phase.REWARDS, Phase.UPDATE))


@dataclass(frozen=True)
class Doing:
    """A phase, and what a reader is told of it."""

    phase: Phase = Phase.STARTING
    words: str = ""

    def __str__(self) -> str:
        return self.words or self.phase.value

    @classmethod
    def told(cls, record: Mapping[str, Any]) -> Doing:
        """What a heartbeat or failure.json says; a start where it names no phase that is known here."""
        phase = record.get("phase")
        return cls(Phase(phase) if phase in list(Phase) else Phase.STARTING, str(record.get("doing") or ""))

    def record(self) -> dict[str, str]:
        """As `told` reads it."""
        return {"phase": self.phase.value, "doing": self.words}
