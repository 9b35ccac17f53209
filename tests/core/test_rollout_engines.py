"""The portable engine gives what the policy's own forward gives: token for token, and for every kind of weight."""

from __future__ import annotations

import pytest
import rollouts
import torch

from grpo_portable.errors import DataError, EngineError, EngineUnsupported
from grpo_portable.rollout.portable import PortableRollout, make
from grpo_portable.rollout.protocol import Completion, Sampling
from grpo_portable.rollout.reference import ReferenceRollout

GREEDY = Sampling(max_tokens=24, temperature=0)


def same(policy, made: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    for ours, theirs in zip(rollouts.flat(made), rollouts.flat(wanted), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", rollouts.FAMILIES)
def test_greedy_equals_generate_for_every_family(family: str) -> None:
    policy, prompts = rollouts.model(family), rollouts.prompts(5, 1, 40, 17, 17)
    made = PortableRollout(policy, None, rows=4).generate(prompts, 1, GREEDY)
    same(policy, made, ReferenceRollout(policy, None, rows=5).generate(prompts, 1, GREEDY))
    assert len({completion.token_ids for completion in rollouts.flat(made)}) > 1


@pytest.mark.parametrize("family", rollouts.FAMILIES)
def test_logprobs_of_sampled_tokens_are_the_policys(family: str) -> None:
    policy, prompts = rollouts.model(family), rollouts.prompts(9, 30)
    sampling = Sampling(max_tokens=20, temperature=0.7, seed=3)
    for prompt, group in zip(
        prompts, PortableRollout(policy, None, rows=6).generate(prompts, 3, sampling), strict=True
    ):
        assert len({completion.token_ids for completion in group}) == 3
        for completion in group:
            wanted = rollouts.logprobs(policy, prompt, completion, 0.7)
            assert torch.tensor(completion.logprobs) == pytest.approx(wanted, abs=1e-4)


ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "head trained whole": {"modules_to_save": ["lm_head", "norm"]},
    "bias in the adapter": {"target_modules": ["k_proj"], "lora_bias": True, "family": "qwen2"},
}


@pytest.mark.parametrize("copy", ["bf16", "none"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_update_reaches_the_very_next_rollout(adapter: str, copy: str) -> None:
    settings = dict(ADAPTERS[adapter])
    policy = rollouts.with_lora(rollouts.model(settings.pop("family", "qwen3")), **settings)
    prompts = rollouts.prompts(12, 5)
    engine, reference = PortableRollout(policy, None, rows=4, copy=copy), ReferenceRollout(policy, None, rows=4)
    before = engine.generate(prompts, 2, GREEDY)
    same(policy, before, reference.generate(prompts, 2, GREEDY))
    rollouts.disturb(policy, 0.1)
    engine.sync(policy)
    after = engine.generate(prompts, 2, GREEDY)
    same(policy, after, reference.generate(prompts, 2, GREEDY))
    assert after != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}])
def test_live_weights_are_as_before_bit_for_bit(settings: dict, dtype: torch.dtype) -> None:
    policy = rollouts.with_lora(rollouts.model(dtype=dtype), **settings)
    kept = {name: value.clone() for name, value in policy.state_dict().items()}
    engine = PortableRollout(policy, None, rows=4, copy="none")
    for _ in range(3):
        engine.generate(rollouts.prompts(12, 5), 2, GREEDY)
        rollouts.disturb(policy, 0)  # the optimiser touches the adapter between rollouts
    engine.close()
    for name, value in policy.state_dict().items():
        assert torch.equal(value, kept[name]), name


def test_live_weights_are_restored_when_a_rollout_fails() -> None:
    policy = rollouts.with_lora(rollouts.model())
    kept = {name: value.clone() for name, value in policy.state_dict().items()}
    engine = PortableRollout(policy, None, rows=2, copy="none")
    with pytest.raises(ZeroDivisionError), engine.keeper.in_use():
        1 / 0  # noqa: B018
    assert all(torch.equal(value, kept[name]) for name, value in policy.state_dict().items())


def test_disabled_and_merged_adapters_count_as_the_forward_counts_them() -> None:
    policy, prompts = rollouts.with_lora(rollouts.model()), rollouts.prompts(7)
    adapted = PortableRollout(policy, None, rows=1).generate(prompts, 1, GREEDY)
    with policy.disable_adapter():
        engine = PortableRollout(policy, None, rows=1)
        bare = engine.generate(prompts, 1, GREEDY)
        same(policy, bare, ReferenceRollout(policy, None, rows=1).generate(prompts, 1, GREEDY))
    assert bare != adapted
    engine.sync(policy)
    same(policy, engine.generate(prompts, 1, GREEDY), adapted)
    policy.merge_adapter()
    same(policy, PortableRollout(policy, None, rows=1).generate(prompts, 1, GREEDY), adapted)


