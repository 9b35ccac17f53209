"""On a CUDA card: captured graphs, the flash kernel, the fused kernels and FP8 give what the CPU tests hold eager code to."""

from __future__ import annotations

import pytest
import rollouts
import torch

from grpo_portable.errors import EngineUnsupported
from grpo_portable.rollout import skinny
from grpo_portable.rollout.booking import State, book
from grpo_portable.rollout.family import Shape, read
from grpo_portable.rollout.forward import Plain, Rows
from grpo_portable.rollout.fused import Fused, Narrow
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.rollout.sampler import Drawing
from grpo_portable.rollout.weights import Dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
GREEDY = Sampling(max_tokens=24, temperature=0)


@pytest.mark.parametrize("family", rollouts.FAMILIES)
def test_greedy_equals_generate_in_float32(family: str) -> None:
    policy, prompts = rollouts.model(family).cuda(), rollouts.prompts(5, 1, 40, 17, 17)
    engine = PortableRollout(policy, None, rows=4)
    wanted = rollouts.flat(ReferenceRollout(policy, None, rows=5).generate(prompts, 1, GREEDY))
    for _ in range(2):  # capturing, then replaying
        made = rollouts.flat(engine.generate(prompts, 1, GREEDY))
        assert [c.token_ids for c in made] == [c.token_ids for c in wanted]
        for ours, theirs in zip(made, wanted, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_half_precision_logprobs_are_the_policys(family: str, fuse: bool) -> None:
    wide = {} if family == "qwen3" else {"head_dim": 16}
    policy, prompts = rollouts.model(family, torch.bfloat16, **wide).cuda(), rollouts.prompts(9, 30, 2, 21, 40)
    exact = rollouts.model(family, **wide).cuda()
    engine = PortableRollout(policy, None, rows=8, fuse=None if fuse else False)
    made = engine.generate(prompts, 3, Sampling(max_tokens=20, seed=3))
    ours, theirs = [], []
    for prompt, group in zip(prompts, made, strict=True):
        for completion in group:
            wanted = rollouts.logprobs(exact, prompt, completion)
            ours.append((torch.tensor(completion.logprobs) - wanted).abs())
            theirs.append((rollouts.logprobs(policy, prompt, completion) - wanted).abs())
    # no further from float32 than transformers' own bfloat16 forward is
    assert torch.cat(ours).mean() < 1.5 * torch.cat(theirs).mean() + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 5, 16, 21])
def test_rows_that_come_and_go_keep_their_keys(rows: int, dtype: torch.dtype) -> None:
    policy, prompts = rollouts.model("qwen3", dtype).cuda(), rollouts.prompts(3, 50, 1, 17, 18, 19, 2)
    sampling = Sampling(max_tokens=40, seed=11, stop_ids=(1, 2, 3, 4))
    made = PortableRollout(policy, None, rows=rows).generate(prompts, 3, sampling)
    assert {c.finish_reason for c in rollouts.flat(made)} == {"stop", "length"}
    exact, bound = rollouts.model("qwen3").cuda(), 1e-3 if dtype == torch.float32 else 0.5
    for prompt, group in zip(prompts, made, strict=True):
        for completion in group:
            off = torch.tensor(completion.logprobs) - rollouts.logprobs(exact, prompt, completion)
            assert off.abs().max() < bound and off.abs().mean() < 0.2 * bound


