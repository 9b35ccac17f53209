"""The vLLM engine without vLLM: what it hands over, what it asks for, when it sleeps, and what it makes of every failure."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import standin_vllm
import tiny
import torch
import training
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor import prove
from doctor.memory import Setting
from doctor.shapes import shape_of
from doctor.trials import vllm as trial
from grpo_portable.combinations import check, on_path
from grpo_portable.errors import EngineError, EngineUnsupported, RecipeError
from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import available, delta, scratch, vllm, vllm_adapter, vllm_settings
from grpo_portable.rollout.protocol import Resting, Sampling, Ticking
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.run.folder import read_lines
from grpo_portable.supervision import failure
from grpo_portable.supervision.phase import Doing, Phase

GREEDY = Sampling(max_tokens=12, temperature=0.0)
PROMPTS = [[10, 20, 30], [40], [7, 8, 9, 10, 11]]
WIDE = {"initializer_range": 0.3}  # logits far enough apart that an adapter changes greedy tokens


def with_lora(size: float = 0.2, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    wanted = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    policy = get_peft_model(tiny.model(**WIDE), LoraConfig(**wanted))
    disturb(policy, size)
    return policy.eval()


def disturb(policy: Any, size: float, seed: int = 3) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * size)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[standin_vllm.LLM]:
    monkeypatch.setattr(vllm, "_card", lambda: (60.0, 80.0))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return standin_vllm.install(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source"), **WIDE)


def open_engine(policy: Any, source: Path, *, sleep: bool | None = None, copy: str = "auto", **changes: Any) -> Any:
    recipe = replace(training.RECIPE, model=str(source), path="bf16-vllm", max_prompt_tokens=32, **changes)
    recipe = replace(recipe, max_completion_tokens=max(recipe.max_completion_tokens, 16))
    return vllm.make(policy, tiny.tokenizer(), recipe, rows=8, copy=copy, dtype="float32", sleep=sleep)


def reference(policy: Any, prompts: Any = PROMPTS, sampling: Sampling = GREEDY) -> Any:
    return ReferenceRollout(policy, tiny.tokenizer(), rows=1).generate(prompts, 1, sampling)


def same_rows(made: Any, wanted: Any) -> None:
    assert [c.token_ids for g in made for c in g] == [c.token_ids for g in wanted for c in g]
    assert [c.finish_reason for g in made for c in g] == [c.finish_reason for g in wanted for c in g]
    for ours, theirs in zip((c for g in made for c in g), (c for g in wanted for c in g), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


# --- the adapter


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"lora_alpha": 3, "r": 16},
        {"target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5, "up_proj": 1}},
    ],
    ids=str,
)
def test_the_folder_holds_the_exact_delta_with_scale_one(tmp_path: Path, settings: dict) -> None:
    from safetensors.torch import load_file

    policy = with_lora(**settings)
    given = vllm_adapter.adapter(policy, torch.float32)
    folder = vllm_adapter.write(given, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 1 and not config["use_rslora"] and not config["use_dora"]
    tensors = load_file(folder / "adapter_model.safetensors")
    policy.save_pretrained(tmp_path / "peft")
    assert set(tensors) == set(load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    adapted = {path: m for path, m in policy.get_base_model().named_modules() if delta.adapters_of(m)}
    assert adapted and given.layout.modules == tuple(sorted({path.rpartition(".")[2] for path in adapted}))
    for path, module in adapted.items():
        first, second = (tensors[f"base_model.model.{path}.lora_{x}.weight"] for x in "AB")
        wanted = delta.effective_weight(module) - delta.dequantised(delta.base_of(module))
        torch.testing.assert_close(second @ first, wanted, rtol=1e-4, atol=1e-5)


def test_several_active_adapters_are_put_side_by_side() -> None:
    from peft import LoraConfig

    policy = with_lora()
    policy.add_adapter("second", LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"]))
    policy.base_model.set_adapter(["default", "second"])
    disturb(policy, 0.1)
    given = vllm_adapter.adapter(policy, torch.float32)
    assert given.layout.rank == 6
    path = "model.layers.0.self_attn.q_proj"
    first, second = (given.tensors[f"base_model.model.{path}.lora_{x}.weight"] for x in "AB")
    module = policy.get_base_model().get_submodule(path)
    wanted = delta.effective_weight(module) - delta.dequantised(delta.base_of(module))
    torch.testing.assert_close(second @ first, wanted, rtol=1e-4, atol=1e-5)


def test_an_exported_base_is_the_policys_base(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for tied in (True, False):
        policy = with_lora() if tied else tiny.model(tie_word_embeddings=False)
        folder = vllm_adapter.export(policy, tiny.tokenizer(), tmp_path / str(tied), torch.float32)
        read = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.tensor([PROMPTS[2]])
        with torch.no_grad():
            base = policy.get_base_model() if tied else policy
            with policy.disable_adapter() if tied else torch.no_grad():
                assert torch.equal(read(ids).logits, base(ids).logits)
        assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"


def refused() -> list[tuple[str, Callable[[], Any], bool, str | None]]:
    from peft import LoraConfig, get_peft_model

    def lora(**settings: Any) -> Any:
        return get_peft_model(tiny.model(), LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **settings}))

    return [
        ("lora", lora, True, None),
        ("rslora", lambda: lora(use_rslora=True), True, None),
        ("frozen", lambda: tiny.model().requires_grad_(False), True, None),
        ("all weights in 16 bit", tiny.model, False, None),
        ("all weights in fp8", tiny.model, True, "quantised anew"),
        ("dora", lambda: lora(use_dora=True), False, "not DoRA"),
        ("bias", lambda: lora(lora_bias=True), False, "bias"),
        ("saved beside", lambda: lora(modules_to_save=["lm_head"]), False, "trained beside"),
        ("rank", lambda: lora(r=513), False, "up to rank 512"),
    ]


@pytest.mark.parametrize(("name", "policy", "fp8", "words"), refused(), ids=lambda v: v if isinstance(v, str) else "")
def test_what_vllm_cannot_serve_is_refused_with_the_reason(
    name: str, policy: Any, fp8: bool, words: str | None
) -> None:
    told = vllm_adapter.refusal(policy(), fp8=fp8)
    assert (told is None) == (words is None) and (words is None or words in str(told))


def test_a_refused_policy_starts_no_engine(llm: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineUnsupported, match="not DoRA"):
        open_engine(with_lora(use_dora=True), source)
    assert llm.calls == []


def test_of_several_processes_each_starts_a_vllm_that_finds_its_card_as_it_was_launched(
    llm: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "distributed_executor_backend" not in open_engine(with_lora(), source).arguments
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert open_engine(with_lora(), source).arguments["distributed_executor_backend"] == "external_launcher"


@pytest.mark.parametrize(
    ("changes", "closed", "open_"),
    [
        ({}, (), ("fp8-vllm", "bf16-vllm", "fp16-vllm")),
        ({"dora": True}, ("fp8-vllm", "bf16-vllm", "fp16-vllm"), ("bf16-hf",)),
        ({"lora_rank": 513}, ("fp8-vllm", "bf16-vllm", "fp16-vllm"), ("cpu",)),
        ({"lora_rank": 0}, ("fp8-vllm",), ("bf16-vllm", "fp16-vllm", "bf16-hf")),
    ],
)
def test_a_recipe_vllm_cannot_serve_is_planned_elsewhere(
    monkeypatch: pytest.MonkeyPatch, changes: dict, closed: tuple, open_: tuple
) -> None:
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: object())
    recipe = replace(Recipe(), **changes)
    assert available.unavailable(recipe) == {}
    assert all(on_path(recipe, path) for path in closed) and not any(on_path(recipe, path) for path in open_)
    for path in closed:
        with pytest.raises(RecipeError, match=path):
            check(replace(recipe, path=path), "here")
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    assert available.unavailable(recipe)["bf16-vllm"] == "vLLM is not installed"


# --- rollouts


def test_greedy_rows_are_those_of_the_adapted_policy(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    made = engine.generate(PROMPTS, 3, GREEDY)
    assert all(len(group) == 3 and len(set(group)) == 1 for group in made)
    same_rows([group[:1] for group in made], reference(policy))


@pytest.mark.parametrize("sleep", [True, False], ids=["sleeping", "awake"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_an_update_changes_the_very_next_rollout(llm: Any, source: Path, settings: dict, sleep: bool) -> None:
    policy = with_lora(**settings)
    engine = open_engine(policy, source, sleep=sleep)
    before = reference(policy)
    engine.sync(policy)
    same_rows(engine.generate(PROMPTS, 1, GREEDY), before)
    for seed in (11, 12, 13):
        engine.rest()
        disturb(policy, 0.1, seed)
        engine.sync(policy)
        after = reference(policy)
        assert [c.token_ids for g in after for c in g] != [c.token_ids for g in before for c in g]
        same_rows(engine.generate(PROMPTS, 1, GREEDY), after)
        before = after


def test_without_sync_the_engine_keeps_what_it_was_given(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    before = engine.generate(PROMPTS, 1, GREEDY)
    disturb(policy, 0.2, 21)
    same_rows(engine.generate(PROMPTS, 1, GREEDY), before)


def test_all_weights_are_handed_over_when_all_are_trained(llm: Any, source: Path) -> None:
    policy = tiny.model(**WIDE)
    engine = open_engine(policy, source, lora_rank=0)
    engine.sync(policy)
    same_rows(engine.generate(PROMPTS, 1, GREEDY), reference(policy))
    disturb(policy, 0.05, 8)
    engine.sync(policy)
    same_rows(engine.generate(PROMPTS, 1, GREEDY), reference(policy))
    assert "add_lora" not in llm.calls and "enable_lora" not in llm.made[0].arguments


def test_a_frozen_policy_needs_nothing_handed_over(llm: Any, source: Path) -> None:
    policy = tiny.model(**WIDE).requires_grad_(False)
    engine = open_engine(policy, source)
    engine.sync(policy)
    same_rows(engine.generate(PROMPTS, 1, GREEDY), reference(policy))
    assert llm.calls == ["LLM", "generate"] and not llm.made[0].arguments["enable_sleep_mode"]


def test_a_gguf_file_is_written_out_and_taken_away_again(llm: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    policy = with_lora()
    engine = open_engine(policy, file)
    engine.sync(policy)
    same_rows(engine.generate(PROMPTS, 1, GREEDY), reference(policy))
    assert not Path(llm.made[0].arguments["model"]).exists()


@pytest.mark.parametrize("by_request", [True, False])
def test_seeds_repeat_and_rows_differ(llm: Any, source: Path, by_request: bool) -> None:
    llm.seeds_by_request = by_request
    policy = with_lora(0.0)
    engine = open_engine(policy, source)
    engine.sync(policy)
    drawn = [engine.generate([PROMPTS[0]] * 2, 4, Sampling(max_tokens=12, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({c.token_ids for group in drawn[0] for c in group}) == 8  # equal prompts do not repeat one another
    unseeded = [engine.generate([PROMPTS[0]], 4, Sampling(max_tokens=12)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("by_request", [True, False])
def test_with_a_seed_a_prompt_what_else_a_call_holds_changes_nothing(llm: Any, source: Path, by_request: bool) -> None:
    llm.seeds_by_request = by_request
    policy = with_lora(0.0)
    engine = open_engine(policy, source)
    engine.sync(policy)
    whole = engine.generate(PROMPTS, 2, Sampling(max_tokens=12, seeds=tuple(range(len(PROMPTS)))))
    alone = [
        engine.generate([prompt], 2, Sampling(max_tokens=12, seeds=(seed,)))[0] for seed, prompt in enumerate(PROMPTS)
    ]
    assert [[c.token_ids for c in group] for group in whole] == [[c.token_ids for c in group] for group in alone]


def test_the_process_generators_are_not_disturbed(llm: Any, source: Path) -> None:
    policy = with_lora()
    state = random.getstate(), numpy.random.get_state()[1].tolist(), torch.random.get_rng_state()
    precision = torch.get_float32_matmul_precision()
    engine = open_engine(policy, source)
    engine.sync(policy)
    engine.generate(PROMPTS, 2, Sampling(max_tokens=4, seed=5))
    assert random.getstate() == state[0] and numpy.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.random.get_rng_state(), state[2]) and torch.get_float32_matmul_precision() == precision


def test_stop_ids_and_strings_end_rows_as_everywhere(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    tokens = reference(policy)[0][0].token_ids
    by_id = replace(GREEDY, stop_ids=(tokens[3],))
    same_rows(engine.generate(PROMPTS, 1, by_id), reference(policy, sampling=by_id))
    assert engine.generate(PROMPTS[:1], 1, by_id)[0][0].token_ids[-1] == tokens[3]
    text = tiny.tokenizer().decode(tokens[2:4])
    by_text = replace(GREEDY, stop_strings=(text,))
    same_rows(engine.generate(PROMPTS, 1, by_text), reference(policy, sampling=by_text))


def test_a_token_drawn_past_a_stop_string_is_cut(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    (wanted,) = reference(policy, PROMPTS[:1])
    text = tiny.tokenizer().decode(wanted[0].token_ids[4:6])

    def late(row: standin_vllm.Row) -> standin_vllm.Row:
        tokens, logprobs = list(wanted[0].token_ids), list(wanted[0].logprobs)
        return standin_vllm.Row(tokens[:8], standin_vllm.Flat(logprobs[:8]), "stop")

    llm.edit = late
    (made,) = engine.generate(PROMPTS[:1], 1, replace(GREEDY, stop_strings=(text,)))
    end = next(i for i in range(1, 9) if text in tiny.tokenizer().decode(wanted[0].token_ids[:i]))
    assert made[0].token_ids == wanted[0].token_ids[:end] and len(made[0].logprobs) == end


def test_rows_end_where_the_context_does(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    assert engine.context == 48
    (group,) = engine.generate([[5] * 40], 1, replace(GREEDY, max_tokens=30))
    assert len(group[0].token_ids) == 8 and group[0].finish_reason == "length"
    assert engine.generate([], 2, GREEDY) == []


# --- sleep


def test_it_sleeps_between_rollouts_and_wakes_for_both_sync_and_generate(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source, sleep=True)
    assert isinstance(engine, Resting)
    engine.sync(policy)
    engine.generate(PROMPTS, 1, GREEDY)
    engine.rest()
    engine.rest()
    engine.generate(PROMPTS, 1, GREEDY)
    engine.rest()
    wanted = ["LLM", "sleep", "wake_up", "add_lora", "generate", "sleep", "wake_up", "generate", "sleep"]
    assert llm.calls == wanted


def test_an_engine_that_fits_beside_the_update_never_sleeps(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    assert not engine.memory.sleeps and engine.memory.reason == "the card holds engine and update at once"
    engine.sync(policy)
    engine.rest()
    engine.generate(PROMPTS, 1, GREEDY)
    assert llm.calls == ["LLM", "add_lora", "generate"]
    told = engine.describe()
    assert told["sleeps"] is False and told["weights"] == "float32" and told["lora_rank"] == 8


def test_what_it_holds_is_counted_in_the_engine_while_it_is_awake(llm: Any, source: Path) -> None:
    engine = open_engine(with_lora(), source)
    count = sum(p.nbytes for p in tiny.model(**WIDE).parameters())
    assert engine.holds() == {"weights": count / 2**30, "kv_cache": engine.memory.kv_bytes / 2**30}
    asleep = open_engine(with_lora(), source, sleep=True)
    assert asleep.holds()["weights"] is None
    llm.faults["apply_model"] = RuntimeError("no")
    assert open_engine(with_lora(), source).holds()["weights"] is None


def test_closing_shuts_down_only_an_engine_that_is_awake(llm: Any, source: Path) -> None:
    for asleep in (False, True):
        llm.calls.clear()
        engine = open_engine(with_lora(), source, sleep=asleep)
        engine.close()
        engine.close()
        assert ("shutdown" in llm.calls) == (not asleep)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(PROMPTS, 1, GREEDY)


def test_no_adapter_folder_outlives_the_engine(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    first = engine._folder.path
    engine.sync(policy)
    second = engine._folder.path
    assert not first.exists() and second.exists() and second.stat().st_mode & 0o077 == 0
    engine.close()
    assert not second.exists()


# --- failures


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("LLM", RuntimeError("first line\nEngine core initialization failed")),
        ("LLM", AttributeError("'LRUCacheWorkerLoRAManager' object has no attribute 'get_dummy_lora_warmup_rank'")),
        ("LLM", ImportError("libcudart.so.13: cannot open shared object file")),
        ("LLM", AssertionError()),
        ("LLM", SystemExit(1)),
        ("add_lora", ValueError("expected target modules")),
        ("generate", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        ("generate", RuntimeError("CUDA error: an illegal memory access was encountered")),
        ("wake_up", RuntimeError("CUDA Error: invalid argument")),
        ("sleep", AssertionError("Memory usage increased after sleeping.")),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v).splitlines()[-1][:30] if str(v) else type(v).__name__,
)
def test_whatever_vllm_raises_is_an_engines_error_with_its_last_line(
    llm: Any, source: Path, call: str, error: BaseException
) -> None:
    llm.faults[call] = error
    policy = with_lora()
    with pytest.raises(EngineError) as caught:
        engine = open_engine(policy, source, sleep=True)
        engine.sync(policy)
        engine.generate(PROMPTS, 1, GREEDY)
        engine.rest()
    lines = str(error).splitlines()
    assert type(error).__name__ in caught.value.fact and (not lines or lines[-1] in caught.value.fact)
    assert caught.value.__cause__ is error
    assert failure.kind_of(caught.value) == ("oom" if "out of memory" in str(error) else "engine")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda row: replace(row, finish_reason="abort"), "abort"),
        (lambda row: replace(row, logprobs=standin_vllm.Flat([math.nan] * len(row.token_ids))), "not numbers"),
        (lambda row: replace(row, logprobs=standin_vllm.Flat([])), "missing"),
    ],
)
def test_a_row_that_is_not_whole_is_an_error(llm: Any, source: Path, edit: Any, words: str) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    llm.edit = edit
    with pytest.raises(EngineError, match=words):
        engine.generate(PROMPTS, 1, GREEDY)


def test_a_stop_in_the_middle_of_a_rollout_leaves_no_half_used_engine(llm: Any, source: Path) -> None:
    policy = with_lora()
    engine = open_engine(policy, source)
    engine.sync(policy)
    llm.faults["generate"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 1, GREEDY)
    llm.faults.clear()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(PROMPTS, 1, GREEDY)
    engine.close()


def test_closing_never_raises(llm: Any, source: Path) -> None:
    engine = open_engine(with_lora(), source)
    llm.faults["shutdown"] = RuntimeError("CUDA error")
    engine.close()


HANGING = """
import sys, time
from pathlib import Path
from dataclasses import replace
from grpo_portable import engines
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import vllm
from grpo_portable.run.folder import RunFolder
vllm.make = lambda *a, **k: time.sleep(60)
folder = RunFolder(Path(sys.argv[1]))
engines.open_engine(engines.path_settings("bf16-vllm", bfloat16=True), None, None,
                    replace(Recipe(), rollout_rows=8), run=folder, limit_s=0.5)
