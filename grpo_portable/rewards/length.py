"""A penalty for answers that come near the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_portable.errors import RecipeError
from grpo_portable.rewards.setting import Reward, Setting


def soft_overlong(tokens: int, limit: int, soft: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to limit - soft, then linear to -1 at the limit."""
    return min(0.0, max(-1.0, (limit - soft - tokens) / soft))


def overlong_penalty(setting: Setting) -> Reward:
    """0.0 to -1.0 by the completion's length in tokens (`completion_ids`, as TRL hands them to rewards).

    The last `overlong_tokens` before the limit are penalised; a fifth of the limit by default, as in the paper
    (4,096 of 20,480). RecipeError when the token limit is unknown.
    """
    limit = setting.max_completion_tokens
    if limit is None or limit < 1:
        raise RecipeError("`overlong_penalty` needs max_completion_tokens")
    soft = setting.overlong_tokens or max(1, limit // 5)
    if soft > limit:
        raise RecipeError(f"`overlong_penalty` over {soft} tokens does not fit into max_completion_tokens {limit}")

    def reward(
        prompts: Any, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        return [soft_overlong(len(ids), limit, soft) for ids in completion_ids]

    reward.__name__ = reward.__qualname__ = "overlong_penalty"
    return reward
