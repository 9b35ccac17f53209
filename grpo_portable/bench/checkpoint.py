"""A checkpoint of a shape with random weights, a small tokenizer and a recipe: what `bench step --shape` measures.

`python -m grpo_portable.bench.checkpoint qwen3-4b FOLDER` writes it. The weights are made on the GPU where there is one. Their
last norm is small, so that every token is about as likely: the end token practically never comes, completions have full length,
and the FP8 and BF16 engines sample from about the same distribution.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_portable.bench.shapes import known
from grpo_portable.recipe import Recipe, to_yaml

RECIPE_FILE = "step.yaml"
TO_COME = (
    "to-come.safetensors",
    "tokenizer-to-come",
)  # empty: they stand for weights and tokenizer while a step is planned
VOCABULARY = 512  # of the tokenizer; ids above it are written as nothing
FINAL_NORM = 0.05  # logits of the last token's own embedding: 0.05 * 0.02 * hidden, 2.6 at a width of 2,560


def step_recipe(model: Path) -> Recipe:
    """8 questions x 8 completions x 256 tokens over `model`, path and sizes `auto`; two worked examples in the prompts."""
    return replace(
        Recipe(),
        model=str(model),
        chat_template="none",
        prompt_template="{question}\n",
        data="arithmetic",
        few_shot=2,
        train_limit=64,
        eval_limit=4,
        max_prompt_tokens=256,
        rewards=("grpo_portable.bench.checkpoint:alternating",),
    )


def alternating(completions: Sequence[Any], **_: Any) -> list[float]:
    """1, 0, 1, 0 ...: random texts earn nothing, and a group whose rewards are all the same is not learnt from."""
    return [float(i % 2 == 0) for i in range(len(completions))]


def outline(shape: str, folder: Path) -> Path:
    """Config and recipe alone, enough to plan by; the recipe's file. UsageError for a shape that is not known. Torch-free."""
    (folder / "config.json").write_text(json.dumps(known(shape)), encoding="utf-8")
    for name in TO_COME:
        (folder / name).touch()
    (folder / RECIPE_FILE).write_text(to_yaml(step_recipe(folder)), encoding="utf-8")
    return folder / RECIPE_FILE


def write(shape: str, folder: Path) -> None:
    """Weights (bfloat16 safetensors), config, tokenizer and recipe of `shape`. UsageError for a shape that is not known."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from grpo_portable.bench.shapes import config_of
    from grpo_portable.embedded.build import make_tokenizer

    outline(shape, folder)
    config = config_of(shape)
    tokenizer = make_tokenizer(min(VOCABULARY, config.vocab_size))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.fill_(FINAL_NORM)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in TO_COME:
        (folder / name).unlink()


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
