"""A stand-in for the unsloth package: the calls the backend makes, and what Unsloth 2026.10.9 does to a model and a process.

The policy lies on the weights of the vLLM of `standin_vllm`; its backbone drops the padding mask while it trains, unless told
to keep it; sleep leaves the weights where they are. What it cannot show is Unsloth's kernels and FP8.
"""

from __future__ import annotations

import copy
import os
import sys
import types
from typing import Any

import pytest
import standin_vllm
import torch


class FastLanguageModel:
    """`asked`: the arguments of every call; `seen`: Unsloth's switches when it was imported; `fault`: what loading raises."""

    asked: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    seen: dict[str, str] = {}  # noqa: RUF012
    fault: BaseException | None = None

    @staticmethod
    def from_pretrained(model_name: str, **options: Any) -> tuple[Any, Any]:
        from transformers import AutoTokenizer

        FastLanguageModel.asked["load"] = {"model_name": model_name, **options}
        FastLanguageModel.seen = {k: v for k, v in os.environ.items() if k.startswith("UNSLOTH_")}
        if FastLanguageModel.fault is not None:
            raise FastLanguageModel.fault
        llm = standin_vllm.LLM(
            model=model_name,
            dtype="float32",
            seed=0,
            max_lora_rank=options["max_lora_rank"],
            max_model_len=options["max_seq_length"],
            enable_sleep_mode=os.environ.get("UNSLOTH_VLLM_STANDBY", "0") != "0",
            lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )
        model = copy.deepcopy(llm.model)
        for own, theirs in zip(model.parameters(), llm.model.parameters(), strict=True):
            own.data = theirs.data
        model.generation_config = type(model.generation_config)()  # rebuilt from the configuration alone
        _drop_the_mask_in_training(model.model)
        model.vllm_engine = llm
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        tokenizer.padding_side = "right"
        torch.manual_seed(0)
        return model, tokenizer

    @staticmethod
    def get_peft_model(model: Any, **options: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        FastLanguageModel.asked["adapt"] = options
        own = {k: v for k, v in options.items() if k not in ("use_gradient_checkpointing", "random_state")}
        torch.manual_seed(options["random_state"])
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **own))
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        return wrapped


def _drop_the_mask_in_training(backbone: Any) -> None:
    forward = backbone.forward

    def without(*arguments: Any, attention_mask: Any = None, **options: Any) -> Any:
        if backbone.training and not getattr(backbone, "_unsloth_keep_padding_mask", False):
            attention_mask = None
        return forward(*arguments, attention_mask=attention_mask, **options)

    backbone.forward = without


def install(monkeypatch: pytest.MonkeyPatch) -> type[FastLanguageModel]:
    """Put the stand-in, and vLLM's, in place of the packages; none of Unsloth's switches is set."""
    standin_vllm.install(monkeypatch)
    package = types.ModuleType("unsloth")
    package.FastLanguageModel = FastLanguageModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unsloth", package)
    for name in [name for name in os.environ if name.startswith("UNSLOTH_")]:
        monkeypatch.delenv(name)
    for name, value in {"asked": {}, "seen": {}, "fault": None}.items():
        monkeypatch.setattr(FastLanguageModel, name, value)
    return FastLanguageModel
