"""The Unsloth backend without Unsloth: what it asks for, what it undoes, whose weights are whose, and where a run goes on."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import standin_unsloth
import tiny
import torch
import training

from doctor.facts import Probe, facts_from_json
from doctor.shapes import shape_of
from grpo_portable import engines, fast
from grpo_portable.combinations import check
from grpo_portable.errors import EngineError, EngineUnsupported, PathClosed, RecipeError
from grpo_portable.models import policy
from grpo_portable.plan import planning
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.run.folder import read_lines
from grpo_portable.supervision import ladder
from grpo_portable.supervision.phase import Doing, Phase

WIDE = {"initializer_range": 0.3}  # logits far enough apart that an adapter changes greedy tokens
GREEDY = Sampling(max_tokens=10, temperature=0.0)
PROMPTS = [[10, 20, 30], [40], [7, 8, 9, 10, 11]]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Switches that a test sets are gone after it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> type[standin_unsloth.FastLanguageModel]:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(fast, "_card", lambda: (75.0, 80.0))
    return standin_unsloth.install(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source"), **WIDE)


def recipe_for(source: Path, **changes: Any) -> Recipe:
    made = replace(training.RECIPE, model=str(source), path="bf16-vllm", backend="unsloth", optimizer="adamw")
    return replace(made, **{"max_prompt_tokens": 32, "max_completion_tokens": 16, **changes})


def opened(source: Path, **changes: Any) -> tuple[Any, Any, Recipe]:
    """(policy with an adapter that does something, engine, the trainers' recipe)."""
    recipe = recipe_for(source, **changes)
    shared = fast.load(recipe, rows=8, dtype="float32", fp8=recipe.path.startswith("fp8"))
    model, trainers = shared.adapted(recipe)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model.eval(), fast.engine(shared, model, recipe, rows=8), trainers


# --- what is asked of it


def test_what_unsloth_is_asked_to_load(unsloth: Any, source: Path) -> None:
    recipe = recipe_for(source, path="fp8-vllm", lora_rank=12)
    fast.load(recipe, rows=8, dtype="bfloat16", fp8=True)
    asked = dict(unsloth.asked["load"])
    share, graphs = asked.pop("gpu_memory_utilization"), asked.pop("compilation_config")
    assert asked == {
        "model_name": str(source),
        "use_exact_model_name": True,
        "max_seq_length": 48,
        "dtype": torch.bfloat16,
        "load_in_4bit": False,
        "load_in_fp8": True,
        "fast_inference": True,
        "max_lora_rank": 16,  # the smallest of vLLM's that holds 12
        "use_gradient_checkpointing": False,
        "trust_remote_code": False,
        "max_num_seqs": 8,
    }
    assert 0 < share < 1 and graphs["mode"] == 0


@pytest.mark.parametrize(
    ("changes", "fp8", "asked"),
    [
        ({"path": "bf16-vllm"}, False, False),
        ({"path": "fp8-vllm", "fp8_scales": "row"}, True, True),
        ({"path": "fp8-vllm", "fp8_scales": "block"}, True, "block"),
    ],
)
def test_the_scales_of_fp8_weights(unsloth: Any, source: Path, changes: dict, fp8: bool, asked: Any) -> None:
    fast.load(recipe_for(source, **changes), rows=8, dtype="bfloat16", fp8=fp8)
    assert unsloth.asked["load"]["load_in_fp8"] == asked


def test_its_switches_are_set_before_it_is_imported_and_the_users_are_kept(
    unsloth: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNSLOTH_VLLM_NO_FLASHINFER", "0")
    fast.load(recipe_for(source), rows=8, dtype="float32", fp8=False)
    seen = unsloth.seen
    assert seen["UNSLOTH_ALLOW_CPU"] == "1"  # TRL's trainers stay TRL's
    assert seen["UNSLOTH_DISABLE_STATISTICS"] == "1" and seen["UNSLOTH_VLLM_MERGED_ROLLOUT"] == "0"
    assert seen["UNSLOTH_VLLM_STANDBY"] == "0"  # the card holds both
    assert seen["UNSLOTH_VLLM_NO_FLASHINFER"] == "0"


def test_standby_is_on_where_the_card_does_not_hold_engine_and_update(
    unsloth: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = fast.plan_memory
    monkeypatch.setattr(fast, "plan_memory", lambda *a, **o: replace(plan(*a, **o), sleeps=True))
    model, engine, _ = opened(source)
    assert unsloth.seen["UNSLOTH_VLLM_STANDBY"] == "1" and engine._llm.asleep
    engine.sync(model)
    assert not engine._llm.asleep
    engine.rest()
    assert engine._llm.asleep


def test_a_number_of_rows_that_unsloth_takes_for_none_is_told_apart(unsloth: Any, source: Path) -> None:
    fast.load(recipe_for(source), rows=256, dtype="float32", fp8=False)
    assert unsloth.asked["load"]["max_num_seqs"] == 257


def test_the_adapter_it_is_asked_for(unsloth: Any, source: Path) -> None:
    _, _, trainers = opened(source, lora_alpha=24.0, rslora=True, gradient_checkpointing=True)
    assert unsloth.asked["adapt"] == {
        "r": 4,
        "target_modules": list(fast.TARGETS),
        "lora_alpha": 24.0,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_gradient_checkpointing": True,
        "random_state": 5,
        "use_rslora": True,
    }
    assert trainers.gradient_checkpointing is False  # Unsloth's own is on


# --- one copy of the weights


def test_sampler_and_policy_lie_on_the_same_weights(unsloth: Any, source: Path) -> None:
    model, engine, _ = opened(source)
    theirs = {p.data_ptr() for p in engine._llm.model.parameters()}
    own = {p.data_ptr() for name, p in model.named_parameters() if ".lora_" not in name}
    assert own == theirs
    assert all(p.dtype == torch.float32 for p in policy.trainable(model).values())


def test_rows_are_those_of_the_policy_with_its_newest_adapter(unsloth: Any, source: Path) -> None:
    model, engine, _ = opened(source)
    seen = []
    for _ in range(2):
        engine.sync(model)
        made = engine.generate(PROMPTS, 1, GREEDY)
        wanted = ReferenceRollout(model, tiny.tokenizer(), rows=1).generate(PROMPTS, 1, GREEDY)
        assert [g[0].token_ids for g in made] == [g[0].token_ids for g in wanted]
        seen.append(made)
        with torch.no_grad():
            for parameter in policy.trainable(model).values():
                parameter.mul_(-1.5)
    assert seen[0] != seen[1]
    told = engine.describe()
    assert told["weights_shared"] and "the policy's own" in told["weights"]


def test_left_padding_is_not_attended_to_while_it_trains(unsloth: Any, source: Path) -> None:
    model, _, _ = opened(source)
    ids = torch.tensor([[10, 20, 30, 40]])
    padded = torch.cat([torch.full((1, 9), 5), ids], 1)
    mask = torch.tensor([[0] * 9 + [1] * 4])
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        model.train()
        torch.testing.assert_close(
            model(input_ids=padded, attention_mask=mask).logits[:, 9:], alone, rtol=1e-3, atol=1e-4
        )
        model.get_base_model().model._unsloth_keep_padding_mask = False  # as Unsloth leaves it
        dropped = model(input_ids=padded, attention_mask=mask).logits[:, 9:]
    assert (dropped - alone).abs().max() > 0.1


def test_the_tokenizer_and_the_end_tokens_are_the_models_own(unsloth: Any, source: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig(eos_token_id=[1, 3]).save_pretrained(source)
    shared = fast.load(recipe_for(source), rows=8, dtype="float32", fp8=False)
    assert shared.loaded.tokenizer.padding_side == "left" and shared.loaded.model.generation_config.eos_token_id == [
        1,
        3,
    ]
    assert shared.loaded.name == source.name


def test_training_on_shared_weights(unsloth: Any, source: Path, tmp_path: Path) -> None:
    model, engine, _ = opened(source)
    made = training.make(tmp_path, model=model, adapter=False, engine=engine)
    made.correct_sampler = True
    before = {p.data_ptr(): p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}
    made.train()
    lines = list(read_lines(made.run.metrics_file))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(abs(line["sampler_kl"]) < 0.02 for line in lines)
    base = {p.data_ptr(): p for n, p in model.named_parameters() if ".lora_" not in n}
    assert all(torch.equal(base[at], kept) for at, kept in before.items())  # never merged


# --- where it is refused, and where a run goes on


def test_what_fails_in_it_is_the_engines_error(unsloth: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsloth.fault = RuntimeError("Unsloth: On the fly `load_in_fp8` requires H100 GPUs or after.")
    with pytest.raises(EngineError, match="Unsloth could not start: RuntimeError: Unsloth: On the fly"):
        fast.load(recipe_for(source), rows=8, dtype="float32", fp8=True)
    monkeypatch.setitem(__import__("sys").modules, "unsloth", None)
    with pytest.raises(EngineError, match="Unsloth could not start"):
        fast.load(recipe_for(source), rows=8, dtype="float32", fp8=True)


def test_kinds_of_models_whose_padding_is_not_known_are_refused(unsloth: Any, tmp_path: Path) -> None:
    from transformers import GemmaConfig

    GemmaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(EngineUnsupported, match="models of type gemma"):
        fast.load(recipe_for(tmp_path), rows=8, dtype="float32", fp8=False)


def test_several_processes_are_refused(unsloth: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EngineUnsupported, match="a single process"):
        fast.load(recipe_for(source), rows=8, dtype="float32", fp8=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 0},
        {"dora": True, "path": "auto"},
        {"model": "x/model.gguf"},
        {"model": "embedded"},
        {"fp8_scales": "tensor"},
        {"path": "bf16-hf"},
        {"vllm_server": "http://host:8000"},
    ],
    ids=str,
)
def test_what_it_does_not_go_with_is_told_before_anything_loads(changes: dict) -> None:
    recipe = replace(Recipe(), **{"model": "Qwen/Qwen3-0.6B", "path": "bf16-vllm", "backend": "unsloth", **changes})
    with pytest.raises(RecipeError, match="unsloth"):
        check(recipe, "recipe")


def test_below_it_lies_the_same_path_without_it() -> None:
    top = ladder.Rung("fp8-vllm", 8, 64, "unsloth")
    for kind in ("engine", "import", "killed", "crash", "hang"):
        step = ladder.next_step(top, ladder.Ending(kind, Doing(), "it failed"), ("fp8-vllm", "bf16-vllm", "bf16-hf"), 0)
        assert step.rung == ladder.Rung("fp8-vllm", 8, 64) and "unsloth" in step.reason
    less = ladder.next_step(top, ladder.Ending("oom", Doing(Phase.UPDATE), "oom"), ("fp8-vllm",), 0)
    assert less.rung == ladder.Rung("fp8-vllm", 4, 64, "unsloth")


def test_paths_with_and_without_it() -> None:
    shared = engines.path_settings("fp8-vllm", bfloat16=True, backend="unsloth")
    assert (shared.engine, shared.copy, shared.backend) == ("vllm", "fp8", "unsloth")
    assert engines.path_settings("fp8-vllm", bfloat16=True) == replace(shared, backend="plain")
    assert shared.samples_from_other_weights  # other kernels all the same


# --- on which machine


def machine(**packages: str) -> Any:
    """The facts of an H100 with the set that is known to fit together, packages changed."""
    saved = json.loads((Path(__file__).parents[1] / "doctor" / "machines" / "ref-h100-complete.json").read_text())[
        "facts"
    ]
    fitting = {"trl": "1.15.0", "unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9"}
    saved["packages"] |= fitting | packages
    return facts_from_json(saved)


def planned(facts: Any, *, auto: bool = True, asked: tuple[int, ...] | None = None, **changes: Any) -> Any:
    wanted = {"model": "Qwen/Qwen3-4B", "data": "openai/gsm8k", "backend": "unsloth", **changes}
    return planning.plan(replace(Recipe(), **wanted), facts, auto=auto, asked=asked)[0]


def test_it_runs_where_its_locks_hold() -> None:
    settled = planned(machine())
    assert (settled.recipe.path, settled.recipe.backend) == ("fp8-vllm", "unsloth")
    assert any("shared between vLLM and the trainer by Unsloth" in reason.text for reason in settled.reasons)
    assert planned(machine(), backend="auto").recipe.backend == "plain"  # never by itself


@pytest.mark.parametrize(
    ("packages", "changes", "why"),
    [
        ({"unsloth": "absent", "unsloth_zoo": "absent"}, {}, "unsloth is not installed"),
        ({"trl": "1.16.0"}, {}, "exclude each other"),
        ({"unsloth_zoo": "absent"}, {}, "without unsloth_zoo"),
        ({}, {"path": "bf16-hf", "backend": "auto"}, None),
    ],
    ids=str,
)
def test_where_they_do_not_hold_auto_goes_on_without_and_says_so(
    packages: dict, changes: dict, why: str | None
) -> None:
    settled = planned(machine(**packages), **changes)
    assert settled.recipe.backend == "plain"
    assert why is None or any(why in reason.text for reason in settled.reasons)
    if why is not None:
        with pytest.raises(PathClosed, match=why):
            planned(machine(**packages), auto=False, path="fp8-vllm", **changes)


def test_memory_is_planned_for_one_copy_where_it_runs_and_for_two_where_it_does_not() -> None:
    """Qwen3-4B's linear weights (3.63 G) and the rest in 16 bit: once in FP8, or 16-bit ones beside an FP8 copy."""
    shared, apart = planned(machine()).ledger, planned(machine(trl="1.16.0")).ledger
    assert shared.setting.base == "fp8" and "engine_copy" not in shared.ledger
    assert apart.setting.base == "bf16" and apart.ledger["engine_copy"] == pytest.approx(shared.ledger["weights"])
    assert apart.ledger["weights"] / shared.ledger["weights"] == pytest.approx(1.82, abs=0.02)  # 8.04 against 4.41 GB


def test_of_two_gpus_one_trains() -> None:
    facts = machine()
    twice = replace(facts, gpus=(*facts.gpus, replace(facts.gpus[0], index=1)))
    settled = planned(twice, asked=(0, 1))
    assert settled.recipe.backend == "unsloth"
    assert planning.on_gpus(settled.recipe, twice, (0, 1)).plan.gpus == (0,)


def test_an_import_that_failed_is_told_in_its_words() -> None:
    facts = machine()
    failed = replace(facts, probes={**facts.probes, "unsloth_import": Probe(False, "ImportError: torchao")})
    assert any("ImportError: torchao" in reason.text for reason in planned(failed).reasons)


# --- memory


def plan(free: float, total: float, **changes: Any) -> Any:
    settings = {
        "model": "Qwen/Qwen3-8B",
        "path": "fp8-vllm",
        "micro_batch": 1,
        "optimizer": "adamw_8bit",
        "group_size": 8,
    }
    settings |= {"gradient_checkpointing": True, "max_prompt_tokens": 512, "max_completion_tokens": 512, **changes}
    recipe = replace(Recipe(), **settings)
    return fast.plan_memory(recipe, shape_of(recipe.model), 8, fp8=True, free_gib=free, total_gib=total)


def test_the_weights_count_once_and_unsloth_finds_room_for_the_context() -> None:
    """Qwen3-8B (8.19 G weights, of them 1.24 G in embedding and head; 36 layers, 8 KV heads of 128), rank 32, on 24 GiB.

    FP8 weights 8.79 GiB, workspace 2.4, KV of 8 rows of 528 tokens and a prompt of 528: 0.65. Unsloth counts 15.26 of weights,
    0.16 of slots, 1 of graphs, 0.65 / 0.95 of KV: 17.11, which is 5.27 more, and more than an update leaves beside it.
    """
    made = plan(23.0, 24.0)
    assert made.gib["engine_copy"] == pytest.approx(8.79, abs=0.03)
    assert made.gib["kv_cache"] == pytest.approx(0.65 + 5.27, abs=0.05)
    assert made.share * 24 == pytest.approx(17.11, abs=0.05)


def test_what_unsloth_counts_too_much_is_given_back_where_the_update_needs_it() -> None:
    roomy, tight = plan(75.0, 80.0), plan(19.5, 24.0)
    assert not roomy.sleeps and roomy.share * 80 == pytest.approx(17.11, abs=0.05)
    assert tight.sleeps and "Unsloth takes 17.1 GiB for its engine" in tight.reason


def test_a_context_that_was_cut_short_is_no_engine(unsloth: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = unsloth.from_pretrained

    def short(*arguments: Any, **options: Any) -> Any:
        model, tokenizer = load(*arguments, **options)
        model.vllm_engine.llm_engine.vllm_config.model_config = types.SimpleNamespace(max_model_len=47)
        return model, tokenizer

    monkeypatch.setattr(unsloth, "from_pretrained", short)
    with pytest.raises(EngineError, match="a context of 47 tokens, and prompt and answer may take 48"):
        fast.load(recipe_for(source), rows=8, dtype="float32", fp8=False)