def test_without_an_adapter_all_weights_may_train() -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(7, 3)
    for copy in ("auto", "none"):
        engine = PortableRollout(policy, None, rows=2, copy=copy)
        rollouts.disturb(policy, 0.05)
        engine.sync(policy)
        same(
            policy,
            engine.generate(prompts, 1, GREEDY),
            ReferenceRollout(policy, None, rows=2).generate(prompts, 1, GREEDY),
        )


def test_nf4_base_is_copied_with_the_delta_and_never_touched() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    policy = rollouts.model("qwen3")
    for name, module in list(policy.named_modules()):
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            four = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            four.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
            four.support_avx512bf16_for_cpu = False  # else an eval forward repacks the weight in place
            policy.set_submodule(name, four)
    policy = rollouts.with_lora(
        policy, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    packed = {name: value.clone() for name, value in policy.state_dict().items()}
    prompts, engine = rollouts.prompts(12, 5), PortableRollout(policy, None, rows=2)
    for size in (0.0, 0.1):
        rollouts.disturb(policy, size)
        engine.sync(policy)
        for prompt, group in zip(prompts, engine.generate(prompts, 2, Sampling(max_tokens=16, seed=1)), strict=True):
            for completion in group:
                wanted = rollouts.logprobs(policy, prompt, completion)
                assert torch.tensor(completion.logprobs) == pytest.approx(wanted, abs=2e-3)
    assert all(torch.equal(value, packed[name]) for name, value in policy.state_dict().items() if "lora" not in name)
    with pytest.raises(EngineUnsupported, match="without a copy"):
        PortableRollout(policy, None, rows=2, copy="none")
    assert make(policy, None, rows=2, copy="none").name == "reference"


def test_bfloat16_diverges_at_near_ties_only() -> None:
    policy, prompts = rollouts.model("llama", torch.bfloat16).requires_grad_(False), rollouts.prompts(20, 9, 33)
    made = PortableRollout(policy, None, rows=3).generate(prompts, 1, GREEDY)
    wanted = ReferenceRollout(policy, None, rows=3).generate(prompts, 1, GREEDY)
    for prompt, ours, theirs in zip(prompts, rollouts.flat(made), rollouts.flat(wanted), strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if a != b), None)
        if at is not None:
            ids = torch.tensor([[*prompt, *ours.token_ids[:at]]])
            logits = policy(input_ids=ids).logits[0, -1].float()
            gap = abs(float(logits[ours.token_ids[at]] - logits[theirs.token_ids[at]]))
            assert gap < 0.05 * float(logits.std())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 64])
def test_tokens_do_not_depend_on_rows_at_once_nor_on_when_the_host_looks(rows: int, ahead: bool) -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(3, 50, 1, 17, 18, 19, 2)
    sampling = Sampling(max_tokens=30, temperature=1.0, seed=11, stop_ids=tuple(range(1, 12)))
    engine = PortableRollout(policy, None, rows=rows)
    engine.ahead = ahead
    made = engine.generate(prompts, 3, sampling)
    wanted = PortableRollout(policy, None, rows=21).generate(prompts, 3, sampling)
    assert [c.token_ids for c in rollouts.flat(made)] == [c.token_ids for c in rollouts.flat(wanted)]
    assert [len(group) for group in made] == [3] * 7
    assert {c.finish_reason for c in rollouts.flat(made)} == {"stop", "length"}


def test_a_seed_repeats_itself_and_torch_seeds_what_has_none() -> None:
    engine, prompts = PortableRollout(rollouts.model("llama"), None, rows=4), rollouts.prompts(5, 6)
    seeded = Sampling(max_tokens=8, seed=4)
    assert engine.generate(prompts, 2, seeded) == engine.generate(prompts, 2, seeded)
    assert engine.generate(prompts, 2, seeded) != engine.generate(prompts, 2, Sampling(max_tokens=8, seed=5))
    torch.manual_seed(0)
    first, second = (engine.generate(prompts, 2, Sampling(max_tokens=8)) for _ in range(2))
    assert first != second
    torch.manual_seed(0)
    assert engine.generate(prompts, 2, Sampling(max_tokens=8)) == first


