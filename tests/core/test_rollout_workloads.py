"""Random workloads, seeded: however rows come, go and are shared, completions are the policy's own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import rollouts
import tiny
import torch

from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Completion, Sampling
from grpo_portable.rollout.reference import ReferenceRollout, _processors

TOKENIZER = tiny.tokenizer()
VOCAB = len(TOKENIZER)


def prompts_of(draw: random.Random) -> list[list[int]]:
    """1 to 12 prompts of 1 to 120 tokens: of any lengths, of few, all of one; some of them the same, or with one beginning."""
    count = draw.randint(1, 12)
    lengths = draw.choice([[draw.randint(1, 120)], [1, 16, 17, 65, 110], range(1, 121)])
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.choice(lengths))] for _ in range(count)]
    if draw.random() < 0.3:
        return [draw.choice(prompts[:3]) for _ in prompts]
    if draw.random() < 0.2:
        return [prompts[0][: draw.randint(1, len(prompts[0]))] for _ in prompts]
    return prompts


def sampling_of(draw: random.Random) -> Sampling:
    some = {"top_k": (1, 5, 40), "top_p": (0.1, 0.8, 0.95), "min_p": (0.01, 0.5), "repetition_penalty": (1.5, 0.8)}
    return Sampling(
        draw.choice([1, 17, 60]),
        draw.choice([0.0, 0.0, 1.0, 0.3, 1.3]),
        stop_ids=tuple(draw.sample(range(VOCAB), draw.choice([0, 1, 3]))),
        stop_strings=draw.choice([(), (), ("a", "b#"), ("7",)]),
        seed=draw.randrange(2**31),
        **{key: draw.choice(values) for key, values in some.items() if draw.random() < 0.25},
    )


def end_of(tokens: tuple[int, ...], sampling: Sampling) -> int | None:
    """How many tokens there are up to the first stop id or stop string, looked for at every length by itself."""
    for count, token in enumerate(tokens, 1):
        text = TOKENIZER.decode(list(tokens[:count]), skip_special_tokens=False)
        if token in sampling.stop_ids or any(string in text for string in sampling.stop_strings):
            return count
    return None


@torch.no_grad()
def scores(policy: Any, prompt: list[int], tokens: tuple[int, ...], sampling: Sampling) -> torch.Tensor:
    """Log-probabilities [T, V] by the policy's own forward and transformers' own processors."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    past = [ids[:, : len(prompt) + t] for t in range(len(tokens))]
    if sampling.repetition_penalty == 1:  # then no processor reads them
        past, logits = [ids], logits[None]
    for processor in _processors(sampling):
        logits = torch.stack([processor(seen, row.view(-1, VOCAB)) for seen, row in zip(past, logits, strict=True)])
    return torch.log_softmax(logits.view(len(tokens), VOCAB), -1)


def check(policy: Any, prompt: list[int], made: Completion, sampling: Sampling, room: int) -> None:
    end = end_of(made.token_ids, sampling)
    assert len(made.token_ids) == len(made.logprobs) == (end or room)
    assert made.finish_reason == ("length" if end is None else "stop")
    own = scores(policy, prompt, made.token_ids, sampling).gather(-1, torch.tensor(made.token_ids)[:, None])[:, 0]
    off = (own - torch.tensor(made.logprobs)).abs()
    # one token at the very edge of top-p, which rounding leaves in or out, moves all others by its own share
    assert float(off.max()) < (0.01 if sampling.top_p < 1 else 1e-3), (sampling, off)


@pytest.mark.parametrize("seed", range(8))
def test_random_workloads_are_served_as_the_policy_would(seed: int) -> None:
    draw = random.Random(f"workload {seed}")
    policy = rollouts.with_lora(
        rollouts.model(draw.choice([*rollouts.FAMILIES, "mistral", "gemma2"]), seed=seed, vocab_size=VOCAB)
    )
    rows, copy = draw.randint(1, 24), draw.choice(["none", "bf16"])
    engine = PortableRollout(policy, TOKENIZER, rows=rows, copy=copy)
    engine.ahead = True  # as on a card: steps are launched before the ends of the last ones are known
    for call in range(2):  # one engine: its cache grows, its weights move
        rollouts.disturb(policy, 0.02, seed=call)
        engine.sync(policy)
        prompts, n, sampling = prompts_of(draw), draw.randint(1, 5), sampling_of(draw)
        longest = sampling.max_tokens
        limits = [draw.choice([longest, draw.randint(1, longest)]) for _ in range(len(prompts) * n)]
        made = rollouts.flat(engine.generate(prompts, n, sampling, limits=limits))
        for i in draw.sample(range(len(made)), min(6, len(made))):
            check(policy, prompts[i // n], made[i], sampling, limits[i])
        other = PortableRollout(policy, TOKENIZER, rows=draw.randint(1, 24), copy=copy)
        again = rollouts.flat(other.generate(prompts, n, sampling, limits=limits))
        # rounding, another in a batch of another size, may decide one token that lies at the very edge of a cut
        assert sum(a.token_ids != b.token_ids for a, b in zip(made, again, strict=True)) <= 1
        if sampling.temperature == 0:
            wanted = rollouts.flat(ReferenceRollout(policy, TOKENIZER, rows=12).generate(prompts, 1, sampling))
            for i, ours in enumerate(made):
                assert ours.token_ids == wanted[i // n].token_ids[: limits[i]]
