"""What every reward of a run is bound to, and the shape of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Reward = Callable[..., list[float | None]]
Score = Callable[[Any, Any], float | None]  # (completion, gold) -> its reward, None when it cannot be scored


@dataclass(frozen=True)
class Setting:
    style: str  # answer style, one of recipe.STYLES
    max_completion_tokens: int | None = None
    overlong_tokens: int | None = None


def per_sample(name: str, score: Score) -> Reward:
    """A TRL reward function that scores each completion on its own."""

    def reward(prompts: Any, completions: Sequence[Any], gold: Sequence[Any], **columns: Any) -> list[float | None]:
        return [score(completion, truth) for completion, truth in zip(completions, gold, strict=True)]

    reward.__name__ = reward.__qualname__ = name
    return reward
