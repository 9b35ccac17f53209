"""A reward that does not move: recognised while the run goes on, with the likeliest cause and what helps.

Two signs, each told once until it ends: every group's rewards are equal and none pays, for EQUAL_STEPS; or the mean stays below
zero without rising, for FLAT_STEPS. Both mean that GRPO has nothing to learn from, mostly because the model never writes the
target format (bootstrap missing) or is cut off before it answers. Reads step records as in metrics.jsonl; pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

EQUAL_STEPS = 10
FLAT_STEPS = 20
CUT_OFF = 0.5  # share of completions at the length limit from which that is the likeliest cause


class Plateau:
    """`see` one record a step; it returns a sentence when a plateau begins to count, else None."""

    def __init__(self, *, bootstrapped: bool) -> None:
        self.bootstrapped = bootstrapped
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=FLAT_STEPS)
        self._equal_in_a_row, self._told = 0, False

    def see(self, record: Mapping[str, Any]) -> str | None:
        reward = record.get("reward")
        if reward is None:  # a later update of a rollout that was seen already
            return None
        self._recent.append(record)
        unpaid = record.get("zero_spread") == 1.0 and reward <= 0
        self._equal_in_a_row = self._equal_in_a_row + 1 if unpaid else 0
        if self._equal_in_a_row >= EQUAL_STEPS:
            fact = (
                f"the rewards of every group were equal and none above zero for {EQUAL_STEPS} steps (mean {reward:.2f})"
            )
        elif self._flat():
            fact = f"the mean reward has stayed below zero for {FLAT_STEPS} steps without rising (now {reward:.2f})"
        else:
            self._told = False
            return None
        told, self._told = self._told, True
        return None if told else f"{fact}: {self._cause()}"

    def _flat(self) -> bool:
        """Whether the last FLAT_STEPS are all below zero and their second half is no better than chance above the first."""
        rewards = [float(r["reward"]) for r in self._recent]
        if len(rewards) < FLAT_STEPS or max(rewards) >= 0:
            return False
        half = FLAT_STEPS // 2
        first, second = rewards[:half], rewards[half:]
        rise = math.fsum(second) / half - math.fsum(first) / half
        return rise <= 2 * math.sqrt(_variance(first) / half + _variance(second) / half)

    def _cause(self) -> str:
        cut = [float(r.get("truncated") or 0.0) for r in self._recent]
        share = math.fsum(cut) / len(cut)
        if share >= CUT_OFF:
            return (
                f"{100 * share:.0f} % of the completions are cut off before they answer; raise max_completion_tokens, or take "
                "shorter prompts (prompt_percentile)"
            )
        if not self.bootstrapped:
            return (
                "bootstrap missing? A model that never writes the target format earns nothing to learn from; set "
                "bootstrap_epochs to 1 (and bootstrap_data where the training data has no worked answers)"
            )
        return (
            "the bootstrap was too short or the questions are too hard; generations/bootstrap.jsonl shows the answers"
        )


def _variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
