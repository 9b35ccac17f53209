"""The same work on one GPU and on several: `bench rollout --gpus 0,1` and `bench step --gpus 0,1`, one table each.

The global batch is the same on any number of GPUs: the same questions, the same completions, the same lengths. A rollout's
seconds are those from the moment all processes are ready until the last one has ended; a step's are those of the run's own
metrics, meeting points included. Torch-free: every number of GPUs is measured in processes of its own, and its figures are
told when it ends: on stderr, a JSON object a line with `--json`, else in words.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from grpo_portable import launch
from grpo_portable.bench import child, rank, side
from grpo_portable.bench.shapes import SHAPES, Workload, known
from grpo_portable.errors import GrpoPortableError, UsageError
from grpo_portable.plan import gpus
from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import create
from grpo_portable.supervision import ranks_command
from grpo_portable.supervision.ladder import Rung

LIMIT_S = 900.0


def bench_rollout(
    shape: str,
    engine: str,
    work: Workload,
    counts: Sequence[Rung],
    repeats: int,
    *,
    limit_s: float = LIMIT_S,
    tell: child.Tell = child.tell,
) -> dict[str, Any]:
    """{shape, engine, workload, device, torch, on: [{gpus, processes, tok_s, seconds, ready_s, notes} or {..., error}],
    times: tok_s of the last over the first}. `counts`: a rung for each number of GPUs, of which path, gpus, processes count;
    each may take `limit_s` seconds, and `tell` hears of its figures.
    """
    tokens = work.prompts * work.group * work.new_tokens
    on = []
    for rung in counts:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            task = {"shape": shape, "engine": engine, "workload": asdict(work), "repeats": repeats, "path": rung.path}
            (folder / rank.TASK).write_text(json.dumps(task), encoding="utf-8")
            seen = _measured(rung, ["grpo_portable.bench.rank", place], folder, folder / rank.FILE, limit_s)
        if seen.get("seconds"):
            seen["tok_s"] = round(tokens / statistics.median(seen["seconds"]), 1)
        tell(seen)
        on.append(seen)
    return {"what": "rollout", "shape": shape, "engine": engine, "workload": asdict(work), **_joint(on, "tok_s")}


def bench_step(
    recipes: Sequence[tuple[Rung, Recipe]], steps: int, *, limit_s: float = LIMIT_S, tell: child.Tell = child.tell
) -> dict[str, Any]:
    """{model, path, step, device, torch, on: [{gpus, processes, micro_batch, rollout_rows, seconds, seconds_median, tok_s,
    rollout_s, rollout_tok_s}, or {..., error} with what was seen before it], times: seconds of the first over the last,
    rollout_times: rollout_tok_s of the last over the first}.

    Each recipe is settled for its rung and may take `limit_s` seconds, and `tell` hears of its figures; one step warms up.
    `rollout_s` is the slowest process's share of each step, engine's sync with the policy included.
    """
    on = []
    for rung, settled in recipes:
        recipe = replace(settled, steps=steps + 1, warmup_steps=0, bootstrap_epochs=0.0, save_every=10**6, report_to=())
        with tempfile.TemporaryDirectory() as place:
            run = create(Path(place) / "run", recipe)
            run.write_json("rung.json", {"micro_batch": rung.micro_batch})
            module = ["grpo_portable.bench.side", str(run.path), "ours"]
            seen = _measured(rung, module, run.path, run.path / side.FILE, limit_s)
        seen = {**_of_steps(seen), "micro_batch": rung.micro_batch, "rollout_rows": recipe.rollout_rows}
        tell(seen)
        on.append(seen)
    first = recipes[0][1]
    return {
        "what": "step",
        "model": Path(first.model).name if Path(first.model).exists() else first.model,
        "path": first.path,
        "step": {
            "questions": first.prompts_per_step,
            "group": first.group_size,
            "longest_completion": first.max_completion_tokens,
        },
        **_joint(on, "seconds_median"),
    }


def _of_steps(seen: dict[str, Any]) -> dict[str, Any]:
    """The figures of the steps after the first, which warms up."""
    seconds, tokens, rollout = (seen.pop(name, [])[1:] for name in ("seconds", "tokens", "rollout_s"))
    if not seconds:
        return seen
    return {
        **seen,
        "seconds": [round(s, 3) for s in seconds],
        "seconds_median": round(statistics.median(seconds), 3),
        "tok_s": round(sum(tokens) / sum(seconds), 1),
        "rollout_s": [round(s, 3) for s in rollout],
        "rollout_tok_s": round(sum(tokens) / sum(rollout), 1),
    }


def _measured(rung: Rung, module: Sequence[str], folder: Path, file: Path, limit_s: float) -> dict[str, Any]:
    """What the first of the rung's processes wrote into `file`, and {error} if they failed; with the GPUs it was on."""
    command = ranks_command.of(rung, module, threads=1)
    failed = child.run(command, folder, limit_s, ranks_command.environment(rung))
    seen = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = ("seconds", "tokens", "ready_s", "notes", "device", "torch", "error", "rollout_s")
    found = child.with_figures(failed, {key: seen[key] for key in kept if key in seen})
    return {"gpus": list(rung.gpus), "processes": rung.processes, **found}


