"""A recipe that was edited between two starts of a run: what may change then, and what must not any more. Torch-free.

Answers, steps and checkpoints are made with the recipe's values. Were one of them another afterwards, the base would be asked
otherwise than the tuned model, or a checkpoint's optimizer would go on with its own values, and the report would say the new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from grpo_portable.errors import RunFolderError
from grpo_portable.recipe import Recipe, differences, load
from grpo_portable.run.folder import PLACES, RunFolder
from grpo_portable.run.forms import RECIPE_VALUES
from grpo_portable.run.saved import is_trained

WHERE = (*PLACES, "vllm_server")  # a run may move with its files
MEANS = ("path", "backend", "fsdp", "fp8_scales", "micro_batch", "rollout_rows", "gradient_checkpointing")
AHEAD = ("save_every", "report_to", "steps", "rewards", "reward_weights")  # of what is still to come
MAY_CHANGE = frozenset((*WHERE, *MEANS, *AHEAD))


def take_over(run: RunFolder, *, made: bool) -> None:
    """Tell as an event what was edited in the run's recipe since its last start, and note its values for the next one.

    `made`: the run has answers or steps already. RunFolderError then for a value that these were made with.
    """
    now = values(load(run.recipe_file))
    before = run.read_json("run.json").get(RECIPE_VALUES)
    changed = differences(before or now, now)
    trained = is_trained(run)
    if held := [key for key in changed if made and (key not in MAY_CHANGE or (key == "steps" and trained))]:
        raise RunFolderError(
            f"recipe.yaml in run `{run.path}` was changed: {_told({key: changed[key] for key in held})}",
            because="the training is done" if held == ["steps"] else "what the run has made so far was made as it was",
            help=f"put it back, or begin a new run with it: grpo-portable train {run.word}/recipe.yaml --out NEW",
        )
    if changed:
        run.event("resume", f"recipe.yaml was changed: {_told(changed)}")
    if before != now:
        run.update_json("run.json", **{RECIPE_VALUES: now})


def values(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON keeps it."""
    return dict(json.loads(json.dumps(asdict(recipe))))


def _told(changed: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{key} {_short(old)} → {_short(new)}" for key, (old, new) in changed.items())


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
