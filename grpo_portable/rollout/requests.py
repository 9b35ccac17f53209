"""What every engine asks of a request before it serves it, and where a request's noise comes from. Torch only draws a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from grpo_portable.errors import DataError
from grpo_portable.rollout.protocol import Sampling, TokenIds


def check(prompts: Sequence[TokenIds], n: int, sampling: Sampling, context: int, vocab: int) -> None:
    """Raise DataError for a request no engine can serve."""
    if n < 1 or sampling.max_tokens < 1:
        raise DataError(
            f"{n} completions of at most {sampling.max_tokens} tokens were asked for",
            help="ask for at least one of each",
        )
    if not (
        0 <= sampling.temperature < math.inf
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and 0 <= sampling.min_p <= 1
    ):
        raise DataError(f"{sampling} is outside the range of its values")
    if sampling.repetition_penalty <= 0:
        raise DataError(f"a repetition penalty of {sampling.repetition_penalty} is not above 0")
    if sampling.seeds and len(sampling.seeds) != len(prompts):
        raise DataError(f"{len(sampling.seeds)} seeds were given for {len(prompts)} prompts")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DataError(
                f"prompt {index} is empty", because="there is no token to continue", help="check the prompt template"
            )
        if len(prompt) >= context:
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens and leaves no room for an answer",
                because=f"the context is {context} tokens",
                help="lower max_prompt_tokens",
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise DataError(f"prompt {index} holds a token id outside the vocabulary of {vocab}")


def seeded(sampling: Sampling) -> Sampling:
    """The request with a seed: one drawn from torch's generator where it has none and draws tokens."""
    if sampling.seed is not None or sampling.seeds or sampling.temperature == 0:
        return sampling
    import torch

    return replace(sampling, seed=int(torch.randint(2**31, ()).item()))


def noises(sampling: Sampling, prompts: int, n: int) -> list[tuple[int, int]]:
    """(seed, number) of each completion's noise, in the order of the prompts; the call's seed where prompts have none."""
    if sampling.seeds:
        return [(own, number) for own in sampling.seeds for number in range(n)]
    return [(sampling.seed or 0, number) for number in range(prompts * n)]


def prompt_seed(sampling: Sampling, index: int) -> int:
    """The seed of all completions of the prompt at `index`, for an engine that draws their noise itself."""
    return sampling.seeds[index] if sampling.seeds else random.Random(f"{sampling.seed} {index}").getrandbits(62)
