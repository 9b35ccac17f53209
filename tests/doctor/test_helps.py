"""Helps can work where they are given: no wheel that does not exist, no build for another card, no advice against itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from machine_cases import CU126, CU130, amd, card, driver, failed, machine, torch

from doctor.diagnosis import Diagnosis
from doctor.facts import facts_from_json
from doctor.install import install_plan, torch_requirement
from doctor.install_lines import torch_set
from doctor.plan import diagnose
from doctor.render import text

_3090 = card("NVIDIA GeForce RTX 3090", "8.6", 23.6)
_4090 = card("NVIDIA GeForce RTX 4090", "8.9", 23.5)
_5090 = card("NVIDIA GeForce RTX 5090", "12.0", 31.8)
_GT1030 = card("NVIDIA GeForce GT 1030", "6.1", 2.0)
_K80 = card("Tesla K80", "3.7", 11.2)
_RX7600 = amd("AMD Radeon RX 7600", "gfx1102", 8.0)
_MI300X = amd("MI300X", "gfx942", 192.0)
_IGPU = amd("AMD Radeon Graphics", "gfx1036", 0.5)
_NO_TORCH = {"packages": {"torch": "absent"}, "probes": {"torch_cuda": {"ok": None}, "torch_arch_list": None}}
_NOT_COMPILED = failed("Torch not compiled with CUDA enabled")
_WINDOWS = {"platform": "windows", "glibc": None}
_NVCC128 = {"state": "present", "nvcc": "12.8", "where": "PATH"}
_CUDA_13 = torch("2.13.0+cu130", CU130, {"ok": None})
_UNSLOTH = {"unsloth": "2026.6.1", "unsloth_zoo": "2026.6.1"}
_NO_TRITON = {"trl": "1.15.0", "triton": "absent"}
_TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080)"
_HUSK = {"vllm": "0.11.0", "trl": "1.16.0"}


def _amd_wheel(version: str, *targets: str) -> dict[str, Any]:
    return torch(version, list(targets), failed("HIP error: invalid device function"))


# name → facts, what the helps must say, what they must not
TABLE: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "the set is for the best card, and says so": (machine(_GT1030, _4090, **_NO_TORCH), r"for GPU 1 .*4090", "1030"),
    "and for NVIDIA's beside an integrated AMD part": (machine(_IGPU, _4090, **_NO_TORCH), "for GPU 1 .*4090", "Radeon|rocm"),
    "pip keeps torch 2.13.0+xpu unless forced": (
        machine(_3090, **torch("2.13.0+xpu", None, _NOT_COMPILED)), 'force-reinstall "torch==2.13.0"', None),
    "a ROCm build on NVIDIA is one fault, not two": (
        machine(_3090, **torch("2.9.1+rocm6.3", ["gfx1100"], {"ok": None})), "force-reinstall", "whose wheel"),
    "a CUDA build on AMD pretends nothing": (
        machine(_RX7600, driver=driver(None, None), **torch("2.13.0+cu130", CU130, {"ok": None})), "rocm", "HSA_OVERRIDE"),
    "a relative of the same generation": (
        machine(_RX7600, **_amd_wheel("2.9.1+rocm6.3", "gfx1030", "gfx1100")), "GFX_VERSION=11.0.0", "10.3.0"),
    "no relative in the wheel": (machine(_RX7600, **_amd_wheel("2.9.1+rocm6.3", "gfx1030")), "AMD's own index", "HSA_"),
    "before RDNA none will do": (
        machine(amd("MI50", "gfx906", 32.0), **_amd_wheel("2.9.1+rocm7.2", "gfx900", "gfx90a")), "AMD's own index", "HSA_"),
    "glibc first, then torch": (machine(_3090, host={"glibc": "2.17"}, **_NO_TORCH), "glibc 2.28", '"torch==|whl/cpu'),
    "driver first, then a card's build": (
        machine(_3090, driver=driver("460.32", "11.2"), **_NO_TORCH), "driver to 580", "build for .*3090"),
    "no CUDA 12 build for a 5090 below 12.8": (
        machine(_5090, driver=driver("565.57", "12.7"), **torch("2.13.0+cu130", CU130, {"ok": None})),
        "driver to 580", "built for CUDA 12"),
    "no wheel has code for Kepler": (
        machine(_K80, driver=driver("470.82", "11.4"), **_NO_TORCH), "no wheel of torch is made for Tesla K80", "525|580"),
    "nor has the wheel that is there": (
        machine(_K80, driver=driver("470.82", "11.4"), **torch("2.13.0+cu126", CU126, failed("too old"))),
        "no wheel of torch is made for Tesla K80", "525|whose wheel"),
    "another torch is no advice for the lesser card": (machine(_K80, _3090), "vllm==", "sm_37"),
    "no Intel Mac has a wheel": (
        machine(host={"platform": "darwin", "arch": "x86_64", "glibc": None}, **_NO_TORCH), "Linux container", '"torch=='),
    "an Apple Mac has one": (
        machine(host={"platform": "darwin", "arch": "arm64", "glibc": None}, **_NO_TORCH), '"torch==2.13.0"', "container"),
    "PyTorch has no ROCm wheel for Windows": (
        machine(_RX7600, host=_WINDOWS, driver=driver(None, None), **_NO_TORCH), "WSL2", "build for AMD|rocm"),
    "another Python comes before torch": (machine(_3090, host={"python": "3.15"}, **_NO_TORCH), "python 3.12", None),
    "no other vLLM helps on Windows": (
        machine(_4090, host=_WINDOWS, packages=_HUSK), "pip uninstall vllm", "vllm==|SAMPLER|nvcc|FP8 already"),
    "nor on a Mac": (
        machine(host={"platform": "darwin", "arch": "arm64", "glibc": None}, **torch("2.13.0", None, _NOT_COMPILED, **_HUSK)),
        "CPU", "vllm=="),
    "a toolkit newer than the driver wants a driver": (
        machine(_5090, driver=driver("570.86", "12.8"), toolkit=_NVCC128, **torch("2.10.0+cu128", None, vllm="0.19.1")),
        "driver to 575", "no newer than the driver"),
    "a toolkit within the driver does not": (
        machine(_5090, toolkit=_NVCC128, **torch("2.13.0+cu130", CU130, vllm="0.31.0")), "no newer than the driver", "575"),
    "the toolkit is of torch's major": (
        machine(_5090, driver=driver("570.86", "12.8"), toolkit=_NVCC128, **_CUDA_13),
        "driver to 580 or newer, then put a CUDA toolkit 13.0 first", "12-9"),
    "a newer driver does not change torch's major": (
        machine(_5090, toolkit=_NVCC128, **torch("2.11.0+cu129", None, vllm="0.25.1")), "cuda-nvcc-12-9", "cuda-nvcc-13"),
    "no vLLM fits beside an older Unsloth": (
        machine(_3090, **torch("2.11.0+cu130", CU130, **_UNSLOTH)), "a set in which everything fits", "vllm=="),
    "nor once the driver is new enough": (
        machine(_3090, driver=driver("570.86", "12.8"), **torch("2.10.0+cu128", None, **_UNSLOTH)),
        "driver to 580.*, then install a set", "vllm=="),
    "no wheel for drivers before 12": (
        machine(_3090, driver=driver("470.82", "11.4"), **_NO_TORCH), "driver to 580", "cu129"),
    "pip would keep torch 2.13.0+cu126 beside a vLLM of CUDA 13": (
        machine(_3090, **torch("2.13.0+cu126", CU126)), 'force-reinstall "torch==2.13.0" "vllm==0.31.0"', None),
    "and the right build it may keep": (machine(_3090, **torch("2.13.0+cu130", CU130)), 'install "vllm==0.31.0"', "force"),
    "a vLLM of CUDA 13 does not fit an old driver because torch is a CPU build": (
        machine(_3090, driver=driver("570.86", "12.8"), **torch("2.13.0+cpu", None, _NOT_COMPILED)),
        "driver to 580 or newer, then install it", "fits this machine"),
    "who holds an AMD card": (
        machine({**_MI300X, "free_gib": 90.0}, **torch("2.11.0+rocm7.1", ["gfx942"])), "rocm-smi", "nvidia"),
    "no vLLM of CUDA for ROCm": (
        machine(_MI300X, **torch("2.9.0+rocm7.0", ["gfx942"], vllm="0.12.0", trl="1.16.0")),
        "install-plan", "vllm==|torch=="),
    "no CUDA 13 vLLM for an old driver whose torch nobody read": (
        machine(_3090, driver=driver("535.1", "12.2"), packages={"torch": None, "vllm": "0.12.0", "trl": "1.16.0"}),
        "install-plan", "vllm==0.(2|3)"),
    "torch for Windows is not PyPI's": (
        machine(_3090, host=_WINDOWS, packages={"torch": "2.13.0+cu130", "torchao": "0.12.0"}), "Or leave it", '"torch=='),
    "PyPI's torch for aarch64 was CPU-only up to 2.9": (
        machine(card("GH200", "9.0", 94.0), host={"arch": "aarch64"}, packages={"torch": "2.11.0+cu130", "vllm": "0.12.0"}),
        "Change", 'torch==2.9'),
    "no toolkit for a vLLM that Windows cannot run": (
        machine(_5090, host=_WINDOWS, toolkit=_NVCC128), "WSL2", "apt-get|toolkit"),
    "the driver of WSL2 is Windows'": (
        machine(_3090, host={"platform": "wsl2"}, driver=driver("570.86", "12.8"), **_CUDA_13),
        r"driver in Windows \(WSL2 has none of its own\) to 580 or newer, then `wsl --shutdown` in", "driver to|reboot"),
    "also where only torch's words tell of it": (
        machine(_3090, host={"platform": "wsl2"}, **torch("2.13.0", None, failed(_TOO_OLD))),
        r"driver in Windows \(WSL2 has none", "the driver,|driver to"),
    "a TRL that does without Triton": (machine(_3090, packages=_NO_TRITON), '"trl>=1.16,<1.17"', '"triton'),
    "but not beside an Unsloth that excludes it": (
        machine(_3090, packages={"unsloth": "2026.10.9", **_NO_TRITON}),
        '(?s)install "triton".*uninstall unsloth unsloth_zoo; pip install "trl>=1.16,<1.17"', "Upgrade it"),
    "Triton is torch's": (
        {**machine(_3090, packages={"torch": "2.11.0", "unsloth": "2026.10.9", **_NO_TRITON}),
         "requires": {"torch": ["triton==3.6.0; sys_platform == 'linux'"]}}, '"triton==3.6.0"', None),
    "that of a container is the host's": (
        machine(_3090, host={"container": True}, driver=driver("570.86", "12.8"), **_CUDA_13),
        "driver on the host to 580", "driver to"),
    "that of a Jetson comes with JetPack": (
        machine(card("Orin", "8.7", 30.0), driver=driver("35.4", "11.4"), **torch("2.8.0+cu126", None, {"ok": None})),
        "JetPack", "driver to"),
    "for vLLM glibc comes before the driver": (
        machine(_3090, host={"glibc": "2.28"}, driver=driver("570.86", "12.8"), **torch("2.10.0+cu128", None)),
        "glibc 2.31", "vllm"),
    "what is missing comes in our range": (machine(_3090, packages={"trl": "absent"}), '"trl>=1.15,<1.17"', '"trl"'),
    "what is old, too": (machine(_3090, packages={"trl": "0.24.0"}), '"trl>=1.15,<1.17"', None),
    "what Unsloth pins is not changed beside it": (
        machine(_3090, packages={"trl": "0.24.0", "unsloth": "2026.6.1"}), "install-plan", '"trl>='),
    "torch is never changed by number alone": (
        machine(_3090, **torch("2.5.1+cu124", CU126, trl="0.24.0")), "install-plan", '"torch>='),
}  # fmt: skip


def judged(facts: dict[str, Any], model: str | None = "Qwen/Qwen3-0.6B") -> Diagnosis:
    return diagnose(facts_from_json(facts), model)


@pytest.mark.parametrize("name", TABLE)
def test_helps(name: str) -> None:
    facts, wanted, barred = TABLE[name]
    lines = [f"{h.text} $ {h.command}" for wall in judged(facts).walls for h in wall.help]
    assert re.search(wanted, "\n".join(lines))
    assert barred is None or [line for line in lines if re.search(barred, line)] == []


def test_another_python_is_the_first_help() -> None:
    wall = judged(machine(_3090, host={"python": "3.15"}, **_NO_TORCH)).walls[0]
    assert wall.code == "TORCH-ABSENT" and wall.help[0].command == "uv venv --python 3.12"


@pytest.mark.parametrize(
    ("facts", "model", "after"),
    [
        (machine(_K80, driver=driver("470.82", "11.4"), **_NO_TORCH), "Qwen/Qwen3-0.6B", "cpu"),
        (machine(_K80, _3090, driver=driver("470.82", "11.4"), **_NO_TORCH), "Qwen/Qwen3-0.6B", "bf16-vllm"),
        (machine(card("GTX TITAN X", "5.2", 12.0), **_NO_TORCH), "Qwen/Qwen3-0.6B", "fp16-hf"),
        (machine(_3090, host={"glibc": "2.17", "python": "3.9"}, **_NO_TORCH), "Qwen/Qwen3-0.6B", "bf16-vllm"),
        (machine(_4090, host=_WINDOWS, **_NO_TORCH), "Qwen/Qwen3-0.6B", "fp8-vllm"),
        (machine(_RX7600, host=_WINDOWS, driver=driver(None, None), **_NO_TORCH), "Qwen/Qwen3-0.6B", "bf16-hf"),
        (machine(_3090), "meta-llama/Llama-3.3-70B-Instruct", None),  # neither card nor RAM has room: no promise
        (machine(_3090, host={"ram_gib": 700.0}), "meta-llama/Llama-3.3-70B-Instruct", "cpu"),
    ],
)  # fmt: skip
def test_what_the_helps_can_bring(facts: dict[str, Any], model: str, after: str | None) -> None:
    assert judged(facts, model).after_fix == after


@pytest.mark.parametrize(
    ("host", "gpus", "why"),
    [
        ({"glibc": "2.17"}, [_3090], "glibc 2.28"),
        ({"glibc": "2.17"}, [], "glibc 2.28"),
        ({"platform": "darwin", "arch": "x86_64", "glibc": None}, [], "Intel Macs"),
    ],
)
def test_no_set_fits_and_why(host: dict[str, Any], gpus: list[dict[str, Any]], why: str) -> None:
    facts = facts_from_json(machine(*gpus, host=host, **_NO_TORCH))
    plan = install_plan(facts)
    assert torch_set(facts) is None and plan.chosen is None and plan.pip == ()
    assert why in " ".join(plan.to_text().split()) and "no GPU was found" not in plan.to_text()
    assert torch_requirement(facts)[0] == "torch==2.13.0"  # pip is the one to say no


def test_cards_of_two_makers_with_one_number() -> None:
    """Each maker's tool counts from zero; the card that torch is built for is the one the plan names."""
    facts = machine(_IGPU, _4090)
    facts["gpus"][1]["index"] = 0
    assert "runs on NVIDIA GeForce RTX 4090" in text(judged(facts))


def test_an_nvcc_of_unknown_version() -> None:
    shown = text(judged(machine(_5090, toolkit={"state": "present", "nvcc": None, "where": "PATH"})))
    assert "nvcc of unknown version (PATH)" in shown and "None" not in shown
