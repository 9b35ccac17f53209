"""Warnings about a model on a path: quantised checkpoints where vLLM must take new weights, models that float16 breaks, and
models too large for a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.diagnosis import CPU_PARAMETERS_LIMIT, PATHS, VLLM_PATHS, Help, Wall
from doctor.shapes import Shape

# Their activations exceed 65,504, float16's largest number: huggingface/transformers#36822 and the notes of its pull #37226
# (Gemma 2 and 3), unsloth PR 5880 (Gemma 3 and 4, gpt-oss)
_OVERFLOWS = re.compile(r"gemma-?(?:2|3n?|4)(?![\d.bm])|(?:med|function)gemma|gpt-?oss", re.IGNORECASE)


def overflows_in_float16(model: str) -> bool:
    """Whether a model is known, by its name, not to be computable in float16."""
    return _OVERFLOWS.search(model.rstrip("/").rsplit("/", 1)[-1]) is not None


def slow_on_a_cpu(shape: Shape | None) -> str | None:
    """Why a model is no choice on a CPU though it has room there, None for one that is."""
    if shape is None or shape.params <= CPU_PARAMETERS_LIMIT:
        return None
    return f"{shape.params / 1e9:.1f} B parameters would take days to weeks there"


def model_walls(model: str | None, shape: Shape | None, path: str | None, dtype: str | None) -> Iterator[Wall]:
    """What closes nothing, but goes wrong with this model on the path chosen, which computes in `dtype`."""
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
    if dtype == "float16" and overflows_in_float16(model):
        yield Wall(
            "MODEL-FLOAT16",
            (),
            f"{model} overflows in float16, which is all this card computes in 16 bit",
            (
                f"model = {model}",
                "its activations exceed 65504; Unsloth keeps such models in float32 (unsloth PR 5880)",
            ),
            (Help("Take another model on this card, such as Qwen3 or Llama 3.2", None, "likely"),),
        )
