"""Requests that no engine can serve are refused before one tries, as a user's mistake: no lower path would serve them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_portable.errors import UsageError
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.requests import check, noises, prompt_seed, seeded

SAMPLING = Sampling(max_tokens=4)
REFUSED = {
    "no completion": ([[3]], 0, SAMPLING, "0 completions"),
    "no token": ([[3]], 1, replace(SAMPLING, max_tokens=0), "at most 0 tokens"),
    "temperature": ([[3]], 1, replace(SAMPLING, temperature=float("inf")), "outside the range"),
    "top_p": ([[3]], 1, replace(SAMPLING, top_p=0.0), "outside the range"),
    "top_k": ([[3]], 1, replace(SAMPLING, top_k=-1), "outside the range"),
    "min_p": ([[3]], 1, replace(SAMPLING, min_p=1.5), "outside the range"),
    "penalty": ([[3]], 1, replace(SAMPLING, repetition_penalty=0.0), "not above 0"),
    "seeds": ([[3], [4]], 1, replace(SAMPLING, seeds=(1,)), "1 seeds were given for 2 prompts"),
    "empty": ([[3], []], 1, SAMPLING, "prompt 1 is empty"),
    "long": ([[3] * 16], 1, SAMPLING, "prompt 0 has 16 tokens"),
    "token above": ([[3, 10]], 1, SAMPLING, "outside the vocabulary of 10"),
    "token below": ([[-1]], 1, SAMPLING, "outside the vocabulary of 10"),
}


@pytest.mark.parametrize(("prompts", "n", "sampling", "says"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_with_its_reason(prompts: list, n: int, sampling: Sampling, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check(prompts, n, sampling, context=16, vocab=10)


def test_what_an_engine_can_serve_passes() -> None:
    check([[3] * 15, [9], [0]], 2, replace(SAMPLING, temperature=0.0, top_k=3, min_p=1.0), context=16, vocab=10)
    check([], 1, SAMPLING, context=16, vocab=10)


def test_noise_is_the_calls_or_the_prompts_own() -> None:
    assert noises(replace(SAMPLING, seed=7), 2, 3) == [(7, 0), (7, 1), (7, 2), (7, 3), (7, 4), (7, 5)]
    assert noises(replace(SAMPLING, seeds=(5, 9)), 2, 3) == [(5, 0), (5, 1), (5, 2), (9, 0), (9, 1), (9, 2)]
    by_call = [prompt_seed(replace(SAMPLING, seed=seed), index) for seed in (1, 2) for index in range(3)]
    assert len(set(by_call)) == 6 and all(0 <= seed < 2**62 for seed in by_call)
    assert prompt_seed(replace(SAMPLING, seeds=(5, 9)), 1) == 9


@pytest.mark.parametrize(
    ("sampling", "draws"),
    [
        (SAMPLING, True),
        (replace(SAMPLING, seed=0), False),
        (replace(SAMPLING, seeds=(5,)), False),
        (replace(SAMPLING, temperature=0.0), False),
    ],
)
def test_a_seed_is_drawn_where_there_is_none_and_one_is_needed(sampling: Sampling, draws: bool) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, second = seeded(sampling), seeded(sampling)
    assert (first != sampling, first != second) == (draws, draws)
    assert torch.equal(before, torch.random.get_rng_state()) is not draws
    torch.manual_seed(1)
    assert seeded(sampling) == first
