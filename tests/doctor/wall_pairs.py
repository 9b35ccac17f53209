"""For each wall code a machine that raises it and, changed in one thing, one that does not."""

from __future__ import annotations

from typing import Any

from machine_cases import CU126, CU128, CU130, OK, amd, card, driver, failed, machine, torch, with_probes

Facts = dict[str, Any]
Pair = tuple[Facts, Facts]

_5090, _4090 = card("NVIDIA GeForce RTX 5090", "12.0", 31.8), card("NVIDIA GeForce RTX 4090", "8.9", 23.5)
_A100, _T4, _V100 = card("NVIDIA A100", "8.0", 79.2), card("Tesla T4", "7.5", 14.7), card("Tesla V100", "7.0", 31.7)
_GTX = card("NVIDIA GeForce GTX 1080", "6.1", 8.0)
_570, _550 = driver("570.133.20", "12.8"), driver("550.54.15", "12.4")
_HEALTHY = machine(_4090)
_UNTRIED: dict[str, Any] = {"ok": None}


def _cuda(error: str) -> Pair:
    return machine(_4090, **torch("2.11.0+cu130", CU130, failed(error))), _HEALTHY


def _import(error: str, **packages: Any) -> Pair:
    sections = torch("2.10.0+cu128", CU128, vllm="0.19.1", **packages)
    return machine(_A100, driver=_570, **with_probes(sections, vllm_import=failed(error))), machine(
        _A100, driver=_570, **with_probes(sections, vllm_import=OK)
    )


def _start(error: str, gpu: dict[str, Any] = _A100, **packages: Any) -> Pair:
    sections = torch("2.10.0+cu128", CU128, **{"vllm": "0.19.1", **packages})
    return machine(gpu, driver=_570, **with_probes(sections, vllm_import=OK, vllm_start=failed(error))), machine(
        gpu, driver=_570, **with_probes(sections, vllm_import=OK, vllm_start=OK)
    )


def _links(gpu: dict[str, Any], **links: Any) -> Facts:
    return {**machine(gpu, gpu), "links": links}


def _packages(raising: dict[str, Any], sparing: dict[str, Any], **sections: Any) -> Pair:
    return machine(_4090, packages=raising, **sections), machine(_4090, packages=sparing, **sections)


def _proof(name: str) -> Pair:
    return machine(_4090, probes={name: failed("RuntimeError: boom")}), machine(_4090, probes={name: OK})


def _extra(facts: Facts, **extra: Any) -> Facts:
    return {**facts, **extra}


_LAPTOP = torch("2.13.0+cpu", [], failed("no CUDA device"))
_APPLE = {**card("Apple M3 Max", None, 64.0), "vendor": "apple", "unified_memory": True}
_INTEL = {**card("Intel Arc B580", None, 12.0), "vendor": "intel"}
_VLLM = torch("2.11.0+cu130", CU130, vllm="0.25.1", flashinfer="0.6.13")
_NVCC = {"state": "present", "nvcc": "13.0", "where": "PATH"}
_SM12 = with_probes(torch("2.11.0+cu130", CU130, vllm="0.25.1", flashinfer="0.6.13"), vllm_import=OK)

