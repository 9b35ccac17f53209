"""A whole GRPO step, ours against TRL's default without vLLM: same recipe, same weights, same questions, one after the other.

`grpo-portable bench step arithmetic-embedded --steps 4 --json`. Each side makes one step to warm up; the figure is the median
of the others. Completions end where the policies end them, so tokens a step stand beside the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_portable import launch, quiet, worker
from grpo_portable.errors import GrpoPortableError
from grpo_portable.guards import StopSignal
from grpo_portable.recipe import Recipe
from grpo_portable.run import create, read_lines


def bench_step(recipe: Recipe, steps: int) -> dict[str, Any]:
    """{model, path, device, torch, step, ours: {...}, trl: {...}, times_faster}; each side: seconds of each step and their
    median, tokens a step, tokens a second, peak_gib (CUDA). `recipe` is settled; its number of steps is replaced.
    """
    import torch

    recipe = replace(recipe, steps=steps + 1, warmup_steps=0, bootstrap_epochs=0.0, save_every=10**6, report_to=())
    sides: dict[str, dict[str, Any]] = {}
    for name, train in (("ours", _ours), ("trl", _trl)):
        with tempfile.TemporaryDirectory() as folder:
            run = create(Path(folder) / "run", recipe)
            session = worker.prepare(run, {}, StopSignal())
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            seconds, tokens = train(session)
            sides[name] = _side(seconds[1:], tokens[1:])
            del session
    return {
        "model": Path(recipe.model).name if Path(recipe.model).exists() else recipe.model,
        "path": recipe.path,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and recipe.path != "cpu" else "cpu",
        "torch": torch.__version__,
        "step": {
            "questions": recipe.prompts_per_step,
            "group": recipe.group_size,
            "micro_batch": recipe.micro_batch,
            "longest_completion": recipe.max_completion_tokens,
        },
        **sides,
        "times_faster": round(sides["trl"]["seconds_median"] / sides["ours"]["seconds_median"], 2),
    }


def _side(seconds: list[float], tokens: list[float]) -> dict[str, Any]:
    import torch

    median = statistics.median(seconds)
    return {
        "seconds": [round(s, 3) for s in seconds],
        "seconds_median": round(median, 3),
        "tokens_a_step": round(statistics.mean(tokens)),
        "tokens_a_second": round(sum(tokens) / sum(seconds), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
    }


def _ours(session: worker.Session) -> tuple[list[float], list[float]]:
    try:
        worker.train_stage(session)
    finally:
        session.engine.close()
    rows = session.recipe.prompts_per_step * session.recipe.group_size
    lines = list(read_lines(session.run.metrics_file))
    return [m["step_s"] for m in lines], [m["completion_tokens"] * rows for m in lines]


def _trl(session: worker.Session) -> tuple[list[float], list[float]]:
    """TRL's own trainer with its own generation, the same arguments and the same questions."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from grpo_portable import policy, rewards
    from grpo_portable.arguments import training_arguments
    from grpo_portable.trl_trainer import GRPOTrainer

    session.engine.close()
    recipe, builder, questions = session.recipe, session.builder, session.train
    assert questions is not None
    seconds: list[float] = []
    tokens: list[float] = []

    class Quiet(GRPOTrainer):
        def _send_telemetry(self) -> None:
            """Nothing is reported to the hub."""

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:
                tokens.append(logs["completions/mean_length"] * recipe.prompts_per_step * recipe.group_size)

    rows = [{"prompt": builder.text(q.question), "gold": q.gold, "question": q.question} for q in questions.questions]
    with policy.adapter_untouched(session.model):
        trainer = Quiet(
            model=session.model,
            args=training_arguments(
                recipe, output_dir=session.run.path, dtype=session.settings.dtype, cpu=session.cpu, world=1
            ),
            reward_funcs=[
                *rewards.resolve(
                    recipe.rewards, recipe.answer_style, max_completion_tokens=recipe.max_completion_tokens
                )
            ],
            train_dataset=Dataset.from_list(rows),
            processing_class=builder.tokenizer,
            callbacks=[Clock()],
        )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return seconds, tokens


def table(report: dict[str, Any]) -> str:
    """The report as a few lines of text."""
    step = report["step"]
    lines = [
        f"{report['model']} on {report['device']}, path {report['path']}, torch {report['torch']}: "
        f"{step['questions']} x {step['group']} completions of at most {step['longest_completion']} tokens",
        f"{'':<30}{'s/step':>8}{'tokens/step':>13}{'tokens/s':>10}{'peak GiB':>10}",
    ]
    for name, title in (("ours", "grpo-portable"), ("trl", "TRL's default without vLLM")):
        side = report[name]
        peak = "" if side["peak_gib"] is None else f"{side['peak_gib']:.1f}"
        lines.append(
            f"{title:<30}{side['seconds_median']:>8.2f}{side['tokens_a_step']:>13,}{side['tokens_a_second']:>10,.0f}{peak:>10}"
        )
    return "\n".join([*lines, f"{report['times_faster']:.1f} times faster"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grpo-portable bench step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="a recipe's name or file")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one to warm up")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        quiet.libraries()
        prepared = launch.prepare(given.recipe, auto=True, overrides=given.settings)
        report = bench_step(prepared.settled.recipe, max(1, given.steps))
    except GrpoPortableError as error:
        print("\n".join(error.lines()))
        return error.exit_code
    print(json.dumps(report, indent=1) if given.json else table(report))
    return 0
