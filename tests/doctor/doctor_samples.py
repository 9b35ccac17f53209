"""Diagnoses and facts made by hand, so that what is shown can be tested apart from what is judged."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from doctor.diagnosis import PATHS, VLLM_PATHS, About, Diagnosis, Help, Memory, PathState, Plan, Reason, Wall
from doctor.facts import Driver, Facts, Gpu, Host, Probe, Toolkit

RTX_5090 = Gpu(0, "nvidia", "NVIDIA GeForce RTX 5090", "12.0", None, 31.8, 31.0, False, False)


def facts(**changes: Any) -> Facts:
    values: dict[str, Any] = {
        "host": Host("linux", "x86_64", "Ubuntu 22.04", "2.35", "3.12", 64.0, 0.0625, True),
        "gpus": (RTX_5090,),
        "driver": Driver("570.86", "12.8"),
        "toolkit": Toolkit("present", "12.8.61", "/usr/local/cuda"),
        "packages": MappingProxyType({"torch": "2.10.0+cu128", "vllm": "absent", "bitsandbytes": "0.49.2"}),
        "probes": MappingProxyType(
            {"torch_cuda": Probe(True), "fp8_matmul": Probe(False, "cutlass cannot initialize")}
        ),
        "torch_arch_list": ("sm_90", "sm_120"),
        "env": MappingProxyType({"CUDA_VISIBLE_DEVICES": None, "HF_HUB_OFFLINE": "1"}),
        "extra": MappingProxyType(
            {
                "memory_holders": [{"gpu": 0, "name": "Xorg", "gib": 0.8}],
                "sources": {"driver": "NVML"},
                "unknown": {"probes.vllm_start": "nobody tried"},
            }
        ),
    }
    return Facts(**(values | changes))


NO_VLLM = Wall(
    "VLLM-ABSENT",
    VLLM_PATHS,
    "vLLM is not installed",
    ("packages.vllm = absent", "the vLLM paths draw their rollouts with vLLM"),
    (
        Help(
            "Install the set for a CUDA 12.8 driver",
            'pip install "torch==2.10.0+cu128" "vllm==0.19.1" "trl==0.24.0" "transformers==4.57.6" '
            '--extra-index-url "https://download.pytorch.org/whl/cu128"',
            "certain",
        ),
    ),
    "A newer vLLM: its torch needs driver 580",
)
OLD_NVCC = Wall(
    "FP8-CUDA-129",
    ("fp8-vllm",),
    "flashinfer finds nvcc 12.8.61, and SM 12.x needs CUDA 12.9 or newer",
    ("toolkit.nvcc = 12.8.61",),
    (Help("Install toolkit 12.9 and point CUDA_HOME at it", "export CUDA_HOME=/usr/local/cuda-12.9", "likely"),),
)
UNPROVEN = Wall("FP8-HF-UNPROVEN", ("fp8-hf",), "nobody has measured FP8 without vLLM to be faster on this card")
NO_FP16 = Wall("FP16-NEEDLESS", ("fp16-hf",), "the card has bfloat16")
SMALL_SHM = Wall("SHM-SMALL", (), "/dev/shm has 0.06 GiB")


def diagnosis(path: str | None = "bf16-hf", *, walls: tuple[Wall, ...] | None = None, **changes: Any) -> Diagnosis:
    walls = (NO_VLLM, OLD_NVCC, UNPROVEN, NO_FP16, SMALL_SHM) if walls is None else walls
    paths: Mapping[str, PathState] = {
        p: PathState(not any(p in w.closes for w in walls), True, tuple(w.code for w in walls if p in w.closes))
        for p in PATHS
    }
    ledger = {"weights": 7.5, "kv_cache": 2.2, "activations": 1.9, "workspace": 1.4, "optimizer": 0.5}
    plan = Plan(path, "portable", "bfloat16", None, (0,), "Qwen/Qwen3-4B", Memory(13.5, 31.0, ledger), 4, 64,
                (Reason(About.UNKNOWN, "bfloat16, since compute capability 12.0 >= 8.0"),
                 Reason(About.CLOSED, "fp8-hf is closed (FP8-HF-UNPROVEN)", "FP8-HF-UNPROVEN")))  # fmt: skip
    values: dict[str, Any] = {"plan": plan, "walls": walls, "paths": paths, "after_fix": "fp8-vllm", "facts": facts()}
    return Diagnosis(**(values | changes))
