"""One process of `bench rollout --gpus`: `python -m grpo_portable.bench.rank FOLDER`, started through `ranks.py`.

Reads task.json, rolls out its share of the prompts, and writes what all of them took into figures.json: the seconds from the
moment all were ready until the last had ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_portable import quiet
from grpo_portable.bench.policy import random_policy
from grpo_portable.bench.rollout import engine_of, notes_of, timer
from grpo_portable.bench.shapes import Workload, config_of
from grpo_portable.run import processes

TASK, FILE = "task.json", "figures.json"


def measure(task: dict[str, Any], mine: processes.Processes, device: Any) -> dict[str, Any]:
    """{seconds of each rollout, ready_s, notes, device, torch}; `ready_s` of the slowest process, from weights to the warm-up's
    end.
    """
    import torch

    work = Workload(**task["workload"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = config_of(task["shape"])
    prompts = (
        np.random.default_rng(work.seed).integers(1, config.vocab_size, (work.prompts, work.prompt_tokens)).tolist()
    )
    part = len(prompts) // mine.count
    share = prompts[mine.rank * part :][:part]
    work = replace(work, prompts=part, rows=min(work.width, part * work.group), seed=work.seed + mine.rank)
    began = time.perf_counter()
    if task["engine"] == "vllm":
        from grpo_portable.rollout.vllm import bench_vllm

        seen = bench_vllm(
            config,
            share,
            work.group,
            work.new_tokens,
            rows=work.width,
            repeats=task["repeats"],
            meet=mine.wait,
            several=mine.count > 1,
        )
        seconds, notes = seen["seconds"], ["no adapter"]
    else:
        policy, notes = random_policy(config, "dense", work.lora_rank, 0, device, dtype)
        rollout = engine_of(task["engine"], policy, work)
        once = timer(rollout, share, work, device)
        once(None)
        began, ready = time.perf_counter(), time.perf_counter() - began
        seen = {"ready_s": ready}
        seconds = [_together(mine, once) for _ in range(task["repeats"])]
        notes += notes_of(rollout)
    slowest = [max(took) for took in zip(*mine.gather(seconds), strict=True)]
    return {
        "seconds": [round(s, 4) for s in slowest],
        "ready_s": round(max(mine.gather(seen["ready_s"])), 2),
        "notes": notes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def _together(mine: processes.Processes, once: Callable[[int | None], float]) -> float:
    mine.wait()
    return once(None)


def main() -> int:
    import torch

    folder = Path(sys.argv[1])
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    quiet.libraries()
    cpu = task["path"] == "cpu"
    mine = processes.join(cpu=cpu)
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    seen = measure(task, mine, device)
    if mine.is_main:
        (folder / FILE).write_text(json.dumps(seen), encoding="utf-8")
    mine.wait()
    return 0


if __name__ == "__main__":
    from grpo_portable.worker import leave

    leave(main())
