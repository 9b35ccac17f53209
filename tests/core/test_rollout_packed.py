"""Products on the CPU in a layout of their own: the same numbers, wherever the layout is used, and after every update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rollouts
import torch
import torch.nn.functional as F

from grpo_portable import engines
from grpo_portable.rollout import attention, forward, packed, portable
from grpo_portable.rollout.family import read
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.rollout.weights import Keeper

GREEDY = Sampling(max_tokens=24, temperature=0)
CPU = torch.device("cpu")


def test_layouts_by_place_type_and_size() -> None:
    small, none = packed.layout(8, 6, CPU, torch.float32)
    assert none is None and small.shape == (8, 6) and small.t().is_contiguous()  # inputs first
    half, none = packed.layout(1024, 512, CPU, torch.bfloat16)
    assert none is None and half.is_contiguous()
    large, held = packed.layout(1024, 512, CPU, torch.float32)
    if not packed.works():
        pytest.skip("this torch has no oneDNN products")
    assert held is not None and large.shape == (1024, 512) and large.is_meta
    assert large.nbytes == 4 * 1024 * 512  # what the packed one takes


@pytest.mark.skipif(not packed.works(), reason="this torch has no oneDNN products")
@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_a_packed_product_is_the_product(rows: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(300, 200), torch.randn(rows, 200), torch.randn(300)
    held = packed.Packed()
    held.take(weight)
    for b in (None, bias):
        assert torch.allclose(held.times(x, b), F.linear(x, weight, b), atol=2e-4)
    held.take(2 * weight)
    assert torch.allclose(held.times(x, None), 2 * F.linear(x, weight), atol=4e-4)


@pytest.mark.skipif(not packed.works(), reason="this torch has no oneDNN products")
@pytest.mark.parametrize("family", ["qwen3", "llama with biases", "gemma2", "phi3"])
@pytest.mark.parametrize("everything", [True, False])
def test_greedy_equals_generate_with_packed_weights(
    family: str, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights packed and then trained whole, or the head left out and trained through an adapter."""
    monkeypatch.setattr(packed, "PACKED_FROM", 1 if everything else rollouts.VOCAB * rollouts.BASE["hidden_size"] + 1)
    policy = rollouts.model(family) if everything else rollouts.with_lora(rollouts.model(family))
    prompts, engine = rollouts.prompts(12, 5, 30), PortableRollout(policy, None, rows=4)
    layer, head = engine.keeper.weights.layers[0], engine.keeper.weights.head
    assert (layer.out[0].packed is not None) == everything == (head.packed is not None)
    for seed in range(2):
        made = rollouts.flat(engine.generate(prompts, 2, GREEDY))
        wanted = rollouts.flat(ReferenceRollout(policy, None, rows=6).generate(prompts, 2, GREEDY))
        assert [c.token_ids for c in made] == [c.token_ids for c in wanted]
        for ours, theirs in zip(made, wanted, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        rollouts.disturb(policy, 0.05, seed)
        engine.sync(policy)


@pytest.mark.skipif(not packed.works(), reason="this torch has no oneDNN products")
def test_what_cannot_change_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACKED_FROM", 1)
    frozen = rollouts.with_lora(rollouts.model("qwen3"), target_modules=["q_proj"])
    keeper = Keeper(read(frozen), "copy", torch.float32)
    layer, head = keeper.weights.layers[0], keeper.weights.head
    assert head.packed is not None and layer.qkv[0].packed is not None and layer.down[0].packed is not None
    before = [part.packed._weight for part in (head, layer.qkv[0], layer.down[0]) if part.packed]
    keeper.refresh()
    after = [part.packed._weight for part in (head, layer.qkv[0], layer.down[0]) if part.packed]
    assert [a is b for a, b in zip(before, after, strict=True)] == [
        True,
        False,
        True,
    ]  # the head, q with its adapter, down


def test_a_large_policy_is_rolled_out_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = rollouts.model("llama")
    each = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96  # q and out, k and v, gate and up and down
    copy_gib = 3 * each * 4 / 2**30
    for free, kind in ((None, "copy"), (16.1 * copy_gib, "copy"), (15.9 * copy_gib, "live")):
        monkeypatch.setattr(portable, "available_gib", lambda free=free: free)
        assert PortableRollout(policy, None, rows=2).keeper.kind == kind
    assert engines.path_settings("cpu", bfloat16=False).copy == "auto"


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_batched_attention_is_sdpa(window: int | None, group: int) -> None:
    torch.manual_seed(0)
    shape = replace(
        read(rollouts.model("llama")).shape, heads=2 * group, kv_heads=2, head_dim=8, windows=(window,), layers=1
    )
    cache = Cache(shape, 4, 12, CPU, torch.float32)
    assert cache.kind == "batched" and cache.all.shape == (2, 4, 12, 2, 8)
    cache.all.normal_()
    q, lengths = torch.randn(3, 2 * group, 8), torch.tensor([1, 7, 10])
    made, wanted = (
        attention.decode(
            q,
            cache.keys[0],
            cache.values[0],
            attention.reach(kind, shape, lengths, cache.capacity, 10),
            shape,
            window,
        )
        for kind in ("batched", "sdpa")
    )
    assert made.shape == (3, 16 * group) and torch.allclose(made, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # heads outside the positions, and inside
def test_keys_are_written_behind_those_a_row_has(dtype: torch.dtype) -> None:
    shape = replace(read(rollouts.model("llama")).shape, layers=2, kv_heads=2, head_dim=4)
    cache = Cache(shape, 3, 6, CPU, dtype)
    keys, values, lengths = (
        torch.ones(2, 2, 4, dtype=dtype),
        torch.full((2, 2, 4), 2, dtype=dtype),
        torch.tensor([5, 0]),
    )
    cache.write(1, cache.places(lengths), keys, values)
    wanted = torch.zeros(4, 3, 6, 2, 4, dtype=dtype)
    for row, at in enumerate((5, 0)):
        wanted[1, row, at], wanted[3, row, at] = 1, 2
    assert torch.equal(cache.all, wanted)


def test_the_norm_in_few_calls_is_the_norm() -> None:
    x, factors = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0])
    scale = (12.5 + 0.5) ** -0.5  # mean of squares 12.5, eps 0.5
    assert torch.allclose(forward.norm(x, factors, 0.5), torch.tensor([[3 * scale, 8 * scale], [0.0, 0.0]]))
