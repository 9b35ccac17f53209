"""vLLM itself on a CUDA card: the right tokens, the newest adapter, memory that comes back, and how long it takes to start.

    pytest tests/gpu/test_vllm_gpu.py -s
    GRPO_PORTABLE_TEST_MODEL=SmolLM2-135M-Instruct.Q4_1.gguf pytest tests/gpu/test_vllm_gpu.py -s

Without a model a random Qwen3 of 60 million weights is used. `-s` shows what was measured.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rollouts
import tiny
import torch

from doctor.shape_files import shape_from_config
from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import vllm_settings
from grpo_portable.rollout.protocol import Completion, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
MODEL = os.environ.get("GRPO_PORTABLE_TEST_MODEL")
GREEDY = Sampling(max_tokens=48, temperature=0)
RANDOM = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}


def save_random(folder: Path) -> str:
    rollouts.model("qwen3", torch.bfloat16, **RANDOM).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def load(source: str, **changes: Any) -> tuple[Any, Any, Any]:
    """(policy with an adapter that does something, tokenizer, recipe)."""
    settings: dict[str, Any] = {
        "model": source,
        "path": "bf16-vllm",
        "lora_rank": 16,
        "lora_alpha": 32.0,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 128,
        "micro_batch": 4,
        "group_size": 8,
        "optimizer": "adamw",
        "gradient_checkpointing": True,
        **changes,
    }
    recipe = replace(Recipe(), **settings)
    dtype = "bfloat16" if recipe.lora_rank else "float32"
    loaded = policy.load(source, dtype=dtype, device="cuda")
    torch.manual_seed(0)
    adapted = policy.add_adapter(loaded.model, recipe)
    move(adapted, 1)
    return adapted, loaded.tokenizer, recipe


def move(adapted: Any, seed: int, size: float = 0.02) -> None:
    """A stand-in for an update of the adapter, or a small one of all weights."""
    draw = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable(adapted).values():
            scale = size if hasattr(adapted, "peft_config") else 0.1 * parameter.float().std()
            parameter.add_(torch.randn(parameter.shape, generator=draw, device="cuda") * scale)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return MODEL or save_random(tmp_path_factory.mktemp("model"))


def opened(source: str, kind: str, *, sleep: bool | None, **changes: Any) -> Iterator[tuple[Any, Any]]:
    from grpo_portable.rollout import vllm

    adapted, tokenizer, recipe = load(source, **changes)
    engine = vllm.make(adapted, tokenizer, recipe, rows=64, copy=kind, dtype="bfloat16", sleep=sleep)
    print(f"\n{engine.describe()}")
    yield adapted.eval(), engine
    engine.close()


def prompts(adapted: Any) -> list[list[int]]:
    vocabulary = adapted.get_input_embeddings().weight.shape[0]
    return [
        [(7 * i + 13 * j) % (vocabulary - 10) + 5 for j in range(length)]
        for i, length in enumerate((40, 3, 40, 90, 17))
    ]


def gap(adapted: Any, asked: list[list[int]], groups: list[list[Completion]], temperature: float = 1.0) -> torch.Tensor:
    """Engine minus policy, log-probability of every drawn token."""
    parts = [
        torch.tensor(row.logprobs) - rollouts.logprobs(adapted, prompt, row, temperature)
        for prompt, group in zip(asked, groups, strict=True)
        for row in group
    ]
    return torch.cat(parts)


def told(what: str, off: torch.Tensor) -> str:
    size = off.abs()
    return f"\n{what}: log-probabilities apart by {size.mean():.4f}, at most {size.max():.3f}, mean {off.mean():.4f}"


def near_ties(adapted: Any, asked: list[list[int]], groups: list[list[Completion]]) -> None:
    """Greedy rows: at every position the token drawn is the first choice of the policy in float32, up to a near tie.

    Two logits may change places when both are off by as much as the policy's own bfloat16 forward is, and vLLM's adapter
    kernels add in an order of their own, so that equal calls differ too.
    """
    exact = copy.deepcopy(adapted).float()
    behind, noise = [], []
    for prompt, (row, *_) in zip(asked, groups, strict=True):
        ids = torch.tensor([[*prompt, *row.token_ids]], device="cuda")
        drawn = ids[0, len(prompt) :, None]
        with torch.no_grad():
            wide, narrow = (
                torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float(), -1)
                for model in (exact, adapted)
            )
        behind.append(wide.max(-1).values - wide.gather(-1, drawn)[:, 0])
        first = wide.argmax(-1, keepdim=True)
        noise += [(wide - narrow).gather(-1, tokens)[:, 0].abs() for tokens in (drawn, first)]
    assert torch.cat(behind).max() <= 2 * torch.cat(noise).max() + 1e-3
    assert (torch.cat(behind) == 0).float().mean() > 0.9


class TestSixteenBit:
    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, source: str) -> Iterator[tuple[Any, Any]]:
        yield from opened(source, "auto", sleep=True)

    def test_greedy_is_the_policys_up_to_near_ties(self, made: Any) -> None:
        adapted, engine = made
        engine.sync(adapted)
        asked = prompts(adapted)
        groups = engine.generate(asked, 2, GREEDY)
        assert all(group[0] == group[1] and len(group[0].token_ids) == 48 for group in groups)
        near_ties(adapted, asked, groups)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_the_policys(self, made: Any, temperature: float) -> None:
        adapted, engine = made
        engine.sync(adapted)
        asked = prompts(adapted)
        groups = engine.generate(asked, 8, Sampling(max_tokens=64, temperature=temperature, seed=3))
        exact = copy.deepcopy(adapted).float()
        ours = gap(exact, asked, groups, temperature)
        theirs = gap(exact, asked, groups, temperature) - gap(adapted, asked, groups, temperature)
        print(told(f"engine at temperature {temperature}, from float32", ours), told("policy's own bfloat16", theirs))
        # no further from float32 than the policy's own forward in bfloat16 is
        assert ours.abs().mean() < 1.5 * theirs.abs().mean() + 2e-3 and ours.abs().max() < 2 * theirs.abs().max() + 0.05

    def test_an_update_changes_the_very_next_rollout(self, made: Any) -> None:
        adapted, engine = made
        asked = prompts(adapted)
        engine.sync(adapted)
        before = engine.generate(asked, 1, GREEDY)
        for seed in (2, 3, 4):
            engine.rest()
            move(adapted, seed)
            engine.sync(adapted)
            after = engine.generate(asked, 1, GREEDY)
            near_ties(adapted, asked, after)
            old, new = gap(adapted, asked, before), gap(adapted, asked, after)
            print(told("rows of the old adapter", old), told("of the new one", new))
            assert old.abs().mean() > 3 * new.abs().mean()
            before = after

    def test_sleep_gives_memory_back_and_changes_nothing(self, made: Any) -> None:
        adapted, engine = made
        engine.sync(adapted)
        asked = prompts(adapted)
        near_ties(adapted, asked, engine.generate(asked, 1, GREEDY))
        for _ in range(3):
            torch.cuda.empty_cache()
            awake, began = torch.cuda.mem_get_info()[0], time.perf_counter()
            engine.rest()
            slept, asleep = time.perf_counter() - began, torch.cuda.mem_get_info()[0]
            began = time.perf_counter()
            made_again = engine.generate(asked, 1, GREEDY)
            woke = time.perf_counter() - began
            print(f"\nfreed {(asleep - awake) / 2**30:.2f} GiB in {slept:.2f} s; woke and wrote in {woke:.2f} s")
            assert asleep - awake > 0.8 * (engine.memory.gib["kv_cache"] + engine.memory.gib["engine_copy"]) * 2**30
            near_ties(adapted, asked, made_again)

    def test_seeds_repeat_and_leave_the_trainers_generators_alone(self, made: Any) -> None:
        adapted, engine = made
        engine.sync(adapted)
        asked = [prompts(adapted)[0]] * 2
        states = torch.random.get_rng_state(), torch.cuda.get_rng_state()
        drawn = [engine.generate(asked, 4, Sampling(max_tokens=32, seed=seed)) for seed in (1, 1, 2)]
        assert torch.equal(states[0], torch.random.get_rng_state()) and torch.equal(
            states[1], torch.cuda.get_rng_state()
        )
        texts = [[row.token_ids for group in groups for row in group] for groups in drawn]
        assert len(set(texts[0])) == 8 and texts[0] != texts[2]
        # the same noise on nearly the same logits (see near_ties), so some rows part, but none at its first token
        assert sum(a == b for a, b in zip(texts[0], texts[1], strict=True)) >= 3
        assert [row[:1] for row in texts[0]] == [row[:1] for row in texts[1]]

    def test_rows_end_where_they_should(self, made: Any) -> None:
        adapted, engine = made
        engine.sync(adapted)
        asked = prompts(adapted)
        # one of every row: a row that parts at a near tie the second time may not come to its own
        stops = tuple({row.token_ids[5] for (row,) in engine.generate(asked, 1, GREEDY)})
        groups = engine.generate(asked, 1, replace(GREEDY, stop_ids=stops))
        near_ties(adapted, asked, groups)
        for (row,) in groups:
            assert not set(stops) & set(row.token_ids[:-1])
            ended = row.token_ids[-1] in stops
            assert ended or len(row.token_ids) == 48
            assert row.finish_reason == ("stop" if ended else "length")
        assert any(row.finish_reason == "stop" for (row,) in groups)
        only = engine.generate(asked, 2, Sampling(max_tokens=20, top_k=1, seed=5))
        near_ties(adapted, asked, only)
        certain = [value == pytest.approx(0, abs=1e-5) for row in rollouts.flat(only) for value in row.logprobs]
        assert sum(certain) > 0.9 * len(certain)  # not where two logits are the same number in bfloat16


def blocks_misfit(source: str) -> str | None:
    shape = shape_from_config(policy.load(source, dtype="bfloat16", device="cpu").model.config.to_dict(), source)
    assert shape is not None
    return vllm_settings.block_refusal(shape)


class TestFp8:
    @pytest.fixture(scope="class", params=["row", "block", "tensor"])
    @classmethod
    def made(cls, source: str, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this card has no FP8 arithmetic")
        if request.param == "block" and (odd := blocks_misfit(source)):
            pytest.skip(odd)
        yield from opened(source, "fp8", sleep=None, fp8_scales=request.param)

    def test_fp8_samples_from_nearly_the_policy(self, made: Any) -> None:
        adapted, engine = made
        asked = prompts(adapted)
        for seed in (2, 3):
            move(adapted, seed)
            engine.sync(adapted)
            groups = engine.generate(asked, 8, Sampling(max_tokens=64, seed=seed))
            off = gap(adapted, asked, groups)
            print(told(engine.precision, off))
            # by hand on a CPU, row by row: 0.24 to 0.26, mean 0.05 to 0.07; with the weights of one update before 0.84 to 0.97
            assert off.mean() < 0.2 and off.abs().mean() < 0.4


class TestAllWeights:
    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, source: str) -> Iterator[tuple[Any, Any]]:
        # vLLM's sleeping memory is for one engine a process
        yield from opened(source, "auto", sleep=False, lora_rank=0)

    def test_all_weights_are_taken_over(self, made: Any) -> None:
        trained, engine = made
        asked = prompts(trained)
        for seed in (2, 3):
            engine.rest()
            move(trained, seed)
            engine.sync(trained)
            groups = engine.generate(asked, 4, Sampling(max_tokens=48, seed=seed))
            with torch.autocast("cuda", torch.bfloat16):  # as the update computes
                off = gap(trained, asked, groups)
            print(told("all weights", off))
            assert off.abs().mean() < 0.05


START = """
import json, sys, time
from test_vllm_gpu import load, prompts
from grpo_portable.rollout import vllm
from grpo_portable.rollout.protocol import Sampling
if __name__ == "__main__":
    adapted, tokenizer, recipe = load(sys.argv[1])
    engine = vllm.make(adapted, tokenizer, recipe, rows=64, copy="auto", dtype="bfloat16", graphs=sys.argv[2])
    engine.sync(adapted)
    for _ in range(2):
        began = time.perf_counter()
        groups = engine.generate(prompts(adapted)[:4], 16, Sampling(max_tokens=128, seed=1))
        seconds = time.perf_counter() - began
    tokens = sum(len(row.token_ids) for group in groups for row in group)
    told = {"graphs": sys.argv[2], "start_s": round(engine.start_s, 1), "tok_s": round(tokens / seconds)}
    print("MEASURED", json.dumps(told))
"""


@pytest.mark.parametrize("graphs", ["full", "compiled", "eager"])
def test_how_long_it_takes_to_start(source: str, graphs: str, tmp_path: Path) -> None:
    """Each in a process of its own, as in a run. Seconds and tokens per second are printed, not judged."""
    script = tmp_path / "start.py"
    script.write_text(START)
    places = [str(Path(__file__).parent), *filter(None, sys.path)]  # what this process finds, it finds
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, str(script), source, graphs]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [text for text in ended.stdout.splitlines() if text.startswith("MEASURED")]
    print(f"\n{line}")
    assert json.loads(line.removeprefix("MEASURED "))["tok_s"] > 0
