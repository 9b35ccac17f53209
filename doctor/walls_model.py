"""Walls and warnings about a model: one that a package must read or that float16 breaks; quantised checkpoints where vLLM must
take new weights, and models too large for a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from doctor.diagnosis import CPU_PARAMETERS_LIMIT, FP16_PATHS, PATHS, VLLM_PATHS, Help, Wall
from doctor.facts import Facts
from doctor.shapes import Shape

# Their activations exceed 65,504, float16's largest number: huggingface/transformers#36822 and the notes of its pull #37226
# (Gemma 2 and 3), unsloth PR 5880 (Gemma 3 and 4, gpt-oss)
_OVERFLOWS = re.compile(r"gemma-?(?:2|3n?|4)(?![\d.bm])|(?:med|function)gemma|gpt-?oss", re.IGNORECASE)


class Model(NamedTuple):
    """The model that is asked about; `shape` is None where it is not known."""

    name: str | None = None
    shape: Shape | None = None


def overflows_in_float16(model: str) -> bool:
    """Whether a model is known, by its name, not to be computable in float16."""
    return _OVERFLOWS.search(model.rstrip("/").rsplit("/", 1)[-1]) is not None


def slow_on_a_cpu(shape: Shape | None) -> str | None:
    """Why a model is no choice on a CPU though it has room there, None for one that is."""
    if shape is None or shape.params <= CPU_PARAMETERS_LIMIT:
        return None
    return f"{shape.params / 1e9:.1f} B parameters would take days to weeks there"


def unread_wall(facts: Facts, model: str | None) -> Wall | None:
    """A GGUF file is read by a package of its own, on every path."""
    if model is None or not model.lower().endswith(".gguf") or not facts.absent("gguf"):
        return None
    return Wall(
        "MODEL-GGUF",
        PATHS,
        f"{model} is a GGUF file, and the package gguf that reads it is not installed",
        ("packages.gguf = absent", "transformers reads such a file with it and trains on what it holds"),
        (Help("Install it", 'pip install "gguf>=0.17"', "certain"),),
    )


def float16_wall(model: str | None) -> Wall | None:
    """A model that float16 breaks, for a card that computes no other 16-bit type."""
    if model is None or not overflows_in_float16(model):
        return None
    return Wall(
        "MODEL-FLOAT16",
        (*FP16_PATHS, "qlora-hf"),
        f"{model} overflows in float16, which is all this card computes in 16 bit",
        (
            f"model = {model}",
            "its activations exceed 65504; Unsloth keeps such models in float32 (unsloth PR 5880)",
        ),
        (Help("Take another model on this card, such as Qwen3 or Llama 3.2", None, "likely"),),
    )


def warnings(model: str | None, shape: Shape | None, path: str | None) -> Iterator[Wall]:
    """What closes nothing, but goes wrong with this model on the path chosen."""
    if model is None or path is None:
        return
    stored = shape.stored if shape is not None else None
    if path in VLLM_PATHS and stored in ("nf4", "int4"):
        yield Wall(
            "MODEL-QUANTISED",
            (),
            f"{model} is stored in 4 bit, and vLLM cannot take a trained adapter merged into 4-bit weights",
            (
                f"model = {model}, stored as {stored}",
                "merging into packed weights fails on their shape, or rounds the update away (trl#4973, peft#2501)",
            ),
            (Help("Name the 16-bit checkpoint of the same model; the engine makes its own copy", None, "certain"),),
            "More steps or a larger learning rate",
        )
    if path == PATHS[-1] and (too_slow := slow_on_a_cpu(shape)):
        yield Wall(
            "MODEL-CPU",
            (),
            f"{model} is too large to train on a CPU: {too_slow}",
            (f"model = {model}", f"grpo-portable draws the line at {CPU_PARAMETERS_LIMIT / 1e9} B parameters"),
            (
                Help("Name a smaller model, or see which recipes fit here", "grpo-portable recipes", "certain"),
                Help("To train it all the same, insist on the path: --path cpu", None, "certain"),
            ),
        )
