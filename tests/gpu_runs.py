"""For the tests on a card: a model as a folder, and a short run of the real supervisor and worker on it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import rollouts
import tiny
import torch

from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import vllm_adapter
from grpo_portable.run import folder as run_folder
from grpo_portable.run.folder import RunFolder
from grpo_portable.supervision import supervisor

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


def model_folder(source: str | None, folder: Path) -> str:
    """`source` as a folder of safetensors (a GGUF file is written out), or a random Qwen3 of 60 million weights."""
    if source is None:
        rollouts.model("qwen3", torch.bfloat16, **RANDOM).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        return str(folder)
    if Path(source).is_dir():
        return source
    loaded = policy.load(source, dtype="bfloat16")
    return str(vllm_adapter.export(loaded.model, loaded.tokenizer, folder, torch.bfloat16))


def recipe(model: str, data: Path, path: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": model,
        "path": path,
        "data": str(data),
        "eval_data": str(data),
        "eval_limit": 8,
        "prompt_template": "{question}\n",
        "steps": 3,
        "prompts_per_step": 4,
        "group_size": 8,
        "micro_batch": 8,
        "rollout_rows": 32,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 64,
        "learning_rate": 1e-4,
        "warmup_steps": 1,
        "lora_rank": 16,
        "optimizer": "adamw",
        "gradient_checkpointing": False,
        "rewards": ("tiny:digits",),
        **changes,
    }
    return replace(Recipe(), **settings)


def supervised(folder: Path, wanted: Recipe) -> RunFolder:
    """A finished run; what stopped it is raised, with the end of the worker's log."""
    made = run_folder.create(folder, wanted)
    made.write_json("plan.json", {"paths": {wanted.path: {"open": True, "fits": True}}})
    tests = str(Path(tiny.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    try:
        supervisor.supervise(made, fallback=False)
    except Exception:
        print((made.path / "worker.log").read_text(errors="replace")[-6000:])
        raise
    return made
