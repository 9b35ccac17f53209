"""Tokens are drawn from the distribution that was asked for, and stop strings end where the text does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rollouts
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout, _processors
from grpo_portable.rollout.sampler import Drawing, block_size, draw, drawing_of, invert, truncated, uniform
from grpo_portable.rollout.stops import StopStrings

SAMPLINGS = [
    Sampling(max_tokens=1),
    Sampling(max_tokens=1, temperature=0.6),
    Sampling(max_tokens=1, top_k=7),
    Sampling(max_tokens=1, top_p=0.8),
    Sampling(max_tokens=1, min_p=0.1),
    Sampling(max_tokens=1, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
]


def allowed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution [V] that transformers' own processors leave."""
    scores = logits[None].float()
    for processor in _processors(sampling):
        scores = processor(torch.zeros(1, 1, dtype=torch.long), scores)
    return torch.softmax(scores[0], -1)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("vocab", [30, 211, 1024])
def test_frequencies_pass_a_chi_square_test(sampling: Sampling, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    expected = allowed(logits, sampling).double().numpy()
    times = 20000 if vocab < 1000 else 6000
    noise = torch.from_numpy(uniform([(7, number) for number in range(times)], 1)[:, 0])
    tokens, logprobs = draw(logits.expand(times, -1), noise, drawing_of(sampling))
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    assert np.exp(logprobs.double().numpy()) == pytest.approx(expected[tokens.numpy()], rel=1e-5)
    often = expected * times >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * times
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_frequencies_of_a_whole_engine_pass_a_chi_square_test() -> None:
    policy, (prompt,) = rollouts.model("llama"), rollouts.prompts(6)
    with torch.no_grad():
        expected = torch.softmax(policy(input_ids=torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    times = 6000
    made = PortableRollout(policy, None, rows=512).generate([prompt], times, Sampling(max_tokens=1, seed=2))
    counts = np.bincount([c.token_ids[0] for c in made[0]], minlength=len(expected))
    often = expected * times >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * times
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


@pytest.mark.parametrize("sampling", SAMPLINGS[2:], ids=str)
def test_truncation_is_that_of_transformers(sampling: Sampling) -> None:
    for seed in range(20):
        logits = torch.randn(97, generator=torch.Generator().manual_seed(seed)) * 3
        weights = torch.softmax(logits / sampling.temperature, -1)[None]
        kept = truncated(weights, drawing_of(sampling))[0]
        assert torch.equal(kept > 0, allowed(logits, sampling) > 0)


@given(
    weights=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=70).filter(lambda w: sum(w) > 1e-3),
    noise=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_inversion_finds_the_token_of_the_cumulative_sum(weights: list[float], noise: float) -> None:
    values = torch.tensor([weights])
    token, logprob = invert(values, torch.tensor([noise], dtype=torch.float64))
    assert weights[token] > 0
    share = np.array(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)
    ends = np.cumsum(share)
    assert ends[token] - share[token] - 1e-6 <= noise <= ends[token] + 1e-6
    assert float(logprob) == pytest.approx(np.log(share[token]), abs=1e-5)


def test_inversion_holds_at_both_ends() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0]]).repeat(3, 1)
    noise = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert invert(weights, noise)[0].tolist() == [2, 4, 4]


@pytest.mark.parametrize("vocab", [1, 2, 211, 32000, 49152, 50257, 128256, 151936, 262144])
def test_blocks_are_near_the_root(vocab: int) -> None:
    size = block_size(vocab)
    assert 1 <= size <= 4 * max(1, int(vocab**0.5))


def test_noise_is_a_rows_own() -> None:
    whole = uniform([(3, number) for number in range(10)], 50)
    assert np.array_equal(uniform([(3, 7), (3, 2)], 50), whole[[7, 2]])
    assert np.array_equal(uniform([(3, 7)], 20)[0], whole[7, :20])
    seeds = (4, -1, -2, 2**63, 2**63 + 1, 2**64 - 3)
    assert len({row.tobytes() for row in (*whole, *uniform([(seed, 7) for seed in seeds], 50))}) == 10 + len(seeds)
    assert np.array_equal(uniform([(-3, 7)], 50), uniform([(2**64 - 3, 7)], 50))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("seeds", [{"seed": 4}, {"seeds": (8, 5, 8)}], ids=str)
