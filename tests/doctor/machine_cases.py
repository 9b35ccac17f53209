"""Machines for tests: the handed cases (`machines/*.json`) and more of our own, each judged by hand against the same policy.

`ours()` are varied from rules and from public threads (named in `source`): another card, driver, version or error text.
A case says which paths may be chosen, which must be closed, what the closing walls must mention, and what follows the fix.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VLLM = ("fp8-vllm", "bf16-vllm", "fp16-vllm")
FP8 = ("fp8-vllm", "fp8-hf")
BF16 = ("bf16-vllm", "bf16-hf")
GPU = ("fp8-vllm", "bf16-vllm", "fp16-vllm", "fp8-hf", "bf16-hf", "fp16-hf", "qlora-hf")

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU128 = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
OK = {"ok": True, "error": None}

_BASE: dict[str, Any] = {
    "schema": 1,
    "host": {"platform": "linux", "arch": "x86_64", "glibc": "2.35", "python": "3.12", "ram_gib": 64.0},
    "driver": {"version": "580.95.05", "cuda": "13.0"},
    "toolkit": {"state": "absent"},
    "packages": {"torch": "2.11.0+cu130", "vllm": "absent", "unsloth": "absent", "unsloth_zoo": "absent"},
    "probes": {"torch_cuda": OK, "torch_arch_list": CU130},
    "env": {},
}


@dataclass(frozen=True)
class Case:
    id: str
    source: str
    facts: dict[str, Any]
    path_any_of: tuple[str | None, ...]
    closed: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    model: str | None = "Qwen/Qwen3-0.6B"
    codes: tuple[str, ...] = ()  # walls that must be raised
    after: str | None = None  # after_fix, where the case is about it
    open: tuple[str, ...] = field(default=())


def failed(error: str) -> dict[str, Any]:
    return {"ok": False, "error": error}


def card(
    name: str, capability: str | None, total: float | None, free: float | None = None, **more: Any
) -> dict[str, Any]:
    """One NVIDIA card, idle unless `free` says otherwise."""
    free = total - 0.4 if free is None and total is not None and "free_gib" not in more else free
    return {"index": 0, "vendor": "nvidia", "name": name, "compute_capability": capability, "total_gib": total,
            "free_gib": free, "mig": False, "unified_memory": False, **more}  # fmt: skip


def amd(name: str, gfx: str | None, total: float | None, **more: Any) -> dict[str, Any]:
    return {**card(name, None, total), "vendor": "amd", "gfx": gfx, **more}


def machine(*gpus: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """A facts file: a healthy CUDA 13 machine without vLLM, with the sections given laid over it."""
    facts = copy.deepcopy(_BASE)
    facts["gpus"] = [{**gpu, "index": i} for i, gpu in enumerate(gpus)]
    for section, values in sections.items():
        facts[section] = {**facts.get(section, {}), **values}
    return facts


def driver(version: str | None, cuda: str | None) -> dict[str, Any]:
    return {"version": version, "cuda": cuda}


def torch(version: str, arch: list[str] | None, cuda: dict[str, Any] = OK, **packages: Any) -> dict[str, Any]:
    """Sections for a torch and what else is installed; probes other than torch's are added by the case."""
    return {"packages": {"torch": version, **packages}, "probes": {"torch_cuda": cuda, "torch_arch_list": arch}}


def with_probes(sections: dict[str, Any], **probes: dict[str, Any]) -> dict[str, Any]:
    return {**sections, "probes": {**sections["probes"], **probes}}


def handed() -> list[Case]:
    """The cases that came with the project: real machines from public reports."""
    found = []
    for path in sorted((Path(__file__).parent / "machines").glob("*.json")):
        raw = json.loads(path.read_text())
        want = raw["expect"]
        found.append(
            Case(
                raw["id"],
                raw["source"],
                raw["facts"],
                tuple(want["path_any_of"]),
                tuple(want["closed"]),
                tuple(want["mentions"]),
                raw["model"],
            )
        )
    return found
