"""A row as vLLM tells it, from its own process or over HTTP → a Completion. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_portable.errors import EngineError
from grpo_portable.rollout.protocol import Completion
from grpo_portable.rollout.stops import StopStrings


def completion(
    tokens: Sequence[int], logprobs: Sequence[float], finish_reason: str | None, strings: StopStrings | None
) -> Completion:
    """The row, cut after the token that completes a stop string: vLLM keeps that one and may have drawn one more.

    EngineError for a row that ended for another reason than `stop` or `length`, or has a token without a log-probability.
    """
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a completion for another reason: {finish_reason}")
    if len(logprobs) < len(tokens) or not all(map(math.isfinite, logprobs)):
        raise EngineError(
            "vLLM gave log-probabilities that are missing or not numbers", help="a diverged policy does this"
        )
    end = strings.end(tokens) if strings is not None else None
    kept = len(tokens) if end is None else end
    reason = "stop" if end is not None else finish_reason
    return Completion(tuple(tokens[:kept]), tuple(logprobs[:kept]), reason)
