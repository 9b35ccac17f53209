"""run.json: what a run was made of and how long its stages took. Written by the worker as it goes, read by the report.

Names only: no path, host or user of the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from grpo_portable.data import questions, sets
from grpo_portable.engines import PathSettings
from grpo_portable.models import policy
from grpo_portable.models.prompts import Fitted, PromptBuilder
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Holding, Rollout
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.run.processes import here
from grpo_portable.supervision.ladder import shown
from grpo_portable.training.metrics import memory_gib

REPORTED_PACKAGES = (
    "grpo-portable",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "torchao",
    "triton",
    "vllm",
    "unsloth",
    "unsloth_zoo",
)


@contextlib.contextmanager
def stage(run: RunFolder, name: str, there: int = 0) -> Iterator[None]:
    """Add the seconds spent inside to the stage's; those before a crash or a stop stay counted.

    `there`: how many of its answers or steps there are already. `paths` says which path made those from number `from` on.
    """
    began = time.perf_counter()
    record = run.read_json("run.json")
    found = record.get("stages", {}).get(name, {})
    paths = spans(found.get("paths", []), str(record.get("runs_as") or record.get("path")), there)
    _note_stage(run, name, seconds=found.get("seconds", 0.0), paths=paths)  # now: the worker may be killed in it
    try:
        yield
    finally:
        _note_stage(run, name, seconds=round(found.get("seconds", 0.0) + time.perf_counter() - began, 3), paths=paths)


def spans(before: list[dict[str, Any]], path: str, there: int) -> list[dict[str, Any]]:
    """Which path made what: `before` without what is made again, and `path` from number `there` on."""
    kept = [span for span in before if span["from"] < there]
    return kept if kept and kept[-1]["path"] == path else [*kept, {"path": path, "from": there}]


def _note_stage(run: RunFolder, name: str, **values: Any) -> None:
    note(run, stages={**run.read_json("run.json").get("stages", {}), name: values})


def note(run: RunFolder, **values: Any) -> None:
    """Put values into run.json; of several processes only the first writes."""
    if here().is_main:
        run.update_json("run.json", **values)


def setting(
    run: RunFolder,
    recipe: Recipe,
    settings: PathSettings,
    loaded: policy.Loaded,
    model: Any,
    builder: PromptBuilder,
    held_out: Fitted,
) -> None:
    """What runs, with what: model, path, number format, counts, versions, one rendered prompt."""
    trained, total = policy.counts(model)
    note(
        run,
        model=loaded.name,
        base_model=loaded.name,
        path=settings.path,
        runs_as=shown(settings.path, settings.backend),
        backend="trl on Unsloth's kernels" if settings.backend == "unsloth" else "trl",
        dtype=settings.dtype,
        quantization=settings.quantization,
        trainable_parameters=trained,
        total_parameters=total,
        seed=recipe.seed,
        versions=_versions(),
        prompt=builder.describe(held_out.questions[0].question),
    )


def data_used(run: RunFolder, recipe: Recipe, part: str, loaded: questions.Loaded, fitted: Fitted) -> None:
    """How many rows of a source were used, and an event that names those that could not be."""
    source = recipe.data if part == "train" else recipe.eval_data
    split = recipe.data_split if part == "train" else recipe.eval_split
    name = sets.shown(source)
    known = run.read_json("run.json").get("data", {})
    fingerprint, before = _fingerprint(fitted), known.get(part, {}).get("sha256")
    if before not in (None, fingerprint):
        message = f"the questions of {name} ({split}) are not those the run began with: the groups to come are others"
        tell_once(run, "data", message)
    known[part] = {
        "source": name,
        "split": split,
        "total": loaded.total,
        "used": len(fitted.questions),
        "skipped": len(loaded.skipped),
        "over_length": fitted.over_length,
        "over_percentile": fitted.over_percentile,
        "longest_prompt_tokens": max(len(ids) for ids in fitted.prompts),
        "sha256": fingerprint,
    }
    note(run, data=known)
    if left_out := sets.unusable(recipe, part, loaded):
        tell_once(run, "data", left_out, rows=[row for row, _ in loaded.skipped[:100]])


def _fingerprint(fitted: Fitted) -> str:
    """The same for the same questions with the same golds in the same order."""
    hashed = hashlib.sha256()
    for question in fitted.questions:
        hashed.update(json.dumps([question.id, question.question, question.gold]).encode())
    return hashed.hexdigest()[:16]


def tell_once(run: RunFolder, kind: str, message: str, **more: Any) -> None:
    """An event, unless the run was told the same before it was resumed; of several processes only the first writes."""
    if here().is_main and (kind, message) not in {
        (e.get("kind"), e.get("message")) for e in read_lines(run.events_file)
    }:
        run.event(kind, message, **more)


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def memory_held(run: RunFolder, model: Any, engine: Rollout) -> None:
    """Note the GiB of the policy's weights, and of the engine's own weights and KV cache, counted from their tensors."""
    frozen, trained = policy.weight_bytes(model)
    parts = engine.holds() if isinstance(engine, Holding) else {}
    gib = {"policy": frozen / 2**30, "trained": trained / 2**30, **{f"engine_{name}": v for name, v in parts.items()}}
    note(run, held_gib={name: None if value is None else round(value, 4) for name, value in gib.items()})


def peak_memory(run: RunFolder) -> None:
    """Note the most memory the run has held so far, over all its workers."""
    note(run, peak_memory_gib=round(max(memory_gib(), run.read_json("run.json").get("peak_memory_gib") or 0.0), 3))