def _joint(on: list[dict[str, Any]], figure: str) -> dict[str, Any]:
    about = next((seen for seen in on if "torch" in seen), {})
    joint = {
        "device": about.get("device"),
        "torch": about.get("torch"),
        "on": [{k: v for k, v in seen.items() if k not in ("device", "torch")} for seen in on],
        "times": _times(on, figure),
    }
    return joint if figure == "tok_s" else {**joint, "rollout_times": _times(on, "rollout_tok_s")}


def _times(on: Sequence[Mapping[str, Any]], figure: str) -> float | None:
    """How many times as fast the last is as the first, by rates or by seconds; None where either was not measured."""
    first, last = on[0].get(figure), on[-1].get(figure)
    if not first or not last:
        return None
    return round(last / first if figure.endswith("tok_s") else first / last, 3)


def joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Reports of the same work on different numbers of GPUs as one. ValueError when the work differs."""
    first = reports[0]
    for name in ("what", "shape", "engine", "workload", "path", "step"):
        if any(report.get(name) != first.get(name) for report in reports):
            raise ValueError(f"these reports are of different work: {name}")
    on = sorted((seen for report in reports for seen in report["on"]), key=lambda seen: seen["processes"])
    about = {"device": first["device"], "torch": first["torch"]}
    kept = _joint([{**about, **seen} for seen in on], "tok_s" if first["what"] == "rollout" else "seconds_median")
    return {**first, **kept}


def progress(figures: Mapping[str, Any]) -> None:
    """A line on stderr for a reader: how it went on so many GPUs."""
    count = figures["processes"]
    measured = "tok_s" in figures
    said = (
        f"{statistics.median(figures['seconds']):.2f} s" if measured else figures.get("error", "nothing was measured")
    )
    print(f"{count} GPU{'s' if count > 1 else ''}: {said}", file=sys.stderr, flush=True)


def table(report: Mapping[str, Any]) -> str:
    """The report as a few lines of text."""
    if report["what"] == "rollout":
        work = report["workload"]
        head = (
            f"{report['shape']} on {report['device']}, torch {report['torch']}, {report['engine']}: {work['prompts']} x "
            f"{work['group']} completions of {work['new_tokens']} tokens"
        )
    else:
        step = report["step"]
        head = (
            f"{report['model']} on {report['device']}, path {report['path']}, torch {report['torch']}: {step['questions']} x "
            f"{step['group']} completions of at most {step['longest_completion']} tokens"
        )
    steps = report["what"] == "step"
    lines = [head, f"{'GPUs':<8}{'s':>10}{'tok/s':>12}" + (f"{'rollout s':>12}{'tok/s':>12}" if steps else "")]
    for seen in report["on"]:
        if "tok_s" in seen:
            row = f"{seen['processes']:<8}{statistics.median(seen['seconds']):>10.2f}{seen['tok_s']:>12,.0f}"
            if steps:
                row += f"{statistics.median(seen['rollout_s']):>12.2f}{seen['rollout_tok_s']:>12,.0f}"
            lines.append(row)
        if "error" in seen:
            lines.append(f"{seen['processes']:<8}{seen['error']}")
    if report["times"]:
        rollouts = report.get("rollout_times")
        lines.append(f"{report['times']:.2f} times as fast" + (f", rollouts {rollouts:.2f} times" if rollouts else ""))
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """`rollout ...` or `step ...` with --gpus, or `join A.json B.json [--json]` of earlier ones; the exit code."""
    if list(arguments[:1]) == ["join"]:
        files = [word for word in arguments[1:] if word != "--json"]
        whole = joined([json.loads(Path(file).read_text(encoding="utf-8")) for file in files])
        print(json.dumps(whole, indent=1) if "--json" in arguments else table(whole))
        return 0
    given = _parser().parse_args(arguments)
    try:
        wanted = gpus.parsed(given.gpus) or ()
        parts = [wanted] if given.together or len(wanted) == 1 else [wanted[:1], wanted]
        report = _rollout(given, parts) if given.what == "rollout" else _step(given, parts)
    except GrpoPortableError as error:
        print("\n".join(error.shown()), file=sys.stderr)
        return error.exit_code
    print(json.dumps(report, indent=1) if given.json else table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    from grpo_portable.bench.step import ask_for_plan

    parser = argparse.ArgumentParser(prog="grpo-portable bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["rollout", "step"])
    parser.add_argument("recipe", nargs="?", help="of a step: a recipe's name or file; or give --shape")
    parser.add_argument("--gpus", required=True, help="the first of them alone, then all of them: 0,1")
    parser.add_argument("--together", action="store_true", help="all of them only, not the first one alone before")
    parser.add_argument("--shape", help=f"random weights of this shape: {', '.join(SHAPES)}")
    parser.add_argument("--engines", default="portable", help="of a rollout: portable, portable-fp8 or vllm")
    parser.add_argument("--path", help="of a step: as `path` of a recipe; the best one by default")
    ask_for_plan(parser)
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one to warm up")
    parser.add_argument("--repeats", type=int, default=3, help="measured rollouts, after one to warm up")
    for name, default in (
        ("prompts", 64),
        ("group", 16),
        ("prompt-tokens", 128),
        ("new-tokens", 256),
        ("lora-rank", 32),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=256, help="of a rollout: completions each GPU generates at once")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that each number of GPUs may take")
    parser.add_argument(
        "--json", action="store_true", help="JSON instead of a table, and on stderr as each number of GPUs ends"
    )
    return parser


def _tell(given: argparse.Namespace) -> child.Tell:
    return child.tell if given.json else progress


def _rollout(given: argparse.Namespace, parts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    shape = given.shape or "qwen3-4b"
    known(shape)
    if odd := [part for part in parts if given.prompts % len(part)]:
        raise UsageError(f"{given.prompts} prompts cannot be shared by {len(odd[0])} GPUs evenly")
    work = Workload(
        given.prompts, given.group, given.prompt_tokens, given.new_tokens, rows=given.rows, lora_rank=given.lora_rank
    )
    counts = [Rung("bf16-hf", 1, given.rows, gpus=part, processes=len(part)) for part in parts]
    return bench_rollout(shape, given.engines, work, counts, given.repeats, limit_s=given.limit, tell=_tell(given))


def _step(given: argparse.Namespace, parts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    from grpo_portable.bench.step import checkpoint

    settings = [*given.settings, *([f"path={given.path}"] if given.path else [])]

    def plan(name: str) -> list[tuple[Rung, Recipe]]:
        recipes = []
        for part in parts:
            prepared = launch.prepare(name, auto=True, overrides=settings, facts_file=given.facts, gpus=part)
            recipe, taken = prepared.settled.recipe, prepared.diagnosis.plan.gpus
            if len(taken) < len(part):
                raise UsageError(f"{len(part)} GPUs cannot share {recipe.prompts_per_step} questions a step evenly")
            mine = recipe.prompts_per_step * recipe.group_size // len(taken)
            micro_batch = math.gcd(int(recipe.micro_batch), mine)
            recipes.append(
                (
                    Rung(str(recipe.path), micro_batch, int(recipe.rollout_rows), gpus=taken, processes=len(taken)),
                    recipe,
                )
            )
        return recipes

    with checkpoint(given.recipe, given.shape, plan) as recipes:
        return bench_step(recipes, max(1, given.steps), limit_s=given.limit, tell=_tell(given))


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