def test_with_the_same_seeds_both_engines_draw_the_same(sampling: Sampling, seeds: dict) -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(6, 9, 4)
    sampling = replace(sampling, max_tokens=8, **seeds)
    made, wanted = (
        rollouts.flat(engine(policy, None, rows=rows).generate(prompts, 3, sampling))
        for engine, rows in ((PortableRollout, 2), (ReferenceRollout, 4))
    )
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("engine", [PortableRollout, ReferenceRollout])
def test_with_a_seed_a_prompt_its_completions_are_the_same_in_whatever_call(engine) -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(6, 9, 4, 7)
    sampling = Sampling(max_tokens=8, seeds=(3, 1, 4, 15))

    def made(rows: int, parts: list[list[int]]) -> dict[int, list[tuple[int, ...]]]:
        found = {}
        for part in parts:
            asked = replace(sampling, seeds=tuple(sampling.seeds[i] for i in part))
            groups = engine(policy, None, rows=rows).generate([prompts[i] for i in part], 2, asked)
            found |= {i: [c.token_ids for c in group] for i, group in zip(part, groups, strict=True)}
        return found

    whole = made(8, [[0, 1, 2, 3]])
    assert len({tokens for group in whole.values() for tokens in group}) == 8
    assert whole == made(3, [[2, 0], [3], [1]]) == made(1, [[3, 1], [0, 2]])


def test_greedy_reports_the_untempered_logprob() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits, torch.zeros(4, dtype=torch.float64), Drawing(0.0, 1.0, 0, 0.0, 1.0))
    assert torch.equal(tokens, logits.argmax(-1))
    assert logprobs == pytest.approx(torch.log_softmax(logits, -1).amax(-1), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repetition_penalty_is_that_of_transformers(temperature: float) -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(12, 5, 9)
    sampling = Sampling(max_tokens=20, temperature=temperature, repetition_penalty=1.4, seed=1)
    made = PortableRollout(policy, None, rows=2).generate(prompts, 1, sampling)
    if temperature == 0:
        wanted = ReferenceRollout(policy, None, rows=3).generate(prompts, 1, sampling)
        assert [c.token_ids for c in rollouts.flat(made)] == [c.token_ids for c in rollouts.flat(wanted)]
        return
    for prompt, (completion,) in zip(prompts, made, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = policy(input_ids=ids).logits[0].float()
        for t, token in enumerate(completion.token_ids):
            seen = ids[:, : len(prompt) + t]
            scores = _processors(sampling)[0](seen, logits[len(prompt) + t - 1][None].clone())
            assert completion.logprobs[t] == pytest.approx(float(torch.log_softmax(scores[0], -1)[token]), abs=1e-4)


@pytest.mark.parametrize("engine", [PortableRollout, ReferenceRollout])
def test_a_stop_string_ends_the_row_at_the_token_that_completes_it(engine) -> None:
    tokenizer = tiny.tokenizer()
    policy = rollouts.model("llama", vocab_size=len(tokenizer))
    prompts = [tokenizer.encode("one two"), tokenizer.encode("x")]
    free = Sampling(max_tokens=40, seed=3, temperature=0)
    whole = rollouts.flat(engine(policy, tokenizer, rows=2).generate(prompts, 1, free))
    text = tokenizer.decode(whole[0].token_ids, skip_special_tokens=False)
    string = text[9:12]  # in the middle of what comes anyway
    end = text.index(string) + len(string)
    ended = rollouts.flat(
        engine(policy, tokenizer, rows=2).generate(
            prompts, 1, Sampling(40, temperature=0, stop_strings=(string, "never"))
        )
    )
    cut = tokenizer.decode(ended[0].token_ids, skip_special_tokens=False)
    assert cut == text[:end] and ended[0].finish_reason == "stop"
    assert ended[0].token_ids == whole[0].token_ids[: len(ended[0].token_ids)]


@given(st.text("ab#", max_size=30), st.sampled_from([("#",), ("ab",), ("a#b", "bb"), ("###",)]), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_stop_strings_found_in_pieces_are_those_found_at_once(text: str, strings: tuple[str, ...], chunk: int) -> None:
    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    finder, tokens = StopStrings(strings, Letters()), [ord(c) for c in text]
    wanted = min((text.index(s) + len(s) for s in strings if s in text), default=None)
    found, checked = None, 0
    while found is None and checked < len(tokens):
        found = finder.end(tokens[: checked + chunk], checked)
        checked += chunk
    assert found == wanted
