"""A whole GRPO step, ours against TRL's default without vLLM: same recipe, same weights, same questions, one after the other.

`grpo-portable bench step arithmetic-embedded --steps 4 --json`, or `bench step --shape qwen3-4b --path bf16-hf` on random
weights. Each side is a process of its own: neither one's memory nor its crash touches the other. It makes one step to warm up;
the figure is the median of the others. Torch-free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from doctor import memory
from doctor.diagnosis import VLLM_PATHS
from doctor.shape_files import shape_from_config
from doctor.shapes import shape_of
from grpo_portable import launch
from grpo_portable.bench import child
from grpo_portable.bench import memory as bench_memory
from grpo_portable.bench import side as bench_side
from grpo_portable.bench.checkpoint import outline
from grpo_portable.bench.shapes import SHAPES, known
from grpo_portable.errors import EngineError, GrpoPortableError, UsageError
from grpo_portable.plan.settle import Settled
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.scratch import place
from grpo_portable.run.folder import create

SIDES = {"ours": "grpo-portable", "trl": "TRL's default without vLLM"}
LIMIT_S = 1800.0
T = TypeVar("T")


def bench_step(
    settled: Settled,
    steps: int,
    sides: Sequence[str] = tuple(SIDES),
    *,
    limit_s: float = LIMIT_S,
    tell: child.Tell = child.tell,
) -> dict[str, Any]:
    """{model, path, device, torch, step, ours: {...}, trl: {...}, times_faster}; each side: seconds of each step and their
    median, tokens a step, tokens a second, memory; or {error} with what was seen before it. The number of steps is replaced.

    A side may take `limit_s` seconds. `tell` hears of it when it begins and, with its figures, when it ends.
    """
    recipe = replace(
        settled.recipe, steps=steps + 1, warmup_steps=0, bootstrap_epochs=0.0, save_every=10**6, report_to=()
    )
    seen = {name: _side(name, recipe, settled.ledger, limit_s, tell) for name in sides}
    about = next(iter(seen.values()))
    return {
        "model": Path(recipe.model).name if Path(recipe.model).exists() else recipe.model,
        "path": recipe.path,
        "device": about.pop("device", None),
        "torch": about.pop("torch", None),
        "step": {
            "questions": recipe.prompts_per_step,
            "group": recipe.group_size,
            "micro_batch": recipe.micro_batch,
            "rollout_rows": recipe.rollout_rows,
            "checkpointing": recipe.gradient_checkpointing,
            "longest_completion": recipe.max_completion_tokens,
        },
        **{name: {k: v for k, v in side.items() if k not in ("device", "torch")} for name, side in seen.items()},
        "times_faster": _times(seen),
    }


def _times(seen: Mapping[str, Mapping[str, Any]]) -> float | None:
    ours, trl = (seen.get(name, {}).get("seconds_median") for name in SIDES)
    return round(trl / ours, 2) if ours and trl else None


def _side(
    name: str, recipe: Recipe, settled: memory.Settled | None, limit_s: float, tell: child.Tell
) -> dict[str, Any]:
    """One side's figures; {error} with what was seen before it when its process failed."""
    if name == "trl" and recipe.path in VLLM_PATHS:
        recipe = replace(recipe, path="fp16-hf" if recipe.path.startswith("fp16") else "bf16-hf")
    tell({"side": name, "steps": recipe.steps, "limit_s": limit_s})
    before = bench_memory.used_gib()
    with tempfile.TemporaryDirectory() as folder:
        run = create(Path(folder) / "run", recipe)
        module = [sys.executable, "-m", "grpo_portable.bench.side", str(run.path), name]
        failed = child.run(module, run.path, limit_s)
        seen = child.with_figures(failed, run.read_json(bench_side.FILE))
        longest = ((run.read_json("run.json").get("data") or {}).get("train") or {}).get("longest_prompt_tokens")
    device = seen.get("device_used_gib")
    if device is not None:
        device -= before.get(str(seen.get("uuid")), 0.0)
    ledger = _ledger(recipe, settled, longest) if name == "ours" else None
    found: dict[str, Any] = {
        **{key: seen[key] for key in ("device", "torch", "error") if key in seen},
        **_figures(seen.get("seconds", [])[1:], seen.get("tokens", [])[1:]),
        "memory": bench_memory.against_ledger(ledger, seen.get("allocated_peak_gib", {}), device),
    }
    tell({"side": name, **found})
    return found


def _ledger(recipe: Recipe, settled: memory.Settled | None, longest: int | None) -> dict[str, float] | None:
    """The ledger at the lengths that occur: the recipe's longest prompt is a limit that few data sets reach."""
    shape = shape_of(recipe.model)
    if settled is None or shape is None:
        return None
    setting = replace(
        settled.setting,
        prompt_tokens=longest or settled.setting.prompt_tokens,
        completion_tokens=recipe.max_completion_tokens,
    )
    return memory.ledger(shape, setting)


def _figures(seconds: Sequence[float], tokens: Sequence[float]) -> dict[str, Any]:
    if not seconds:
        return {}
    return {
        "seconds": [round(s, 3) for s in seconds],
        "seconds_median": round(statistics.median(seconds), 3),
        "tokens_a_step": round(statistics.mean(tokens)),
        "tokens_a_second": round(sum(tokens) / sum(seconds), 1),
    }