PAIRS: dict[str, Pair] = {
    "GPU-NONE": (machine(**_LAPTOP), _HEALTHY),
    "GPU-INTEL": (machine(_INTEL, **_LAPTOP), machine(_INTEL, _4090)),
    "GPU-APPLE": (machine(_APPLE, host={"platform": "darwin"}, **_LAPTOP), _HEALTHY),
    "GPU-HIDDEN": (machine(_4090, env={"CUDA_VISIBLE_DEVICES": "-1"}, **torch("2.11.0+cu130", CU130, _UNTRIED)),
                   machine(_4090, env={"CUDA_VISIBLE_DEVICES": "0"})),
    "GPU-BUSY": (machine(card("NVIDIA L4", "8.9", 22.0, 9.0)), machine(card("NVIDIA L4", "8.9", 22.0, 21.0))),
    "GPU-UNIFIED": (machine(card("NVIDIA GB10", "12.1", 119.0, unified_memory=True)), _HEALTHY),
    "GPU-MIG": (machine(card("NVIDIA A100 MIG 2g.20gb", "8.0", 19.0, mig=True)), machine(_A100)),
    "GPU-ORDER": (machine(_4090, _5090), machine(_4090, _5090, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})),
    "BF16-HARDWARE": (machine(_T4), machine(_A100)),
    "FP8-HARDWARE": (machine(_A100), machine(_4090)),
    "FP8-AMD": (machine(amd("AMD Instinct MI210", "gfx90a", 64.0), **torch("2.9.1+rocm6.4", ["gfx90a"])), _HEALTHY),
    "FP8-MATMUL": (machine(_4090, probes={"fp8_matmul": failed("cutlass cannot initialize")}),
                   machine(_4090, probes={"fp8_matmul": OK})),
    "FP8-HF-UNPROVEN": (machine(_4090), machine(_A100)),
    "FP8-CUDA-129": (machine(_5090, toolkit={**_NVCC, "nvcc": "12.8"}, **_SM12), machine(_5090, toolkit=_NVCC, **_SM12)),
    "FP8-ON-THE-FLY": _packages({"vllm": "0.11.2"}, {"vllm": "0.12.0"}),
    "NVCC-ABSENT": (machine(_4090, **_VLLM), machine(_4090, toolkit=_NVCC, **_VLLM)),
    "NVCC-OLD": (machine(_4090, toolkit={**_NVCC, "nvcc": "12.4"}, **_VLLM), machine(_4090, toolkit=_NVCC, **_VLLM)),
    "NVCC-NEWER": (machine(_4090, toolkit={**_NVCC, "nvcc": "13.1"}, **_VLLM), machine(_4090, toolkit=_NVCC, **_VLLM)),
    "TORCH-ABSENT": (machine(_4090, **torch("absent", None, _UNTRIED)), _HEALTHY),
    "TORCH-CPU-BUILD": (machine(_4090, **torch("2.11.0+cpu", [], _UNTRIED)), _HEALTHY),
    "TORCH-VENDOR": (machine(_4090, **torch("2.11.0+xpu", None, failed("no XPU"))), _HEALTHY),
    "TORCH-DRIVER": (machine(_4090, driver=_570, **torch("2.11.0+cu130", CU130, _UNTRIED)),
                     machine(_4090, driver=_570, **torch("2.10.0+cu128", CU128, _UNTRIED))),
    "TORCH-ARCH": (machine(_V100, **torch("2.11.0+cu130", CU130)), machine(_V100, **torch("2.11.0+cu126", CU126))),
    "TORCH-IMPORT": (_extra(_HEALTHY, torch_import={"ok": False, "error": "killed by SIGILL"}), _HEALTHY),
    "TORCH-SLOW": (_extra(_HEALTHY, torch_import={"ok": None, "error": "no answer within 24 s"}), _HEALTHY),
    "TORCH-KERNEL": (_extra(_HEALTHY, loaded={"torch": "2.9.1+cu128"}), _extra(_HEALTHY, loaded={"torch": "2.11.0+cu130"})),
    "PTX-DRIVER": (machine(_4090, driver=_550, **torch("2.9.0+cu128", CU128)),
                   machine(_4090, driver=_570, **torch("2.9.0+cu128", CU128))),
    "CUDA-804": _cuda("Error 804: forward compatibility was attempted on non supported HW"),
    "CUDA-802": _cuda("Error 802: system not yet initialized"),
    "CUDA-803": _cuda("Error 803: system has unsupported display driver / cuda driver combination"),
    "CUDA-MISMATCH": _cuda("Driver/library version mismatch"),
    "CUDA-NO-DRIVER": _cuda("Found no NVIDIA driver on your system."),
    "CUDA-OUT-OF-MEMORY": _cuda("CUDA error: out of memory"),
    "CUDA-BUSY": _cuda("CUDA error: all CUDA-capable devices are busy or unavailable"),
    "CUDA-UNKNOWN-999": _cuda("CUDA unknown error - this may be due to an incorrectly set up environment"),
    "CUDA-NO-KERNEL": _cuda("no kernel image is available for execution on the device"),
    "CUDA-PTX": _cuda("the provided PTX was compiled with an unsupported toolchain"),
    "CUDA-LIBRARY": _cuda("ImportError: libtorch_cuda.so: undefined symbol: ncclCommWindowRegister"),
    "CUDA-FAILED": _cuda("something nobody has seen"),
    "VLLM-ABSENT": _packages({"vllm": "absent"}, {"vllm": "0.25.1"}),
    "VLLM-WINDOWS": (machine(_4090, host={"platform": "windows"}), machine(_4090, host={"platform": "wsl2"})),
    "VLLM-MACOS": ({**machine(host={"platform": "darwin"}, probes={"torch_cuda": _UNTRIED}), "gpus": None}, machine(_4090)),
    "VLLM-GLIBC": _import("version `GLIBC_2.34' not found"),
    "VLLM-NUMPY": _import("numpy.dtype size changed, may indicate binary incompatibility"),
    "VLLM-HUSK": _import("vllm is installed without its compiled code: no vllm._C for this platform"),
    "VLLM-IMPORT": _import("RuntimeError: who knows"),
    "VLLM-CUDA-LIBRARY": _import("libcudart.so.13: cannot open shared object file"),
    "VLLM-TORCHVISION": _import("operator torchvision::nms does not exist"),
    "VLLM-ABI": _import("vllm/_C.abi3.so: undefined symbol: _ZN3c10"),
    "VLLM-TRANSFORMERS": _import("cannot import name 'Foo' from 'transformers'"),
    "VLLM-DEVICE": _import("RuntimeError: Failed to infer device type"),
    "VLLM-START": _start("RuntimeError: who knows"),
    "VLLM-PTX": _start("the provided PTX was compiled with an unsupported toolchain"),
    "VLLM-PTXAS": _start("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
    "VLLM-MIG": _start("invalid literal for int() with base 10: 'MIG-...'"),
    "VLLM-NO-KERNEL": _start("no kernel image is available for execution on the device", _V100),
    "VLLM-GPU-TOO-OLD": _start("Your GPU is too old!", _GTX, torch="2.10.0+cu126"),
    "VLLM-COMPILER": _start("Failed to find C compiler"),
    "VLLM-MEMORY": _start("Free memory on device (7.3/139.7 GiB) on startup is less than desired"),
    "VLLM-OPTION": _start("Bfloat16 is only supported on GPUs with compute capability of at least 8.0", _T4),
    "VLLM-FP8-START": (machine(_4090, probes={"vllm_fp8_start": failed("boom")}), _HEALTHY),
    "VLLM-CAPABILITY": (machine(_GTX, packages={"vllm": "0.7.3"}, driver=_550), machine(_T4, packages={"vllm": "0.7.3"})),
    "VLLM-CARD-AGE": (machine(_V100, driver=_570, **torch("2.10.0+cu128", CU128, vllm="0.19.1")),
                      machine(_T4, driver=_570, **torch("2.10.0+cu128", CU128, vllm="0.19.1"))),
    "VLLM-OLD": _packages({"vllm": "0.9.2"}, {"vllm": "0.10.2"}),
    "LOCK-TRL-VLLM": _packages({"vllm": "0.12.0", "trl": "0.25.0"}, {"vllm": "0.12.0", "trl": "1.6.0"}),
    "LOCK-VLLM": _packages({"vllm": "0.31.0", "torch": "2.11.0+cu130"}, {"vllm": "0.31.0", "torch": "2.13.0+cu130"}),
    "LOCK-UNSLOTH": _packages({"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "trl": "1.16.0"},
                              {"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "trl": "1.15.0"}),
    "LOCK-UNSLOTH-VLLM": _packages({"unsloth": "2026.6.1", "unsloth_zoo": "2026.6.1", "vllm": "0.21.0"},
                                   {"unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "vllm": "0.21.0"}),
    "LOCK-TORCHAO": _packages({"torch": "2.10.0+cu128", "torchao": "0.14.0"}, {"torch": "2.10.0+cu128", "torchao": "0.16.0"}),
    "LOCK-OTHER": _packages({"trl": "1.16.0", "transformers": "4.51.3"}, {"trl": "1.16.0", "transformers": "5.17.0"}),
    "PAIR-ZOO-WARMUP": _packages({"unsloth": "2026.6.1", "unsloth_zoo": "2026.6.1", "vllm": "0.21.0"},
                                 {"unsloth": "2026.6.9", "unsloth_zoo": "2026.6.7", "vllm": "0.21.0"}),
    "PAIR-TOOL-MASK": _packages({"unsloth": "2026.3.11", "unsloth_zoo": "2026.6.1"},
                                {"unsloth": "2026.6.1", "unsloth_zoo": "2026.6.1"}),
    "BNB-ABSENT": _packages({"bitsandbytes": "absent"}, {"bitsandbytes": "0.50.2"}),
    "BNB-FAILED": (machine(_4090, probes={"bnb_4bit": failed("Configured CUDA binary not found: libbitsandbytes_cuda131.so")}),
                   machine(_4090, probes={"bnb_4bit": OK})),
    "BNB-BUILD": (machine(_GTX, packages={"bitsandbytes": "0.50.2"}), machine(_4090, packages={"bitsandbytes": "0.50.2"})),
    "UNSLOTH-IMPORT": (machine(_4090, packages={"unsloth": "2026.1.2"}, probes={"unsloth_import": failed("xformers")}),
                       machine(_4090, packages={"unsloth": "2026.1.2"}, probes={"unsloth_import": OK})),
    "STACK-INCOMPLETE": _packages({"trl": "absent"}, {"trl": "1.16.0"}),
    "STACK-RANGE": _packages({"trl": "0.24.0"}, {"trl": "1.15.0", "transformers": "5.8.0", "vllm": "0.31.0+cu129"}),
    "TRL-TRITON": _packages({"trl": "1.15.0", "triton": "absent"}, {"trl": "1.16.0", "triton": "absent"}),
    "PYTHON-RANGE": (machine(_4090, host={"python": "3.10"}), machine(_4090, host={"python": "3.14"})),
    "SHM-SMALL": (machine(_A100, _A100, host={"shm_gib": 0.06}), machine(_A100, host={"shm_gib": 0.06})),
    "NCCL-ABSENT": (_links(_A100, nccl=""), _links(_A100, nccl="2.28.9")),
    "GPU-PEERS": (_links(_4090, peers=False), _links(_4090, peers=True)),
    "GPU-NVLINK": (_links(_A100, nvlinks=[12, 0]), _links(_A100, nvlinks=[12, 12])),
    "HUB-OFFLINE": (machine(_4090, env={"HF_HUB_OFFLINE": "1"}), machine(_4090, env={"HF_HUB_OFFLINE": "0"})),
    "CC-ABSENT": (_extra(_HEALTHY, compilers={"cc": "absent"}), _extra(_HEALTHY, compilers={"cc": "13.3.0"})),
    "PROOF-ATTENTION": _proof("attention"),
    "PROOF-LORA": _proof("lora_step"),
    "PROOF-QLORA": _proof("qlora_step"),
    "PROOF-CPU": _proof("cpu_step"),
    "PROOF-GRAPH": _proof("cuda_graph"),
}  # fmt: skip
# Walls about a model: machine, the model that raises it, one that does not.
MODEL_PAIRS: dict[str, tuple[Facts, str, str]] = {
    "MODEL-GGUF": (machine(_4090, packages={"gguf": "absent"}), "Qwen3-4B-Q8_0.gguf", "Qwen/Qwen3-4B"),
    "MODEL-QUANTISED": (machine(_A100, **with_probes(torch("2.10.0+cu128", CU128, vllm="0.19.1"), vllm_start=OK)),
                        "unsloth/Qwen3-4B-bnb-4bit", "Qwen/Qwen3-4B"),
    "MODEL-CPU": (machine(**_LAPTOP), "Qwen/Qwen3-4B", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "MODEL-FLOAT16": (machine(_T4), "google/gemma-3-1b-it", "Qwen/Qwen3-0.6B"),
}  # fmt: skip