"""


def test_a_start_that_hangs_ends_the_process_as_an_engines_error(tmp_path: Path) -> None:
    from grpo_portable.supervision.ladder import EXIT, classify

    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == EXIT["engine"] and time.monotonic() - began < 100, ended.stderr
    told = json.loads((tmp_path / "failure.json").read_text())
    assert told["kind"] == "engine" and "did not start within" in told["fact"] and "<lambda>" in told["fact"]
    assert "most recent call first" in ended.stderr  # every thread's stack is in the log
    assert classify(ended.returncode, told, ended.stderr, Doing()).doing.phase is Phase.ENGINE


def test_a_broken_vllm_takes_down_no_other_path(tmp_path: Path) -> None:
    """TRL imports vLLM with its trainer wherever it is installed; ours must start beside one that cannot be imported."""
    package, told = tmp_path / "vllm", tmp_path / "vllm-0.24.0.dist-info"
    package.mkdir()
    told.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    (told / "top_level.txt").write_text("vllm\n")
    code = "import importlib.util, grpo_portable.training.trainer; assert importlib.util.find_spec('vllm')"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


# --- training with it


def test_training_learns_from_what_it_samples(llm: Any, source: Path, tmp_path: Path) -> None:
    """Sampler and trainer agree at every step, across updates and naps: the engine always held the newest adapter."""
    made = training.make(tmp_path, model=tiny.model(**WIDE), learning_rate=0.05)
    made.engine = open_engine(made.model, source, sleep=True)
    made.correct_sampler = True
    made.train()
    lines = list(read_lines(made.run.metrics_file))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(abs(line["sampler_kl"]) < 1e-3 and line["ratio_cut"] == 0 for line in lines)
    assert llm.calls.count("add_lora") == 4 and llm.calls[-1] == "sleep"


def test_training_stops_when_the_engine_samples_from_something_else(llm: Any, source: Path, tmp_path: Path) -> None:
    made = training.make(tmp_path, model=tiny.model(**WIDE), prompts_per_step=6, max_completion_tokens=24)
    made.engine = open_engine(made.model, source)
    made.correct_sampler = True
    other = llm.made[-1].model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    with pytest.raises(EngineError, match="no longer samples from the policy"):
        made.train()


# --- settings


SHAPE = shape_of("Qwen/Qwen3-4B")
SETTING = Setting(
    base="bf16", engine="vllm", micro_batch=8, rollout_rows=64, prompt_tokens=512, completion_tokens=512, lora_rank=32
)


def memory(**changes: Any) -> vllm_settings.Memory:
    wanted: dict[str, Any] = {"group": 8, "trains": True, "free_gib": 120.0, "total_gib": 140.0, **changes}
    setting = replace(SETTING, **{k: wanted.pop(k) for k in list(wanted) if hasattr(SETTING, k)})
    return vllm_settings.plan_memory(SHAPE, setting, **wanted)


def test_memory_by_hand() -> None:
    # Qwen3-4B keeps 2 * 36 layers * 8 heads * 128 numbers a token; 64 rows of 512 + 16 tokens, 8 prompts of 512 + 16
    kv = 2 * 73728 * (64 * 528 + 8 * 528) / 2**30
    told = memory()
    assert told.gib["kv_cache"] == pytest.approx(kv) and told.kv_bytes == int(kv * 2**30)
    assert told.gib["engine_copy"] == pytest.approx(4.022e9 * 2 / 2**30, rel=0.01)
    assert not told.sleeps and told.share == pytest.approx(sum(told.gib.values()) / 140, abs=1e-3)
    assert memory(copy="fp8").gib["engine_copy"] < 0.7 * told.gib["engine_copy"]


def test_it_sleeps_where_engine_and_update_do_not_fit_together() -> None:
    ample, tight = memory(), memory(free_gib=19.0, total_gib=24.0)
    assert (ample.sleeps, tight.sleeps) == (False, True) and "at once" in tight.reason
    assert memory(sleep=True).sleeps and not memory(free_gib=40.0, total_gib=48.0, sleep=False).sleeps
    assert not memory(trains=False).sleeps
    with pytest.raises(EngineError, match="no room for a KV cache"):
        memory(free_gib=11.0, total_gib=16.0)


@settings(deadline=None)
@given(
    free=st.floats(14, 180),
    rows=st.integers(1, 2048),
    micro_batch=st.integers(1, 64),
    sleep=st.sampled_from([None, True]),
)
def test_what_is_planned_fits(free: float, rows: int, micro_batch: int, sleep: bool | None) -> None:
    try:
        told = memory(free_gib=free, total_gib=190.0, rollout_rows=rows, micro_batch=micro_batch, sleep=sleep)
    except EngineError:
        return
    assert 0 < sum(told.gib.values()) <= free and 0 < told.share <= 0.9 * free / 190 + 1e-4
    assert told.kv_bytes is not None and told.kv_bytes > 0


def test_an_unknown_shape_shares_the_card() -> None:
    told = vllm_settings.plan_memory(None, SETTING, group=8, trains=True, free_gib=40, total_gib=80)
    assert told.kv_bytes is None and told.share == 0.25 and told.sleeps


@settings(deadline=None)
@given(rows=st.integers(1, 4096))
def test_graphs_cover_every_batch_with_little_padding(rows: int) -> None:
    sizes = vllm_settings.capture_sizes(rows)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == rows
    assert len(sizes) <= 8 + 4 * max(1, math.ceil(math.log2(rows)))
    assert all(b - a <= max(8, a / 4) for a, b in itertools.pairwise(sizes))


def compressed(kind: str, bits: int) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": kind, "num_bits": bits}}}}


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        (compressed("float", 8), "fp8"),
        (compressed("int", 4), "compressed-tensors"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_a_checkpoints_own_format_is_read(told: Any, kind: str | None) -> None:
    assert vllm_settings.ready_format(told) == kind


def test_number_formats() -> None:
    assert vllm_settings.quantization(None, fp8=False, scales="row") is None
    assert vllm_settings.quantization("fp8", fp8=True, scales="row") is None
    wanted = {"row": "fp8_per_channel", "block": "fp8_per_block", "tensor": "fp8_per_tensor"}
    assert {s: vllm_settings.quantization(None, fp8=True, scales=s) for s in wanted} == wanted
    with pytest.raises(EngineUnsupported, match="awq"):
        vllm_settings.quantization("awq", fp8=True, scales="row")
    words = [vllm_settings.precision(None, fp8=True, scales=s, dtype="bfloat16") for s in wanted]
    assert words == ["FP8, one scale an output row", "FP8, one scale a 128x128 block", "FP8, one scale a tensor"]
    assert vllm_settings.precision("fp8", fp8=True, scales="row", dtype="x") == "FP8, as the checkpoint has them"


def test_fp8_is_asked_for_and_told(llm: Any, source: Path) -> None:
    engine = open_engine(with_lora(), source, copy="fp8", fp8_scales="tensor")
    assert llm.made[0].arguments["quantization"] == "fp8_per_tensor"
    assert engine.describe()["weights"] == "FP8, one scale a tensor"


def test_blocks_that_do_not_fit_are_refused_before_vllm_starts(llm: Any, source: Path) -> None:
    with pytest.raises(EngineUnsupported, match="multiples of 128"):
        open_engine(with_lora(), source, copy="fp8", fp8_scales="block")
    assert not llm.made


@pytest.mark.parametrize(
    "name, refused",
    [("HuggingFaceTB/SmolLM2-135M-Instruct", "hidden size is 576"), ("Qwen/Qwen3-4B", None), ("Qwen/Qwen3-0.6B", None)],
)
def test_which_models_fit_blocks(name: str, refused: str | None) -> None:
    shape = shape_of(name)
    assert shape is not None
    told = vllm_settings.block_refusal(shape)
    assert told is None if refused is None else told is not None and refused in told


def in_fp8(folder: Path, block: int = 16) -> dict[str, torch.Tensor]:
    """Store the model in `folder` in FP8 with a scale a block; returns the weights that it now stands for."""
    from safetensors.torch import load_file, save_file

    file, stored, meant = folder / "model.safetensors", {}, {}
    for name, weight in load_file(file).items():
        stored[name] = meant[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = (size // block for size in weight.shape)
            blocks = weight.view(rows, block, columns, block)
            scale = blocks.abs().amax((1, 3)) / 448
            packed = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            meant[name] = (packed.float() * scale[:, None, :, None]).view_as(weight)
            stored[name], stored[f"{name}_scale_inv"] = packed.view_as(weight), scale
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return meant


def test_a_checkpoint_in_fp8_goes_to_vllm_as_it_is_and_is_trained_on_in_16_bit(llm: Any, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", **WIDE)
    meant = in_fp8(folder)
    loaded = policy.load(str(folder), dtype="float32")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    for name, weight in meant.items():
        torch.testing.assert_close(loaded.model.state_dict()[name], weight)
    adapted = policy.add_adapter(loaded.model, training.RECIPE)
    for copy in ("fp8", "auto"):
        engine = open_engine(adapted, folder, copy=copy)
        assert llm.made[-1].arguments["quantization"] is None and llm.made[-1].arguments["model"] == str(folder)
        assert engine.describe()["weights"] == "FP8, as the checkpoint has them"
    half = policy.load(str(folder), dtype="bfloat16", quantization="nf4")
    assert policy.is_quantised(half.model)


def test_ranks() -> None:
    assert [vllm_settings.served_rank(r) for r in (1, 2, 8, 9, 64, 65, 400)] == [1, 8, 8, 16, 64, 128, 512]
    with pytest.raises(EngineUnsupported):
        vllm_settings.served_rank(513)


def test_graph_settings() -> None:
    full = vllm_settings.graph_arguments("full", 16)["compilation_config"]
    assert (full["mode"], full["cudagraph_mode"], full["cudagraph_capture_sizes"]) == (
        0,
        "FULL_DECODE_ONLY",
        [1, 2, 4, 8, 16],
    )
    assert "mode" not in vllm_settings.graph_arguments("compiled", 16)["compilation_config"]
    assert vllm_settings.graph_arguments("eager", 16) == {"enforce_eager": True}
    with pytest.raises(EngineUnsupported):
        vllm_settings.graph_arguments("fast", 16)


def test_every_argument_is_one_of_vllms() -> None:
    pytest.importorskip("vllm")
    import inspect

    from vllm import LLM, EngineArgs, SamplingParams

    known = set(inspect.signature(EngineArgs).parameters) | set(inspect.signature(LLM.__init__).parameters)
    for graphs in vllm_settings.GRAPHS:
        arguments = vllm_settings.llm_arguments(
            model="m",
            dtype="bfloat16",
            quantization=None,
            rows=8,
            context=64,
            memory=memory(),
            layout=vllm_settings.Layout(8, ("q_proj",)),
            graphs=graphs,
            seed=1,
        )
        assert set(arguments) <= known
    assert standin_vllm.parameter_names() <= set(inspect.signature(SamplingParams).parameters)


def test_the_doctors_proof_starts_vllm_as_training_does() -> None:
    ours = vllm_settings.llm_arguments(
        model="m",
        dtype="bfloat16",
        quantization=vllm_settings.quantization(None, fp8=True, scales=Recipe().fp8_scales),
        rows=8,
        context=256,
        memory=memory(),
        layout=vllm_settings.Layout(16, ("q_proj", "v_proj")),
        graphs="full",
        seed=0,
    )
    step = next(step for step in prove.steps("fp8-vllm", "bfloat16") if step.probe == "vllm_fp8_start")
    tried = trial.arguments("m", step.args[0], step.args[1], 0.1)
    assert set(tried) - {"load_format"} == set(ours)
    sizes = {"gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens"}
    assert {k: v for k, v in tried.items() if k in ours and k not in sizes} == {
        k: v for k, v in ours.items() if k not in sizes
    }
    assert trial._ENVIRONMENT.items() <= vllm.ENVIRONMENT.items()


def test_every_step_of_the_engine_is_a_sign_of_life(llm: Any, source: Path) -> None:
    engine = open_engine(with_lora(), source)
    steps, ticks = llm.made[-1].llm_engine.step, []
    assert isinstance(engine, Ticking)
    engine.tick = lambda: ticks.append(1)
    engine.generate(PROMPTS, 4, GREEDY)
    assert len(ticks) == len(PROMPTS)
    llm.faults["generate"] = RuntimeError("EngineCore encountered an issue")
    with pytest.raises(EngineError):
        engine.generate(PROMPTS, 4, GREEDY)
    assert llm.made[-1].llm_engine.step is steps, "vLLM is left as it was"
    engine.close()


# --- scratch folders


def _hold(ready: Any, root: str) -> None:
    scratch.MEMORY = Path(root)
    held = scratch.Scratch(10)
    (held.path / "weights").write_text("x")
    ready.put(str(held.path))
    time.sleep(60)


def test_what_a_killed_process_left_is_swept_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    monkeypatch.setattr(scratch, "YOUNG_S", -1.0)
    context = multiprocessing.get_context("fork")
    ready: Any = context.Queue()
    other = context.Process(target=_hold, args=(ready, str(tmp_path)))
    other.start()
    folder = Path(ready.get(timeout=30))
    assert scratch.sweep(tmp_path) == [] and (folder / "weights").exists()
    other.kill()
    other.join()
    assert scratch.sweep(tmp_path) == [folder] and not folder.exists()


def test_shared_memory_is_used_only_if_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    assert scratch.place(1) == tmp_path
    assert scratch.place(1 << 60) != tmp_path
    monkeypatch.setattr(scratch, "MEMORY", tmp_path / "absent")
    assert scratch.place(1) != tmp_path / "absent"
    assert os.access(scratch.place(1), os.W_OK)
