"""The fused kernels in Triton's interpreter: layer by layer, and a whole rollout with rows that come, go and share prompts.

The interpreter needs no card; it does need Triton, which torch's builds for the CPU come without.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rollouts
import torch

from grpo_portable.rollout import trial
from grpo_portable.rollout.family import read
from grpo_portable.rollout.forward import Plain
from grpo_portable.rollout.weights import Keeper

TESTS = Path(__file__).parents[1]
INTERPRETED = """
import sys, torch
import rollouts
from grpo_portable.rollout import fused, kernels, skinny, trial
from grpo_portable.rollout.booking import State, book
from grpo_portable.rollout.family import read
from grpo_portable.rollout.forward import Plain
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.weights import Dense, Keeper

cpu = torch.device("cpu")
whole = skinny.BLOCK_BYTES, skinny.LEAST_TURNS
cuts = (64, 132, 32, 1), (16, 132, 32, 1), (0, 132, *whole), (64, 132, *whole)  # the first two: products as sums of many parts
launched = set()

class Watched:
    def __getattr__(self, name):
        launched.add(name)
        return getattr(kernels, name)

for family in rollouts.FAMILIES:
    known = read(rollouts.model(family, torch.float16))
    layer = Keeper(known, "copy", torch.float16).weights.layers[0]
    for most, processors, skinny.BLOCK_BYTES, skinny.LEAST_TURNS in cuts[2 * (family not in ("llama with biases", "gemma2")):]:
        run = fused.Fused(known.shape, cpu, "", most, processors)
        run.kernels = Watched()
        for rows in skinny.TILES if most == 64 and family == "llama" else (16,):
            found = trial.difference(run, Plain(known.shape), layer, cpu, torch.float16, rows)
            assert found is None, (family, most, rows, found)
    assert trial.captured_alike(fused.Fused(known.shape, cpu, "", 64), layer, cpu, torch.float16)
every = {name for name in vars(kernels) if name.endswith("_kernel")}
assert every - launched == {"narrow_kernel"}, every - launched  # that one is for FP8, which the interpreter has not

skinny.BLOCK_BYTES, skinny.LEAST_TURNS = whole
draw, run = torch.Generator().manual_seed(0), fused.Fused(known.shape, cpu, "", 64, 132)
sizes = (1, 37, 70, 1), (17, 300, 129, 1), (64, 33, 300, 2), (33, 40, 700, 4), (5, 96, 3072, 8), (20, 2560, 3000, 3)
for rows, width, inputs, parts in sizes:
    x, w = (torch.randn(size, inputs, generator=draw).half() for size in (rows, width))
    made = run._skinny(x, Dense(w, None))
    assert made.parts == parts, (rows, width, inputs, made.parts)
    off = made.value.float().view(parts, rows, width).sum(0) - x.float() @ w.float().T
    assert off.abs().max() < 0.002 * inputs**0.5 + 0.05 * (parts == 1), (rows, width, inputs, off.abs().max())

for rows, width, inputs in ((1, 32, 128), (17, 150, 129), (64, 37, 300), (16, 96, 64)):
    x, w = (torch.randn(n, inputs, generator=draw).half() / inputs**0.25 for n in (rows, 2 * width))
    gate, up = (x.float() @ w.float().T).chunk(2, 1)
    off = run._gated_product(x, Dense(w, None)).float() - torch.nn.functional.silu(gate) * up
    assert off.abs().max() < 0.01, (rows, width, inputs, off.abs().max())

def integers(low, high, *size): return torch.randint(low, high, size, generator=draw)
state = State(integers(0, 9, 7), integers(3, 6, 7), integers(4, 8, 7), integers(0, 2, 7).bool(), torch.tensor([2, 5]),
              integers(1, 2, 1), integers(0, 9, 4, 7), torch.rand(4, 7))
other = State(*(tensor.clone() for tensor in state))
for _ in range(4):
    tokens, logprobs = integers(0, 9, 5), torch.rand(5)
    run.book(state, tokens, logprobs)
    book(other, tokens, logprobs)
assert all(torch.equal(mine, theirs) for mine, theirs in zip(state, other, strict=True)), (state, other)

narrow = {"initializer_range": 0.1}
policy, exact = (rollouts.model("qwen3", dtype, **narrow) for dtype in (torch.float16, torch.float32))
prompts = rollouts.prompts(9, 30, 4)
engine = PortableRollout(policy, None, rows=5)
engine.run, engine.buckets = fused.Fused(engine.family.shape, cpu, skinny_rows=4), (1, 2, 4, 5)
made = engine.generate(prompts, 3, Sampling(12, seed=1, stop_ids=tuple(range(1, 30))))
for prompt, group in zip(prompts, made, strict=True):
    for completion in group:
        off = torch.tensor(completion.logprobs) - rollouts.logprobs(exact, prompt, completion)
        assert off.abs().max() < 0.02, off
assert len({len(c.token_ids) for c in rollouts.flat(made)}) > 2
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_kernels_give_what_plain_torch_gives() -> None:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    child = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-2000:]


def test_without_a_card_plain_torch_runs_and_says_why() -> None:
    known, cpu = read(rollouts.model("qwen3")), torch.device("cpu")
    layer = Keeper(known, "copy", torch.float32).weights.layers[0]
    chosen = trial.choose(known.shape, layer, cpu, torch.float32)
    assert type(chosen) is Plain and "CUDA" in chosen.reason
    assert type(trial.choose(known.shape, layer, cpu, torch.float32, wanted=False)) is Plain


def test_a_kernel_that_differs_is_found_out() -> None:
    known, cpu = read(rollouts.model("qwen3")), torch.device("cpu")
    layer = Keeper(known, "copy", torch.float32).weights.layers[0]

    class Shifted(Plain):
        def attend(self, q, index, ready):
            return super().attend(q, index, ready) * 1.05

    assert trial.difference(Plain(known.shape), Plain(known.shape), layer, cpu, torch.float32) is None
    assert "attention" in (trial.difference(Shifted(known.shape), Plain(known.shape), layer, cpu, torch.float32) or "")
