"""The embedded default: a tiny model and its arithmetic word problems, so that a whole run needs no download and no GPU.

`problems` makes the questions, `templates` holds their wording, `build` makes the model. Torch-free but for `build`.
"""

from __future__ import annotations

from pathlib import Path


def model_folder() -> Path:
    """Folder of the built model: config, float16 safetensors, tokenizer, generation config."""
    return Path(__file__).resolve().parent / "model"