@pytest.mark.parametrize("family", ["qwen3", "llama with biases", "mistral", "gemma2", "gemma3_text", "phi3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_kernels_work_here(family: str, dtype: torch.dtype) -> None:
    engine = PortableRollout(rollouts.model(family, dtype, head_dim=32).cuda(), None, rows=4)
    assert engine.run.name == "fused", engine.run.reason


@pytest.mark.parametrize("capacity", [64, 512, 2048])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 1, 64), (2, 4, 128), (3, 3, 80), (1, 20, 256)])
def test_fused_attention_is_attention(
    capacity: int, window: int | None, kv_heads: int, group: int, head_dim: int
) -> None:
    rows, device = 6, torch.device("cuda")
    shape = Shape(
        layers=1, hidden=64, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, vocab=9, eps=1e-6,
        scaling=head_dim**-0.5, activation="silu", norm_offset=0.0, embed_scale=1.0, attn_softcap=None, logit_softcap=None,
        windows=(window,), rotary=("",), context=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    cache = Cache(shape, rows, capacity, device, torch.float16)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_()
        tensor[1:3, :30] = tensor[0, :30]  # one prompt in three rows
    q = torch.randn(rows, shape.heads, head_dim, device=device, dtype=torch.float16)
    lengths = torch.tensor([30, 33, capacity - 1, 0, 63, capacity // 2], device=device)
    alone, nothing = (torch.tensor(v, device=device, dtype=torch.int32) for v in (range(rows), [0] * rows))
    leaders, shared = (
        torch.tensor(v, device=device, dtype=torch.int32) for v in ([0, 0, 0, 3, 4, 5], [30, 30, 30, 0, 9, 0])
    )
    plain, fused = Plain(shape), Fused(shape, device)
    tables = {"": (torch.zeros(capacity, head_dim, device=device),) * 2}
    wanted = plain.attend(q, 0, plain.ready(tables, cache, Rows(lengths, alone, nothing, capacity))).float()
    poisoned = [t.clone() for t in (cache.keys[0], cache.values[0])]
    for tensor in (cache.keys[0], cache.values[0]):
        tensor[1:3, :30] = 7.0  # never read: the leader's are
    made = fused.attend(q, 0, fused.ready(tables, cache, Rows(lengths, leaders, shared, capacity))).float()
    assert (made - wanted).norm() / wanted.norm() < 2e-3
    for tensor, content in zip((cache.keys[0], cache.values[0]), poisoned, strict=True):
        tensor.copy_(content)
    made = fused.attend(q, 0, fused.ready(tables, cache, Rows(lengths, alone, nothing, capacity))).float()
    assert (made - wanted).norm() / wanted.norm() < 2e-3


@pytest.mark.parametrize("rows", [1, 17, 33, 64])
@pytest.mark.parametrize(("width", "inputs"), [(96, 200), (1000, 576), (2560, 9728)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_skinny_products_are_products(dtype: torch.dtype, width: int, inputs: int, rows: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels cannot overlap here")
    run = Fused(read(rollouts.model("llama")).shape, torch.device("cuda"), skinny_rows=64)
    torch.manual_seed(rows)
    x, w = (torch.randn(n, inputs, device="cuda").to(dtype) for n in (rows, width))
    before = torch.empty(rows + 1, inputs, device="cuda", dtype=torch.bfloat16).fill_(float("nan")).to(dtype)
    before[:rows] = x  # what lies behind the last row is not read as one
    state = Narrow(before[:rows], torch.ones(rows, device="cuda")) if dtype.itemsize == 1 else before[:rows]
    for _ in range(3):  # launched one behind the other, as in a step
        made = run._skinny(state, Dense(w, None))
    value = made.value.float().sum(0) if made.parts > 1 else made.value.float()
    wanted = x.float() @ w.float().T
    assert made.parts == skinny.tiling(rows, width, inputs, run.processors, w.element_size()).splits
    assert (value - wanted).norm() / wanted.norm() < 5e-3


@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize(("width", "inputs"), [(96, 200), (1536, 576), (9728, 2560)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_gated_products_are_gated_products(dtype: torch.dtype, width: int, inputs: int, rows: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels cannot overlap here")
    run = Fused(read(rollouts.model("llama")).shape, torch.device("cuda"), skinny_rows=64)
    torch.manual_seed(rows)
    narrow = dtype.itemsize == 1
    x, w = (torch.randn(n, inputs, device="cuda") for n in (rows, 2 * width))
    x, w = x.to(dtype), (w if narrow else w / inputs**0.5).to(dtype)
    sizes, scale = (torch.rand(n, device="cuda") / inputs**0.5 for n in (rows, 2 * width))
    before = torch.empty(rows + 1, inputs, device="cuda", dtype=torch.bfloat16).fill_(float("nan")).to(dtype)
    before[:rows] = x
    state = Narrow(before[:rows], sizes) if narrow else before[:rows]
    for _ in range(3):
        made = run._gated_product(state, Dense(w, None, scale if narrow else None)).float()
    both = x.float() @ w.float().T
    gate, up = (both * sizes[:, None] * scale if narrow else both).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    assert (made - wanted).norm() / wanted.norm() < 5e-3


def test_the_products_are_taken_on_the_card_they_were_measured_on() -> None:
    if torch.cuda.get_device_capability() != skinny.MEASURED_ON:
        pytest.skip("another card")
    engine = PortableRollout(rollouts.model("qwen3", torch.bfloat16, head_dim=32).cuda(), None, rows=4, copy="bf16")
    assert isinstance(engine.run, Fused) and engine.run.skinny_rows == 64, engine.run.reason


def test_steps_with_overlapping_kernels_are_steps() -> None:
    policy, prompts = rollouts.model("qwen3", torch.bfloat16, head_dim=32).cuda(), rollouts.prompts(9, 30, 21, 40)
    exact = rollouts.model("qwen3", head_dim=32).cuda()
    engine = PortableRollout(policy, None, rows=12, copy="bf16")
    if not isinstance(engine.run, Fused) or not engine.run.skinny_rows:
        pytest.skip(f"no Triton products here: {engine.run.reason}")
    sampling, off = Sampling(max_tokens=60, seed=3, stop_ids=(1, 2, 3)), []
    for _ in range(5):  # sizes of prefills that come again are captured, and round otherwise than those that are not
        first = engine.generate(prompts, 5, sampling)
    for _ in range(20):  # a kernel that reads before the one in front has written shows as a row that differs
        assert engine.generate(prompts, 5, sampling) == first
    for prompt, group in zip(prompts, first, strict=True):
        off += [(torch.tensor(c.logprobs) - rollouts.logprobs(exact, prompt, c)).abs() for c in group]
    assert torch.cat(off).mean() < 0.05


@pytest.mark.parametrize(("rows", "stops"), [(1, [-1]), (5, [3]), (64, [0, 2, 5])])
def test_fused_booking_is_booking(rows: int, stops: list[int]) -> None:
    run, held = Fused(read(rollouts.model("llama")).shape, torch.device("cuda")), 70
    torch.manual_seed(rows)

    def whole(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, device="cuda")

    state = State(
        whole(0, 9, held), whole(3, 6, held), whole(4, 8, held), whole(0, 2, held).bool(), torch.tensor(stops, device="cuda"),
        whole(1, 2, 1), whole(0, 9, 4, held), torch.rand(4, held, device="cuda"),
    )  # fmt: skip
    other = State(*(tensor.clone() for tensor in state))
    for _ in range(4):
        tokens, logprobs = whole(0, 9, rows), torch.rand(rows, device="cuda")
        run.book(state, tokens, logprobs)
        book(other, tokens, logprobs)
    for name, mine, theirs in zip(State._fields, state, other, strict=True):
        assert torch.equal(mine, theirs), name


def test_fused_drawing_is_drawing() -> None:
    shape = read(rollouts.model("llama")).shape
    plain, fused = Plain(shape), Fused(shape, torch.device("cuda"))
    torch.manual_seed(0)
    for vocab in (200, 5000, 151936):
        logits = (torch.randn(64, vocab, device="cuda") * 3).bfloat16()
        noise = torch.rand(64, dtype=torch.float64, device="cuda")
        for temperature in (1.0, 0.6):
            drawing = Drawing(temperature, 1.0, 0, 0.0, 1.0)
            (a, p), (b, q) = (run.draw(logits, noise, drawing, None) for run in (plain, fused))
            assert (a != b).sum() <= 1  # a boundary of the cumulative sum may fall the other way
            assert (p - q)[a == b].abs().max() < 1e-4


@pytest.mark.parametrize("copy", ["bf16", "none"])
def test_an_update_reaches_captured_graphs(copy: str) -> None:
    policy, prompts = rollouts.model("qwen3").cuda(), rollouts.prompts(12, 5)
    engine = PortableRollout(policy, None, rows=4, copy=copy, fuse=False)
    before = engine.generate(prompts, 2, GREEDY)
    rollouts.disturb(policy, 0.1)
    engine.sync(policy)
    after = engine.generate(prompts, 2, GREEDY)
    wanted = rollouts.flat(ReferenceRollout(policy, None, rows=4).generate(prompts, 2, GREEDY))
    assert [c.token_ids for c in rollouts.flat(after)] == [c.token_ids for c in wanted]
    assert after != before


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", torch.bfloat16), ("mistral", torch.float16), ("llama", torch.float32)]
)
@torch.no_grad()
def test_captured_prefills_leave_the_keys_that_uncaptured_ones_leave(
    family: str, dtype: torch.dtype, fuse: bool
) -> None:
    policy = rollouts.model(family, dtype, head_dim=32).cuda()
    captured, plain = (
        PortableRollout(policy, None, rows=6, fuse=None if fuse else False)._decoder_for(128) for _ in range(2)
    )
    plain.captures = False
    weights = PortableRollout(policy, None, rows=6).keeper.weights
    for seed in range(6):  # three as they come, one captured, two replayed
        prompts, rows = rollouts.prompts(71, 66, seed=seed), [seed % 3, 5 - seed % 3]
        for decoder in (captured, plain):
            decoder._prefill(weights, prompts, rows)
        for row, prompt in zip(rows, prompts, strict=True):
            made, wanted = (d.cache.all[:, row, : len(prompt) - 1].float() for d in (captured, plain))
            assert wanted.norm() > 0
            assert (made - wanted).norm() / wanted.norm() < (1e-4 if dtype == torch.float32 else 1e-2)
    assert set(captured._prompts) == {(2, 128)} and not plain._prompts


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_prompts_that_join_steps_leave_what_prefills_leave(family: str) -> None:
    policy, exact = (rollouts.model(family, d, head_dim=32).cuda() for d in (torch.bfloat16, torch.float32))
    prompts = rollouts.prompts(*(60 + i % 4 for i in range(24)))
    sampling, off = Sampling(max_tokens=40, seed=3, stop_ids=tuple(range(1, 9))), {}
    for joins in (False, True):
        engine = PortableRollout(policy, None, rows=8)
        if not isinstance(engine.run, Fused):
            pytest.skip(engine.run.reason)
        engine.run.joins = joins
        for _ in range(3):  # as they come, captured, replayed
            made = engine.generate(prompts, 4, sampling)
        assert any(len(key) == 5 for key in engine._decoder.graphs._graphs) == joins
        off[joins] = torch.cat(
            [
                (torch.tensor(c.logprobs) - rollouts.logprobs(exact, p, c)).abs()
                for p, g in zip(prompts, made, strict=True)
                for c in g
            ]
        )
    assert off[True].mean() < 1.3 * off[False].mean() + 1e-3


def test_a_captured_prefill_reads_updated_weights() -> None:
    policy = rollouts.model("qwen3").cuda()
    engine, prompts = PortableRollout(policy, None, rows=4, fuse=False), rollouts.prompts(12, 50)
    for seed in range(6):
        rollouts.disturb(policy, 0.05, seed)
        engine.sync(policy)
        made = rollouts.flat(engine.generate(prompts, 2, GREEDY))
        wanted = rollouts.flat(ReferenceRollout(policy, None, rows=4).generate(prompts, 2, GREEDY))
        assert [c.token_ids for c in made] == [c.token_ids for c in wanted]
    assert engine._decoder is not None and engine._decoder._prompts


def test_other_samplings_and_longer_prompts_after_a_capture() -> None:
    policy = rollouts.model("llama").cuda()
    engine, fresh = (
        PortableRollout(policy, None, rows=4, fuse=False),
        PortableRollout(policy, None, rows=4, fuse=False),
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


@pytest.mark.parametrize("fuse", [False, True])
def test_fp8_is_close_to_bfloat16(fuse: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    policy, prompts = rollouts.model("qwen3", torch.bfloat16, **sizes).cuda(), rollouts.prompts(9, 30, 21)
    try:
        engine = PortableRollout(policy, None, rows=16, copy="fp8", fuse=None if fuse else False)
    except EngineUnsupported as refusal:
        pytest.skip(str(refusal))
    off = []
    for prompt, group in zip(prompts, engine.generate(prompts, 6, Sampling(max_tokens=20, seed=3)), strict=True):
        for completion in group:
            off.append((torch.tensor(completion.logprobs) - rollouts.logprobs(policy, prompt, completion)).abs())
    assert 1e-5 < torch.cat(off).mean() < 0.2  # logits of this model spread over several units
