"""One side of `bench step` in a process of its own: `python -m grpo_portable.bench.side RUN_DIR ours|trl`.

Writes side.json into the run folder: seconds and tokens of each step, peaks of memory; on a failure, or at SIGTERM, what there
is until then, and `error`.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_portable import quiet
from grpo_portable.bench.memory import DevicePeak, PhasePeaks
from grpo_portable.run.folder import RunFolder, open_run, read_lines
from grpo_portable.run.processes import here

FILE = "side.json"


def measure(run: RunFolder, side: str, stop: Any) -> dict[str, Any]:
    """{seconds, tokens, rollout_s (of ours), allocated_peak_gib, device_used_gib, device, uuid, torch} of the run's recipe, and
    `error` if it failed or was asked to stop. `stop`: a StopSignal.
    """
    import torch

    cuda = torch.cuda.is_available() and run.recipe().path != "cpu"
    peaks = PhasePeaks(cuda=cuda)
    steps: dict[str, list[float]] = {"seconds": [], "tokens": [], "rollout_s": []}
    seen: dict[str, Any] = {**steps, "torch": torch.__version__}
    try:
        with DevicePeak(cuda=cuda) as peak, stop.installed():
            {"ours": _ours, "trl": _trl}[side](run, peaks, steps, stop)
    except (Exception, KeyboardInterrupt) as error:  # the result of this side; the other one is measured all the same
        text = " ".join(str(error).split())
        seen["error"] = f"{type(error).__name__}: {text[:500]}"
        traceback.print_exc()
    seen |= {"allocated_peak_gib": peaks.gib, "device_used_gib": peak.gib or None, "device": "cpu", "uuid": None}
    if cuda:
        about = torch.cuda.get_device_properties(0)
        seen |= {"device": about.name, "uuid": str(about.uuid)}
    return seen


def _ours(run: RunFolder, peaks: PhasePeaks, steps: dict[str, list[float]], stop: Any) -> None:
    from grpo_portable.session import prepare
    from grpo_portable.worker import train_stage

    session = prepare(run, {}, stop)
    peaks.end("load")
    engine: Any = session.engine
    engine.sync = _then(lambda: peaks.end("update"), engine.sync)
    engine.generate = _then(None, engine.generate, lambda: peaks.end("rollout"))
    rows = session.recipe.prompts_per_step * session.recipe.group_size
    try:
        train_stage(session)
    finally:
        peaks.end("update")
        for line in read_lines(run.metrics_file):
            steps["seconds"].append(line["step_s"])
            steps["tokens"].append(line["completion_tokens"] * rows)
            steps["rollout_s"].append(line["rollout_s"])
        engine.close()


def _then(before: Callable[[], None] | None, call: Callable[..., Any], after: Callable[[], None] | None = None) -> Any:
    def called(*args: Any, **named: Any) -> Any:
        if before is not None:
            before()
        try:
            return call(*args, **named)
        finally:
            if after is not None:
                after()

    return called


def _trl(run: RunFolder, peaks: PhasePeaks, steps: dict[str, list[float]], stop: Any) -> None:
    """TRL's own trainer with its own generation, the same arguments and the same questions."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from grpo_portable import rewards
    from grpo_portable.models import policy
    from grpo_portable.session import prepare
    from grpo_portable.training.arguments import training_arguments
    from grpo_portable.training.trl_trainer import GRPOTrainer, Silent

    session = prepare(run, {}, stop)
    session.engine.close()
    gc.collect()
    recipe, builder, questions = session.recipe, session.builder, session.train
    assert questions is not None
    rows = recipe.prompts_per_step * recipe.group_size
    peaks.end("load")

    class Quiet(Silent, GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
            peaks.end("update")
            try:
                return super()._generate_single_turn(*args, **named)
            finally:
                peaks.end("rollout")

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps["seconds"].append(time.perf_counter() - self.began)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:
                steps["tokens"].append(logs["completions/mean_length"] * rows)

    given = [{"prompt": builder.text(q.question), "gold": q.gold, "question": q.question} for q in questions.questions]
    with policy.adapter_untouched(session.model):
        trainer = Quiet(
            model=session.model,
            args=training_arguments(recipe, output_dir=run.path, dtype=session.settings.dtype, cpu=session.cpu),
            reward_funcs=[
                *rewards.resolve(
                    recipe.rewards, recipe.answer_style, max_completion_tokens=recipe.max_completion_tokens
                )
            ],
            train_dataset=Dataset.from_list(given),
            processing_class=builder.tokenizer,
            callbacks=[Clock()],
        )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        peaks.end("update")


def main() -> int:
    from grpo_portable.training.guards import StopSignal

    mine = here()  # of several processes the first one tells
    run = open_run(Path(sys.argv[1]), mine.rank)
    quiet.libraries()
    seen = measure(run, sys.argv[2], StopSignal())
    if mine.is_main:
        run.write_json(FILE, seen)
    return 1 if "error" in seen else 0


if __name__ == "__main__":
    raise SystemExit(main())
