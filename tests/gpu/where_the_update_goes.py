"""Not a test: where the update of a step goes on this card, to be read by hand.

`python tests/gpu/where_the_update_goes.py [SHAPE [KEY=VALUE ...]]`, such as `qwen3-4b path=bf16-hf`. Prints what few kernels
replace, the seconds of rollouts and updates on random weights, and of the second update, from its rollout's end to the next
hand-over of weights, the kernels by their own time. `update 0` is what comes before the first rollout.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from grpo_portable import launch, quiet, worker
from grpo_portable.bench import checkpoint
from grpo_portable.rollout.scratch import place
from grpo_portable.run.folder import create
from grpo_portable.session import prepare
from grpo_portable.training.guards import StopSignal
from grpo_portable.updates.few_kernels import few_kernels

STEPS = 3  # the first warms up, the second is profiled, the third ends the second's update


def watched(engine: Any) -> Any:
    """The profile of the second update; prints seconds of rollouts and updates as they end."""
    acts = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    seen, began, count = profile(activities=acts), [time.perf_counter()], [0]
    generate, sync = engine.generate, engine.sync

    def settled(what: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"{what}: {time.perf_counter() - began[0]:.3f} s")
        began[0] = time.perf_counter()

    def generating(*args: Any, **named: Any) -> Any:
        made = generate(*args, **named)
        count[0] += 1
        settled(f"rollout {count[0]}")
        if count[0] == 2:
            seen.start()
        return made

    def synchronising(policy: Any) -> None:
        settled(f"update {count[0]}")
        if count[0] == 2:
            seen.stop()
        sync(policy)

    engine.generate, engine.sync = generating, synchronising
    return seen


def main(shape: str, settings: list[str]) -> None:
    quiet.libraries()
    with tempfile.TemporaryDirectory(dir=place(20 << 30)) as folder:
        model = Path(folder) / shape
        model.mkdir()
        checkpoint.write(shape, model)
        ready = launch.prepare(str(model / checkpoint.RECIPE_FILE), auto=True, overrides=settings)
        recipe = replace(ready.settled.recipe, steps=STEPS, warmup_steps=0, bootstrap_epochs=0.0, save_every=10**6)
        session = prepare(create(Path(folder) / "run", recipe), {}, StopSignal())
        with few_kernels(session.model) as replaced:
            print(f"in few kernels: {replaced}")
        seen = watched(session.engine)
        worker.train_stage(session)
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "qwen3-4b", sys.argv[2:])
