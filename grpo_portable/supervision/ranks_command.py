"""How a rung's processes are started: the command around a module, and the environment they get.

The parent's half, torch-free; `ranks.py`, which the command names, is the workers' half and brings torch in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from grpo_portable.supervision.ladder import Rung

# the processes of one machine talk to each other only: nothing listens to the network, and no host name need resolve
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def of(rung: Rung, module: Sequence[str], *, threads: int | None = None) -> list[str]:
    """accelerate's launch (`ranks.py`) around `module` with its arguments; `threads` of each process, on a CPU."""
    words = [sys.executable, "-m", "grpo_portable.ranks", "--num_processes", str(rung.processes), "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    if rung.processes > 1:
        words += ["--main_process_port", "0"]  # any that is free: another run may be at work
    if rung.path == "cpu":
        words += ["--cpu", "--num_cpu_threads_per_process", str(threads or 1)]
    return [*words, "-m", *module]


def environment(rung: Rung) -> dict[str, str]:
    """This process's environment with what a worker needs; settings the user made are kept."""
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin at barriers made a step ten times slower on a busy machine
        "ACCELERATE_USE_CPU": "true" if rung.path == "cpu" else "false",
        "PYTORCH_CUDA_ALLOC_CONF": "" if rung.path.endswith("-vllm") else "expandable_segments:True",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **(_LOOPBACK if rung.processes > 1 and sys.platform == "linux" else {}),
    }
    return {**{k: v for k, v in wanted.items() if v}, **os.environ, **_visible(rung.gpus)}


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a worker: the rung's GPUs, counted among those the user left visible; {} to change nothing."""
    if not gpus:
        return {}
    shown = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown[gpu] if gpu < len(shown) else str(gpu) for gpu in gpus)}