def test_rows_end_at_their_stop_id_and_keep_it() -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(6, 9)
    free = rollouts.flat(PortableRollout(policy, None, rows=2).generate(prompts, 1, GREEDY))
    first = free[0].token_ids[0]
    sampling = Sampling(max_tokens=24, temperature=0, stop_ids=(first, free[1].token_ids[5]))
    ended = rollouts.flat(PortableRollout(policy, None, rows=2).generate(prompts, 1, sampling))
    assert ended[0].token_ids == (first,) and ended[0].finish_reason == "stop"
    for cut, whole in zip(ended, free, strict=True):
        end = next((i for i, t in enumerate(whole.token_ids) if t in sampling.stop_ids), len(whole.token_ids) - 1) + 1
        assert cut.token_ids == whole.token_ids[:end]
    same(policy, [ended], [rollouts.flat(ReferenceRollout(policy, None, rows=2).generate(prompts, 1, sampling))])


@pytest.mark.parametrize("ahead", [False, True])
def test_cost_follows_the_live_rows(ahead: bool) -> None:
    policy, prompts = rollouts.model("llama"), rollouts.prompts(*[9] * 8)
    limits = [3, 24, 5, 24, 8, 4, 6, 24] * 8
    engine = PortableRollout(policy, None, rows=8)
    engine.ahead = ahead
    engine.generate(prompts, 8, Sampling(max_tokens=24, seed=1), limits=limits)
    assert sum(limits) <= engine.row_steps < 1.25 * sum(limits)


@pytest.mark.parametrize(
    "family", [name for name, settings in rollouts.FAMILIES.items() if "sliding_window" in settings]
)
def test_a_long_row_that_ended_leaves_nothing_to_those_that_come_after_it(family: str) -> None:
    """Three long prompts end at once and one request waits: two of their rows run on empty, then hold shorter prompts."""
    policy, prompts, limits = rollouts.model(family), rollouts.prompts(100, 100, 100, 40, 20, 5), [4, 4, 4, 80, 80, 80]
    sampling = Sampling(max_tokens=80, temperature=0)
    made = rollouts.flat(PortableRollout(policy, None, rows=5).generate(prompts, 1, sampling, limits=limits))
    wanted = rollouts.flat(ReferenceRollout(policy, None, rows=6).generate(prompts, 1, sampling))
    for ours, theirs, limit in zip(made, wanted, limits, strict=True):
        assert ours.token_ids == theirs.token_ids[:limit]


def test_limits_end_single_rows_sooner() -> None:
    policy, prompts, limits = rollouts.model("llama"), rollouts.prompts(6, 9), [1, 24, 7, 3]
    engine = PortableRollout(policy, None, rows=3)
    whole = rollouts.flat(engine.generate(prompts, 2, GREEDY))
    cut = rollouts.flat(engine.generate(prompts, 2, GREEDY, limits=limits))
    assert [len(c.token_ids) for c in cut] == limits
    assert all(a.token_ids == b.token_ids[: len(a.token_ids)] for a, b in zip(cut, whole, strict=True))


def test_what_the_context_leaves_is_the_limit() -> None:
    engine = PortableRollout(rollouts.model("llama"), None, rows=2, max_context=20)
    (one,), (two,) = engine.generate(rollouts.prompts(15, 4), 1, GREEDY)
    assert (len(one.token_ids), len(two.token_ids)) == (5, 16)


def test_the_reference_engine_ends_with_the_context_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_positions": 20, "n_embd": 32, "n_head": 2, "n_layer": 1, "bos_token_id": None, "eos_token_id": None}
    engine = make(GPT2LMHeadModel(GPT2Config(vocab_size=rollouts.VOCAB, **small)).eval(), None, rows=4)
    assert engine.name == "reference"  # its positions are a table, which has no row for the 21st
    made = engine.generate(rollouts.prompts(15, 4, 19), 1, GREEDY)
    assert [len(c.token_ids) for c in rollouts.flat(made)] == [5, 16, 1]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[3], []], "prompt 1 is empty"),
        ([[3] * 256], "prompt 0 has 256 tokens"),
        ([[3, rollouts.VOCAB]], "outside the vocabulary"),
        ([[-1]], "outside the vocabulary"),
    ],
)
@pytest.mark.parametrize("engine", [PortableRollout, ReferenceRollout])
def test_prompts_no_engine_can_serve_are_named(engine, prompts: list, says: str) -> None:
    with pytest.raises(DataError, match=says):
        engine(rollouts.model("llama"), None, rows=2).generate(prompts, 1, GREEDY)