def progress(figures: Mapping[str, Any]) -> None:
    """A line on stderr for a reader: which side begins, how it ended."""
    title = SIDES[figures["side"]]
    if "limit_s" in figures:
        steps, minutes = figures["steps"], figures["limit_s"] / 60
        line = f"{title}: loading, then {steps} steps, the first to warm up (at most {minutes:g} min) ..."
    elif "seconds_median" in figures:
        line = f"{title}: {figures['seconds_median']:.2f} s a step"
    else:
        line = f"{title}: {figures.get('error', 'no step was made')}"
    print(line, file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """The report as a few lines of text."""
    step = report["step"]
    lines = [
        f"{report['model']} on {report['device']}, path {report['path']}, torch {report['torch']}: "
        f"{step['questions']} x {step['group']} completions of at most {step['longest_completion']} tokens",
        f"{'':<30}{'s/step':>8}{'tokens/step':>13}{'tokens/s':>10}{'peak GiB':>10}{'ledger':>10}",
    ]
    for name, title in SIDES.items():
        side = report.get(name)
        if side is None:
            continue
        if "seconds_median" in side:
            peak, planned = side["memory"]["device_peak_gib"], side["memory"]["ledger_sum_gib"]
            lines.append(
                f"{title:<30}{side['seconds_median']:>8.2f}{side['tokens_a_step']:>13,}{side['tokens_a_second']:>10,.0f}"
                f"{'' if peak is None else f'{peak:.2f}':>10}{'' if planned is None else f'{planned:.2f}':>10}"
            )
        if "error" in side:
            lines.append(f"{title:<30}{side['error']}")
    if any(side["memory"]["ledger_sum_gib"] is not None for side in map(report.get, SIDES) if side):
        lines.append("ledger: the peak in GiB that the plan reckoned with")
    if report["times_faster"]:
        lines.append(f"{report['times_faster']:.1f} times faster")
    return "\n".join(lines)


def write_weights(shape: str, folder: Path) -> None:
    """Random weights of a shape into its folder, made in a process of its own so that its memory is free again."""
    failed = child.run([sys.executable, "-m", "grpo_portable.bench.checkpoint", shape, str(folder)], folder, LIMIT_S)
    if failed:
        raise EngineError(f"no checkpoint of {shape} could be made", because=failed["error"])


@contextlib.contextmanager
def checkpoint(recipe: str | None, shape: str | None, plan: Callable[[str], T]) -> Iterator[T]:
    """What `plan` makes of the recipe's name, or of one for random weights, which are there inside.

    They are written after the plan, which refuses in a moment what they take minutes for. UsageError unless one is named.
    """
    if recipe is not None and shape is None:
        yield plan(recipe)
        return
    if recipe is not None or shape is None:
        raise UsageError("one of a recipe and --shape must be named", help="for example --shape qwen3-4b")
    sizes = shape_from_config(known(shape), shape)
    size = int(memory.weight_bytes(sizes, "bf16")) if sizes else 0
    with tempfile.TemporaryDirectory(dir=place(size)) as folder:
        model = Path(folder) / shape
        model.mkdir()
        planned = plan(str(outline(shape, model)))
        print(
            f"random weights of {shape}, {size / 2**30:.1f} GiB, are written into {folder} ...",
            file=sys.stderr,
            flush=True,
        )
        write_weights(shape, model)
        yield planned


def ask_for_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options that change what is planned for a step."""
    parser.add_argument("--facts", help="plan by a saved look at this machine (grpo-doctor --save-facts)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one field of the recipe",
    )


def main(arguments: Sequence[str]) -> int:
    """The command `bench step`; the exit code."""
    parser = argparse.ArgumentParser(prog="grpo-portable bench step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", help="a recipe's name or file; or give --shape")
    parser.add_argument("--shape", help=f"random weights of this shape: {', '.join(SHAPES)}")
    parser.add_argument("--path", help="where the step runs, as `path` of a recipe; the best one by default")
    parser.add_argument("--sides", default="ours,trl", help="comma-separated: ours, trl")
    ask_for_plan(parser)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one to warm up")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a side may take")
    parser.add_argument(
        "--json", action="store_true", help="JSON instead of a table; each side's figures on stderr as it ends"
    )
    given = parser.parse_args(arguments)
    settings = [*given.settings, *([f"path={given.path}"] if given.path else [])]
    sides = given.sides.split(",")
    try:
        if unknown := [name for name in sides if name not in SIDES]:
            raise UsageError(f"there is no side `{unknown[0]}`", help=f"some of: {', '.join(SIDES)}")

        def plan(name: str) -> launch.Prepared:
            return launch.prepare(name, auto=True, overrides=settings, facts_file=given.facts)

        with checkpoint(given.recipe, given.shape, plan) as prepared:
            report = bench_step(
                prepared.settled,
                max(1, given.steps),
                sides,
                limit_s=given.limit,
                tell=child.tell if given.json else progress,
            )
    except GrpoPortableError as error:
        print("\n".join(error.shown()), file=sys.stderr)
        return error.exit_code
    print(json.dumps(report, indent=1) if given.json else table(report))
    return 0
