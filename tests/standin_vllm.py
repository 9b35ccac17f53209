"""A stand-in for the vllm package, for machines without it: the calls the engine makes, with the promises vLLM gives.

It reads models and LoRA folders from disk, caches by adapter name as the prefix cache does, refuses work while it sleeps,
reseeds the process's generators, and answers through transformers. What it cannot show is vLLM's own arithmetic.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.training import trainer  # noqa: F401  # TRL looks for the real package while it is being imported


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class SamplingParams:
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        assert self.temperature > 0 or self.n == 1, "n must be 1 when using greedy sampling"
        assert self.detokenize or not self.stop, "stop strings are only supported when detokenize is True"


@dataclass
class Flat:
    logprobs: list[float]
    start_indices: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.start_indices = list(range(len(self.logprobs)))


@dataclass
class Row:
    token_ids: list[int]
    logprobs: Flat
    finish_reason: str


@dataclass
class Answer:
    outputs: list[Row]


class LLM:
    """`faults` maps the name of a call to what it raises; `calls` are the calls so far; `edit` changes rows on the way out."""

    faults: dict[str, BaseException] = {}  # noqa: RUF012
    calls: list[str] = []  # noqa: RUF012
    edit: Callable[[Row], Row] | None = None
    seeds_by_request = True
    made: list[LLM] = []  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        import random

        import numpy
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._call("LLM")
        self.arguments = arguments
        random.seed(arguments["seed"])
        numpy.random.seed(arguments["seed"])
        torch.manual_seed(arguments["seed"])
        torch.set_float32_matmul_precision("high")
        folder = arguments["model"]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments["dtype"])).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asleep, self.adapters, self._answers = False, {}, {}
        config = types.SimpleNamespace(use_v2_model_runner=self.seeds_by_request)
        core = types.SimpleNamespace(shutdown=lambda: self._call("shutdown"))
        self.llm_engine = types.SimpleNamespace(
            vllm_config=config, engine_core=core, add_lora=self._add_lora, step=lambda: None
        )
        LLM.made.append(self)

    def _call(self, name: str) -> None:
        LLM.calls.append(name)
        if name in LLM.faults:
            raise LLM.faults[name]

    def _add_lora(self, request: LoRARequest) -> bool:
        from safetensors.torch import load_file

        self._call("add_lora")
        assert not self.asleep, "the slots of adapters are not mapped while the engine sleeps"
        folder = Path(request.lora_path)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] <= self.arguments["max_lora_rank"] and not config["use_dora"]
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
        tensors, deltas = load_file(folder / "adapter_model.safetensors"), {}
        for name, first in tensors.items():
            if name.endswith(".lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                assert path.rpartition(".")[2] in self.arguments["lora_target_modules"]
                second = tensors[name.replace("lora_A", "lora_B")]
                deltas[f"{path}.weight"] = scale * (second.float() @ first.float())
        self.adapters = {request.lora_int_id: deltas}  # one slot: the newest drives the oldest out
        return True

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        self._call("apply_model")
        assert not self.asleep, "the weights are not mapped while the engine sleeps"

        def load_weights(named: Any) -> None:
            missing, unexpected = self.model.load_state_dict(dict(named), strict=False)
            assert not unexpected and all("lm_head" in name for name in missing)

        return [function(types.SimpleNamespace(load_weights=load_weights, parameters=self.model.parameters))]

    def reset_prefix_cache(self) -> bool:
        self._call("reset_prefix_cache")
        self._answers.clear()
        return True

    def sleep(self, level: int = 1) -> None:
        self._call("sleep")
        assert level == 1 and self.arguments["enable_sleep_mode"] and not self.asleep
        self.asleep = True
        self._answers.clear()

    def wake_up(self) -> None:
        self._call("wake_up")
        assert self.asleep
        self.asleep = False

    def generate(
        self, prompts: list[dict], parameters: list[SamplingParams], *, lora_request: Any = None, use_tqdm: bool = True
    ) -> list[Answer]:
        self._call("generate")
        assert not self.asleep, "no request may be processed while the engine sleeps"
        assert lora_request is None or lora_request.lora_int_id in self.adapters
        answers = []
        for prompt, wanted in zip(prompts, parameters, strict=True):
            self.llm_engine.step()  # as vLLM does in a loop until all rows have ended
            ids = tuple(prompt["prompt_token_ids"])
            key = (lora_request and lora_request.lora_name, ids, str(wanted))
            if wanted.temperature > 0 or key not in self._answers:
                self._answers[key] = self._answer(ids, wanted, lora_request)
            answers.append(self._answers[key])
        return answers

    def _answer(self, ids: tuple[int, ...], wanted: SamplingParams, lora_request: Any) -> Answer:
        deltas = self.adapters[lora_request.lora_int_id] if lora_request else {}
        weights = dict(self.model.named_parameters())
        kept = {name: weights[name].data.clone() for name in deltas}
        with torch.no_grad():
            for name, change in deltas.items():
                weights[name].add_(change.to(weights[name]))
        sampling = Sampling(
            min(wanted.max_tokens, self.arguments["max_model_len"] - len(ids)),
            wanted.temperature,
            wanted.top_p,
            wanted.top_k,
            wanted.min_p,
            wanted.repetition_penalty,
            tuple(wanted.stop_token_ids or ()),
            tuple(wanted.stop or ()),
            wanted.seed,
        )
        (group,) = ReferenceRollout(self.model, self.tokenizer, rows=64).generate([ids], wanted.n, sampling)
        for name, before in kept.items():
            weights[name].data.copy_(before)
        rows = [Row(list(c.token_ids), Flat(list(c.logprobs)), c.finish_reason) for c in group]
        return Answer([LLM.edit(row) if LLM.edit else row for row in rows])


def install(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """Put the stand-in in vllm's place, with nothing broken and no calls made yet."""
    package, lora, request = (types.ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    package.LLM, package.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    request.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    for module in (package, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, value in {"faults": {}, "calls": [], "edit": None, "seeds_by_request": True, "made": []}.items():
        monkeypatch.setattr(LLM, name, value)
    return LLM


def parameter_names() -> set[str]:
    return {f.name for f in fields(SamplingParams)}