def test_no_prompts_no_completions() -> None:
    assert PortableRollout(rollouts.model("llama"), None, rows=2).generate([], 4, GREEDY) == []


@pytest.mark.parametrize("engine", [PortableRollout, ReferenceRollout])
def test_a_diverged_policy_is_an_error_not_a_completion(engine) -> None:
    policy = rollouts.model("llama")
    with torch.no_grad():
        policy.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not numbers"):
        engine(policy, None, rows=1).generate(rollouts.prompts(4), 1, Sampling(max_tokens=4, seed=1))


@pytest.mark.parametrize("limits", [[3, 0, 1, 4], [1, 1], [2, 2, 2, -1]])
def test_limits_are_from_one_and_one_a_completion(limits: list[int]) -> None:
    engine = PortableRollout(rollouts.model("llama"), None, rows=2)
    with pytest.raises(DataError, match="limits"):
        engine.generate(rollouts.prompts(4, 5), 2, GREEDY, limits=limits)


def test_a_rollout_that_broke_off_leaves_nothing() -> None:
    engine, prompts = PortableRollout(rollouts.model("llama"), None, rows=3), rollouts.prompts(4, 9, 2)
    engine.ahead = True
    wanted, turns = engine.generate(prompts, 3, GREEDY), iter(range(3))
    assert not engine._flying

    def break_off() -> None:
        if next(turns, None) is None:
            raise KeyboardInterrupt

    engine.tick = break_off
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, 3, GREEDY)
    assert not engine._flying
    engine.tick = lambda: None
    assert engine.generate(prompts, 3, GREEDY) == wanted


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("broken_off", [False, True])
def test_what_a_diverged_policy_left_does_not_reach_the_next_rollout(family: str, broken_off: bool) -> None:
    policy, prompts = rollouts.model(family), rollouts.prompts(5, 40)
    engine = PortableRollout(policy, None, rows=4)
    before = engine.generate(prompts, 2, GREEDY)
    weight = policy.model.layers[0].self_attn.v_proj.weight.data
    kept = weight.clone()
    weight.fill_(torch.nan)
    engine.sync(policy)

    def tick() -> None:
        if broken_off:
            raise TimeoutError

    engine.tick = tick
    with pytest.raises(TimeoutError if broken_off else EngineError):
        engine.generate(rollouts.prompts(60, 61), 2, GREEDY)
    weight.copy_(kept)
    engine.sync(policy)
    engine.tick = lambda: None
    assert engine.generate(prompts, 2, GREEDY) == before


def test_a_policy_there_is_no_room_for_leaves_no_old_weights(monkeypatch) -> None:
    policy, other, prompts = rollouts.model("llama"), rollouts.model("llama", seed=2), rollouts.prompts(4)
    engine = PortableRollout(policy, None, rows=1)
    before = engine.generate(prompts, 1, GREEDY)

    def no_room(*given) -> None:
        assert "keeper" not in vars(engine) and engine._decoder is None  # what they held counts as free
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr("grpo_portable.rollout.portable.Keeper", no_room)
        with pytest.raises(MemoryError):
            engine.sync(other)
    with pytest.raises(EngineError, match="take over"):
        engine.generate(prompts, 1, GREEDY)
    engine.sync(other)
    assert engine.generate(prompts, 1, GREEDY) == PortableRollout(other, None, rows=1).generate(prompts, 1, GREEDY)
    engine.sync(policy)
    assert engine.generate(prompts, 1, GREEDY) == before


def test_a_closed_engine_says_so() -> None:
    engine = PortableRollout(rollouts.model("llama"), None, rows=1)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(rollouts.prompts(4), 1, GREEDY)


def test_models_it_does_not_know_go_to_the_reference_engine() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    policy = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=rollouts.VOCAB, n_positions=64)
    ).eval()
    with pytest.raises(EngineUnsupported, match="gpt2"):
        PortableRollout(policy, None, rows=2)
    engine = make(policy, None, rows=2)
    assert engine.name == "reference" and "gpt2" in engine.because
    assert len(engine.generate(rollouts.prompts(4, 6), 3, Sampling(max_tokens=4, seed=1))[1]) == 3
    with pytest.raises(EngineUnsupported):
        make(policy, None, rows=2, copy="fp8")


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["embed_tokens", "q_proj"]}, {"trainable_token_indices": [1, 2]}]
)
def test_adapters_outside_the_layers_go_to_the_reference_engine(settings: dict) -> None:
    policy = rollouts.with_lora(rollouts.model("llama"), **settings)
    engine = make(policy, None, rows=2)
    assert engine.name == "reference" and "embedding or the head" in engine.because


