"""On a CUDA card: captured graphs, the flash kernel, compiled halves and FP8 give what the CPU tests hold eager code to."""

from __future__ import annotations

import pytest
import rollouts
import torch

from grpo_portable.errors import EngineUnsupported
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
GREEDY = Sampling(max_tokens=24, temperature=0)


@pytest.mark.parametrize("family", rollouts.FAMILIES)
def test_greedy_equals_generate_in_float32(family: str) -> None:
    policy, prompts = rollouts.model(family).cuda(), rollouts.prompts(5, 1, 40, 17, 17)
    engine = PortableRollout(policy, None, rows=4, compile=False)
    wanted = rollouts.flat(ReferenceRollout(policy, None, rows=5).generate(prompts, 1, GREEDY))
    for _ in range(2):  # capturing, then replaying
        made = rollouts.flat(engine.generate(prompts, 1, GREEDY))
        assert [c.token_ids for c in made] == [c.token_ids for c in wanted]
        assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-4) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_half_precision_logprobs_are_the_policys(family: str, compile: bool) -> None:
    wide = {} if family == "qwen3" else {"head_dim": 16}
    policy, prompts = rollouts.model(family, torch.bfloat16, **wide).cuda(), rollouts.prompts(9, 30, 2, 21, 40)
    exact = rollouts.model(family, **wide).cuda()
    engine = PortableRollout(policy, None, rows=8, compile=compile)
    made = engine.generate(prompts, 3, Sampling(max_tokens=20, seed=3))
    ours, theirs = [], []
    for prompt, group in zip(prompts, made, strict=True):
        for completion in group:
            wanted = rollouts.logprobs(exact, prompt, completion)
            ours.append((torch.tensor(completion.logprobs) - wanted).abs())
            theirs.append((rollouts.logprobs(policy, prompt, completion) - wanted).abs())
    # no further from float32 than transformers' own bfloat16 forward is
    assert torch.cat(ours).mean() < 1.5 * torch.cat(theirs).mean() + 1e-3


@pytest.mark.parametrize("compile", [False, True])
def test_rows_that_come_and_go_keep_their_tokens(compile: bool) -> None:
    policy, prompts = rollouts.model("qwen3").cuda(), rollouts.prompts(3, 50, 1, 17, 18, 19, 2)
    sampling = Sampling(max_tokens=40, seed=11, stop_ids=tuple(range(1, 12)))
    wanted = rollouts.flat(PortableRollout(policy, None, rows=21, compile=False).generate(prompts, 3, sampling))
    for rows in (2, 5, 16):
        made = rollouts.flat(PortableRollout(policy, None, rows=rows, compile=compile).generate(prompts, 3, sampling))
        assert [c.token_ids for c in made] == [c.token_ids for c in wanted]


@pytest.mark.parametrize("copy", ["bf16", "none"])
def test_an_update_reaches_captured_graphs(copy: str) -> None:
    policy, prompts = rollouts.model("qwen3").cuda(), rollouts.prompts(12, 5)
    engine = PortableRollout(policy, None, rows=4, copy=copy, compile=False)
    before = engine.generate(prompts, 2, GREEDY)
    rollouts.disturb(policy, 0.1)
    engine.sync(policy)
    after = engine.generate(prompts, 2, GREEDY)
    wanted = rollouts.flat(ReferenceRollout(policy, None, rows=4).generate(prompts, 2, GREEDY))
    assert [c.token_ids for c in rollouts.flat(after)] == [c.token_ids for c in wanted]
    assert after != before


def test_other_samplings_and_longer_prompts_after_a_capture() -> None:
    policy = rollouts.model("llama").cuda()
    engine, fresh = (
        PortableRollout(policy, None, rows=4, compile=False),
        PortableRollout(policy, None, rows=4, compile=False),
    )
    asked = [
        (rollouts.prompts(5, 6), Sampling(max_tokens=6, seed=1)),
        (rollouts.prompts(5, 6), Sampling(max_tokens=6, temperature=0.5, top_p=0.9, seed=1)),
        (rollouts.prompts(90, 6), Sampling(max_tokens=60, seed=2, stop_ids=(3, 4, 5))),
        (rollouts.prompts(5, 6), Sampling(max_tokens=6, temperature=0.7, repetition_penalty=1.3, seed=1)),
        (rollouts.prompts(5, 6), Sampling(max_tokens=6, seed=1)),
    ]
    made = [engine.generate(prompts, 3, sampling) for prompts, sampling in asked]
    assert made[0] == made[-1]
    for (prompts, sampling), groups in zip(asked, made, strict=True):
        again = fresh.generate(prompts, 3, sampling)
        assert [c.token_ids for c in rollouts.flat(groups)] == [c.token_ids for c in rollouts.flat(again)]


@pytest.mark.parametrize("compile", [False, True])
def test_fp8_is_close_to_bfloat16(compile: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    policy, prompts = rollouts.model("qwen3", torch.bfloat16, **sizes).cuda(), rollouts.prompts(9, 30, 21)
    try:
        engine = PortableRollout(policy, None, rows=16, copy="fp8", compile=compile)
    except EngineUnsupported as refusal:
        pytest.skip(str(refusal))
    off = []
    for prompt, group in zip(prompts, engine.generate(prompts, 6, Sampling(max_tokens=20, seed=3)), strict=True):
        for completion in group:
            off.append((torch.tensor(completion.logprobs) - rollouts.logprobs(policy, prompt, completion)).abs())
    assert 1e-5 < torch.cat(off).mean() < 0.1
