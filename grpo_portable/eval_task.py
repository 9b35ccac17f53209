"""What `eval` is asked to do: which model and adapter, and by whose recipe the questions are put.

An adapter is only judged fairly as it was trained: with the prompt, limits and answer style of its run. So an adapter that
still lies in its run's folder brings that run's recipe along, questions and model included, unless others are named. Loads
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.errors import ModelError, UsageError
from grpo_portable.run.folder import shortened
from grpo_portable.run.saved import torn

WEIGHTS = "adapter_model.safetensors"
OF_THIS_MACHINE = (
    "path=auto",
    "micro_batch=auto",
    "rollout_rows=auto",
    "gradient_checkpointing=auto",
    "optimizer=auto",
)


@dataclass(frozen=True)
class EvalTask:
    """`recipe` is a name or file, None for the plainest one; `told` says where it comes from when nobody named it."""

    recipe: str | None
    overrides: tuple[str, ...]
    adapter: Path | None
    base_too: bool
    told: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of task.json."""
        adapter = None if self.adapter is None else shortened(str(self.adapter.resolve()))
        return {"only": "evaluate", "adapter": adapter, "base_too": self.base_too}


def eval_task(
    recipe: str | None,
    *,
    model: str | None,
    data: str | None,
    adapter: Path | None,
    settings: Sequence[str] = (),
    base_too: bool = False,
) -> EvalTask:
    """The task of one `eval` command. UsageError when no model is named or known, ModelError when `adapter` holds none."""
    if base_too and adapter is None:
        raise UsageError(
            "--base-too compares an adapter with its base", because="no adapter is named", help="--adapter"
        )
    adapter = None if adapter is None else _weights_folder(adapter)
    of_run = None if recipe or adapter is None else _recipe_of(adapter)
    told = None
    if of_run is not None:
        what = "prompt and limits" + ("" if data else ", questions") + ("" if model else ", model")
        told = f"{what}: those of the run `{of_run.parent.name}`"
    elif model is None:
        raise UsageError("no model is named", help="name one with --model, or the adapter of a run with --adapter RUN")
    named = {"model": model, "eval_data": data}
    overrides = [*(OF_THIS_MACHINE if of_run else ()), *settings]
    overrides += [f"{key}={value}" for key, value in named.items() if value is not None]
    return EvalTask(str(of_run) if of_run else recipe, tuple(overrides), adapter, base_too, told)


def _weights_folder(adapter: Path) -> Path:
    """The adapter's folder, its weights whole; a run's folder stands for the adapter in it."""
    for folder in (adapter.expanduser(), adapter.expanduser() / "adapter"):
        if (folder / WEIGHTS).is_file():
            if broken := torn(folder):
                raise ModelError(
                    f"`{broken}` is torn",
                    because="it is cut, or its content is not what was saved",
                    help="if its run is here, `grpo-portable train --resume --out RUN` makes it again",
                )
            return folder
    there = adapter.expanduser().exists()
    raise ModelError(
        f"`{adapter}` holds no adapter",
        because=f"there is no {WEIGHTS} in it" if there else "there is no such folder",
        help="name the folder of a finished run, or of an adapter, as `--adapter runs/NAME`",
    )


def _recipe_of(adapter: Path) -> Path | None:
    file = adapter.resolve().parent / "recipe.yaml"
    return file if file.is_file() else None