def test_a_wrapper_of_the_same_policy_is_the_same_policy() -> None:
    policy = rollouts.with_lora(rollouts.model("llama"))
    engine = PortableRollout(policy, None, rows=2)
    keeper = engine.keeper
    engine.sync(policy.get_base_model())
    assert engine.keeper is keeper
    other = rollouts.model("llama", seed=2)
    engine.sync(other)
    made = engine.generate(rollouts.prompts(6), 1, GREEDY)
    same(other, made, ReferenceRollout(other, None, rows=1).generate(rollouts.prompts(6), 1, GREEDY))


@pytest.mark.parametrize("copy", ["none", "bf16"])
def test_an_adapter_that_comes_or_goes_on_the_same_model_is_seen_at_sync(copy: str) -> None:
    model, prompts = rollouts.model(), rollouts.prompts(6, 9)
    engine = PortableRollout(model, None, rows=2, copy=copy)
    bare = engine.generate(prompts, 1, GREEDY)
    policy = rollouts.with_lora(model)  # its layers take the place of the model's own
    rollouts.disturb(policy, 0.2)
    engine.sync(policy)
    made = engine.generate(prompts, 1, GREEDY)
    same(policy, made, ReferenceRollout(policy, None, rows=2).generate(prompts, 1, GREEDY))
    assert made != bare
    engine.sync(policy.unload())
    same(model, engine.generate(prompts, 1, GREEDY), bare)


def test_another_policy_brings_its_own_context() -> None:
    engine, prompts = PortableRollout(rollouts.model("llama"), None, rows=2), rollouts.prompts(28)
    engine.sync(rollouts.model("llama", max_position_embeddings=32))
    assert len(engine.generate(prompts, 1, GREEDY)[0][0].token_ids) == 4
    engine.sync(rollouts.model("llama"))
    assert len(engine.generate(prompts, 1, GREEDY)[0][0].token_ids) == GREEDY.max_tokens


def test_what_an_engine_holds_is_its_copy_and_its_largest_cache() -> None:
    policy = rollouts.with_lora(rollouts.model())
    shape = policy.get_base_model().config
    engine, live = (PortableRollout(policy, None, rows=4, copy=copy) for copy in ("bf16", "none"))
    products = sum(m.weight.nbytes for n, m in rollouts.model().named_modules() if n.endswith("_proj"))
    assert engine.holds() == {"weights": products / 2**30, "kv_cache": 0}
    assert live.holds()["weights"] == 0
    engine.generate(rollouts.prompts(12, 5), 2, GREEDY)
    engine.rest()
    row = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 4
    held = engine.holds()["kv_cache"] * 2**30
    assert held % (4 * row) == 0 and held >= 4 * row * (12 + 24)


def test_rest_costs_nothing_but_time() -> None:
    engine, prompts = PortableRollout(rollouts.model("llama"), None, rows=2), rollouts.prompts(6, 9)
    before = engine.generate(prompts, 2, GREEDY)
    engine.rest()
    assert engine.generate(prompts, 2, GREEDY) == before


def test_the_policy_is_left_in_its_mode() -> None:
    policy = rollouts.with_lora(rollouts.model(), lora_dropout=0.5).train()
    prompts = rollouts.prompts(8)
    made = [engine(policy, None, rows=1).generate(prompts, 1, GREEDY) for engine in (PortableRollout, ReferenceRollout)]
    assert policy.training
    same(policy, *made)  # no dropout in either


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_prefills_that_come_again_are_padded_to_few_sizes_and_change_nothing(family: str) -> None:
    policy = rollouts.model(family)
    asked = [rollouts.prompts(70, 66, 3, seed=seed) for seed in range(3)]
    engine = PortableRollout(policy, None, rows=6)
    wanted = [engine.generate(prompts, 2, GREEDY) for prompts in asked]
    decoder = engine._decoder
    assert decoder is not None and not decoder.captures  # graphs are CUDA's: here the padded prefill runs as it is
    decoder.captures = True
    for round in range(2):  # six uses of each size: three as they come, three padded
        assert not decoder._prompts or round
        for prompts, groups in zip(asked, wanted, strict=True):
            same(policy, engine.generate(prompts, 2, GREEDY), groups)
    assert set(decoder._prompts) == {(2, 128), (1, 64)}  # 70 and 66 tokens run together, 3 alone
