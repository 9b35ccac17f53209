"""Our own machines: see `machine_cases`. Grouped by what is at issue."""

from __future__ import annotations

from machine_cases import (
    BF16,
    CU126,
    CU128,
    CU130,
    FP8,
    GPU,
    OK,
    VLLM,
    Case,
    amd,
    card,
    driver,
    failed,
    machine,
    torch,
    with_probes,
)  # fmt: skip

_5090 = card("NVIDIA GeForce RTX 5090", "12.0", 31.8)
_4090 = card("NVIDIA GeForce RTX 4090", "8.9", 23.5)
_3090 = card("NVIDIA GeForce RTX 3090", "8.6", 23.6)
_T4 = card("Tesla T4", "7.5", 14.7)
_V100 = card("Tesla V100-SXM2-32GB", "7.0", 31.7)
_A100 = card("NVIDIA A100-SXM4-80GB", "8.0", 79.2)
_H100 = card("NVIDIA H100 80GB HBM3", "9.0", 79.2)
_H200 = card("NVIDIA H200", "9.0", 139.7)
_570, _550, _535, _470 = (
    driver("570.133.20", "12.8"), driver("550.54.15", "12.4"), driver("535.183.01", "12.2"), driver("470.256.02", "11.4"),
)  # fmt: skip
_NVCC128 = {"state": "present", "nvcc": "12.8.93", "where": "PATH"}
_NOTHING = dict.fromkeys(
    ("torch", "vllm", "trl", "transformers", "peft", "bitsandbytes", "accelerate", "datasets"), "absent"
)


def _no_card() -> list[Case]:
    cpu = torch("2.13.0+cpu", [], failed("no CUDA device"))
    return [
        Case("container-without-gpus", "rule", machine(host={"container": True}, **cpu), ("cpu",), GPU, ("gpu",),
             codes=("GPU-NONE",), after="cpu"),
        Case("hidden-by-variable", "rule", machine(_4090, env={"CUDA_VISIBLE_DEVICES": ""},
             **torch("2.11.0+cu130", CU130, failed("No CUDA GPUs are available"))), ("cpu",), GPU, ("cuda_visible_devices",),
             codes=("GPU-HIDDEN",), after="fp8-vllm"),
        Case("intel-igpu-beside-nvidia", "rule", machine(
             {**card("Intel Iris Xe", None, 8.0), "vendor": "intel"}, card("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9", 8.0)),
             ("bf16-hf", "fp8-hf"), VLLM, ("vllm", "install"), open=("bf16-hf", "qlora-hf")),
        Case("old-mac-with-amd", "rule", machine(amd("AMD Radeon Pro 5500M", None, 8.0), host={"platform": "darwin"},
             **torch("2.2.2", [], failed("Torch not compiled with CUDA enabled"))), ("cpu",), GPU, ("gpu",),
             codes=("GPU-NONE",)),
        Case("torch-absent-5090-570", "rule", machine(_5090, driver=driver("570.86", "12.8"), toolkit=_NVCC128,
             packages=_NOTHING, probes={"torch_cuda": {"ok": None}, "torch_arch_list": None}), (None,), (*GPU, "cpu"),
             ("torch", "install", "cu128"), codes=("TORCH-ABSENT", "FP8-CUDA-129"), after="fp8-vllm"),
        Case("torch-absent-t4", "rule", machine(_T4, driver=_550, packages=_NOTHING,
             probes={"torch_cuda": {"ok": None}, "torch_arch_list": None}), (None,), (*GPU, "cpu"), ("torch", "install"),
             codes=("TORCH-ABSENT", "BF16-HARDWARE"), after="fp16-vllm"),
        Case("torch-absent-laptop", "rule", machine(packages=_NOTHING, driver=driver(None, None),
             probes={"torch_cuda": {"ok": None}, "torch_arch_list": None}), (None,), (*GPU, "cpu"), ("torch", "whl/cpu"),
             after="cpu"),
    ]  # fmt: skip


def _driver() -> list[Case]:
    return [
        Case("h200-fabric-manager", "huggingface/huggingface_hub#4134", machine(_H200, driver=driver("580.126.09", "13.0"),
             **torch("2.9.1+cu128", CU128, failed("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet "
             "initialized"))), ("cpu",), GPU, ("802",), codes=("CUDA-802",), after="fp8-vllm"),
        Case("3090-compat-image", "hpcaitech/ColossalAI#4381", machine(_3090, driver=driver("515.65.01", "11.7"),
             **torch("1.12.1+cu116", None, failed("Error 804: forward compatibility was attempted on non supported HW"))),
             ("cpu",), GPU, ("804",), codes=("CUDA-804",)),
        Case("update-without-reboot", "rule", machine(_3090, **torch("2.11.0+cu130", CU130,
             failed("Failed to initialize NVML: Driver/library version mismatch"))), ("cpu",), GPU, ("reboot",),
             codes=("CUDA-MISMATCH",)),
        Case("driver-470-torch-cu121", "rule", machine(_A100, driver=_470, **torch("2.5.1+cu121", CU126, {"ok": None})),
             ("cpu",), GPU, ("525", "11.4"), codes=("TORCH-DRIVER",)),
        Case("h100-forward-compat-works", "rule: a passed trial outranks the driver rule", machine(_H100, driver=_535,
             **torch("2.11.0+cu130", CU130)), ("bf16-hf", "fp8-hf"), VLLM, ("vllm",), "Qwen/Qwen3-4B", open=("bf16-hf",)),
        Case("untagged-torch-is-unknown", "rule: unknown is not no", machine(_4090, driver=_570,
             **torch("2.11.0", None, {"ok": None})), ("bf16-hf", "fp8-hf"), VLLM, ("vllm",), open=("bf16-hf",)),
        Case("driver-by-branch-only", "rule", machine(_4090, driver=driver("560.35.03", None),
             **torch("2.13.0+cu130", CU130, {"ok": None})), ("cpu",), GPU, ("580", "12.6"), codes=("TORCH-DRIVER",)),
        Case("no-driver-in-container", "rule", machine(card("NVIDIA card without a working driver", None, None),
             driver=driver(None, None), **torch("2.11.0+cu130", CU130, failed("Found no NVIDIA driver on your system"))),
             ("cpu",), GPU, ("driver",), codes=("CUDA-NO-DRIVER",)),
    ]  # fmt: skip


def _wheels() -> list[Case]:
    return [
        Case("v100-torch-cu130", "pytorch PR 175253", machine(_V100, **torch("2.11.0+cu130", CU130,
             failed("CUDA error: no kernel image is available for execution on the device"))), ("cpu",), GPU,
             ("torch", "sm_", "cu126"), codes=("TORCH-ARCH",), after="fp16-hf"),
        Case("v100-beside-5090", "rule: the best card decides", machine(_V100, _5090, driver=_570,
             **torch("2.11.0+cu128", CU130)), ("bf16-hf", "fp8-hf"), VLLM, ("vllm",), open=("bf16-hf",), codes=("GPU-ORDER",)),
        Case("gtx750ti-no-wheel", "rule", machine(card("NVIDIA GeForce GTX 750 Ti", "5.0", 2.0), driver=_570,
             **torch("2.8.0+cu128", CU128, failed("no kernel image is available"))), ("cpu",), GPU, ("torch", "sm_50")),
        Case("b300-family-code", "rule: sm_100f runs on 10.3", machine(card("NVIDIA B300", "10.3", 275.0),
             **torch("2.13.0+cu130", ["sm_80", "sm_90a", "sm_100f", "sm_120"])), ("bf16-hf", "fp8-hf"), VLLM, ("vllm",),
             "Qwen/Qwen3-4B"),
        Case("b300-exact-code", "rule: sm_100a does not", machine(card("NVIDIA B300", "10.3", 275.0),
             **torch("2.13.0+cu130", ["sm_80", "sm_90a", "sm_100a", "sm_120"])), ("cpu",), GPU, ("torch", "sm_103")),
        Case("ptx-that-the-driver-compiles", "rule", machine(_5090, driver=_570,
             **torch("2.7.0+cu126", ["sm_80", "sm_90", "compute_90"])), ("bf16-hf", "fp8-hf"), VLLM, ("vllm",)),
        Case("ptx-newer-than-the-driver", "rule", machine(_5090, driver=_570,
             **torch("2.9.0+cu129", ["sm_80", "sm_90", "compute_90"])), ("cpu",), GPU, ("torch", "sm_120")),
        Case("rocm-torch-on-nvidia", "rule", machine(_4090, **torch("2.9.1+rocm6.4", ["gfx1100"], failed("no HIP device"))),
             ("cpu",), GPU, ("torch", "rocm"), codes=("TORCH-VENDOR",), after="fp8-vllm"),
        Case("gh200-cpu-wheel", "pytorch#160162", machine(card("NVIDIA GH200 480GB", "9.0", 94.5), host={"arch": "aarch64"},
             **torch("2.8.0+cpu", [], failed("Torch not compiled with CUDA enabled"))), ("cpu",), GPU, ("torch", "cpu"),
             codes=("TORCH-CPU-BUILD",), after="fp8-vllm"),
        Case("rx580-not-in-rocm-wheel", "rule", machine(amd("AMD Radeon RX 580", "gfx803", 8.0), driver=driver(None, None),
             **torch("2.9.1+rocm6.4", ["gfx906", "gfx1030", "gfx1100"], failed("hipErrorNoBinaryForGpu"))), ("cpu",), GPU,
             ("torch", "gfx803")),
    ]  # fmt: skip


def _amd() -> list[Case]:
    rocm = {"driver": driver(None, None)}
    return [
        Case("mi300x-with-vllm", "vLLM docs, ROCm wheels", machine(
             amd("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 191.5), **rocm,
             **with_probes(torch("2.9.1+rocm7.0", ["gfx90a", "gfx942"], vllm="0.18.0+rocm700"), vllm_import=OK, vllm_start=OK)),
             ("fp8-vllm",), (), (), "Qwen/Qwen3-4B", open=("bf16-vllm",)),
        Case("rx6800-no-vllm", "rule: AMD bf16-hf", machine(amd("AMD Radeon RX 6800", "gfx1030", 16.0), **rocm,
             **torch("2.9.1+rocm6.4", ["gfx906", "gfx1030", "gfx1100"])), ("bf16-hf",), VLLM, ("vllm",)),
        Case("vega64", "rule: gfx900 has no bf16 either", machine(amd("AMD Radeon RX Vega 64", "gfx900", 8.0), **rocm,
             **torch("2.5.1+rocm6.2", ["gfx900", "gfx906"])), ("fp16-hf",), (*VLLM, *BF16), ("bf16", "gfx900")),
        Case("strix-halo", "rule: unified memory without a figure is the system's", machine(
             amd("AMD Radeon 8060S", "gfx1151", None, unified_memory=True), host={"ram_gib": 128.0}, **rocm,
             **torch("2.9.1+rocm7.1", ["gfx1151"])), ("bf16-hf",), VLLM, ("vllm",), "Qwen/Qwen3-8B", codes=("GPU-UNIFIED",)),
    ]  # fmt: skip


def _vllm_import() -> list[Case]:
    old = torch("2.8.0+cu128", CU128, vllm="0.11.0")
    return [
        Case("husk-on-windows", "vllm#32738", machine(_4090, host={"platform": "windows", "glibc": None},
             **with_probes(torch("2.9.1+cu128", CU128, vllm="0.11.0"), vllm_import=failed("No module named 'vllm._C'"))),
             ("bf16-hf", "fp8-hf"), VLLM, ("windows",), codes=("VLLM-WINDOWS",), after="fp8-vllm"),
        Case("numpy-2-under-vllm", "rule", machine(_3090, driver=_570, **with_probes(old,
             vllm_import=failed("ImportError: numpy.core.multiarray failed to import"))), ("bf16-hf",), (*VLLM, *FP8),
             ("numpy",), codes=("VLLM-NUMPY",)),
        Case("abi-of-another-torch", "vllm#13608", machine(_A100, driver=_570, **with_probes(
             torch("2.10.0+cu128", CU128, vllm="0.15.1"), vllm_import=failed(
             "vllm/_C.abi3.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameERKSsb"))), ("bf16-hf",), (*VLLM, *FP8),
             ("vllm", "torch ==2.9.1"), codes=("VLLM-ABI",)),
        Case("device-not-recognised", "trl#2816", machine(_A100, driver=_550, **with_probes(
             torch("2.5.1+cu124", CU126, vllm="0.7.2", trl="0.15.1"), vllm_start=failed("NotImplementedError: "
             "is_async_output_supported is not implemented"))), ("bf16-hf",), (*VLLM, *FP8), ("vllm", "start"),
             codes=("VLLM-DEVICE",)),
        Case("guilty-package-by-its-path", "rule", machine(_A100, driver=_570, **with_probes(old, vllm_import=failed(
             "site-packages/xgrammar/matcher.py: TypeError: unsupported operand"))), ("bf16-hf",), (*VLLM, *FP8),
             ("xgrammar",), codes=("VLLM-IMPORT",)),
        Case("old-glibc-but-imports", "rule: the tag is no proof", machine(_A100, driver=_570, host={"glibc": "2.31"},
             **with_probes(torch("2.10.0+cu128", CU128, vllm="0.19.1"), vllm_import=OK)), ("bf16-vllm",), FP8, ("8.9",)),
    ]  # fmt: skip


def _vllm_start() -> list[Case]:
    return [
        Case("wsl-4060ti-no-nvcc", "vllm#49497", machine(card("NVIDIA GeForce RTX 4060 Ti", "8.9", 16.0),
             driver=driver("596.49", "13.2"), host={"platform": "wsl2", "glibc": "2.43"}, **with_probes(
             torch("2.11.0+cu130", CU130, vllm="0.25.1", flashinfer="0.6.15.post1"), vllm_import=OK, vllm_start=failed(
             "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"))),
             ("fp8-vllm", "bf16-vllm", "bf16-hf"), (), (), codes=("VLLM-OPTION", "NVCC-ABSENT"), open=VLLM),
        Case("h100-transformers-5", "VsonicV/es-at-scale#41", machine(
             _H100, driver=_570, host={"python": "3.10"}, **with_probes(torch("2.8.0+cu128", CU128, vllm="0.11.0",
             transformers="5.1.0"), vllm_import=OK, vllm_start=failed(
             "AttributeError: Qwen2Tokenizer has no attribute all_special_tokens_extended"))), ("bf16-hf", "fp8-hf"), VLLM,
             ("transformers", "start"), codes=("VLLM-TRANSFORMERS",), after="fp8-vllm"),
        Case("python310-vllm026", "vllm#49920", machine(_4090, host={"python": "3.10"}, **with_probes(
             torch("2.11.0+cu130", CU130, vllm="0.26.0", transformers="5.13.0"), vllm_import=OK, vllm_start=failed(
             "AttributeError: 'NoneType' object has no attribute 'start'"))), ("bf16-hf", "fp8-hf"), VLLM, ("vllm", "start"),
             codes=("VLLM-START", "PYTHON-RANGE")),
        Case("l4-no-room-for-cache", "rule: memory is the verdict, not a wall", machine(card("NVIDIA L4", "8.9", 22.05),
             **with_probes(torch("2.11.0+cu130", CU130, vllm="0.25.1"), vllm_import=OK, vllm_start=failed(
             "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"))),
             ("bf16-hf", "fp8-hf"), (), (), codes=("VLLM-MEMORY",), open=VLLM),
        Case("t4-v1-engine", "vllm#15853", machine(_T4, driver=_550, **with_probes(torch("2.6.0+cu124", CU126, vllm="0.8.3"),
             vllm_import=OK, vllm_start=failed("VLLM_USE_V1=1 is not supported with Compute Capability < 8.0."))),
             ("fp16-vllm", "fp16-hf"), (*BF16, *FP8), ("7.5", "bf16"), codes=("VLLM-OPTION",), open=("fp16-vllm",)),
        Case("uuid-not-a-number", "vllm#41848", machine(_A100, driver=_570, env={"CUDA_VISIBLE_DEVICES": "GPU-..."},
             **with_probes(torch("2.10.0+cu128", CU128, vllm="0.19.1"), vllm_import=OK, vllm_start=failed(
             "ValueError: invalid literal for int() with base 10: 'GPU-...'"))), ("bf16-hf",), (*VLLM, *FP8), ("uuid", "start"),
             codes=("VLLM-MIG",)),
        Case("no-compiler", "rule", machine(_A100, driver=_570, **with_probes(torch("2.10.0+cu128", CU128, vllm="0.19.1"),
             vllm_import=OK, vllm_start=failed("RuntimeError: Failed to find C compiler. Please specify via CC environment "
             "variable"))), ("bf16-hf",), (*VLLM, *FP8), ("compiler", "start"), codes=("VLLM-COMPILER",), after="bf16-vllm"),
        Case("pascal-untried", "vLLM docs: 7.0", machine(card("NVIDIA GeForce GTX 1080 Ti", "6.1", 11.0), driver=_550,
             **with_probes(torch("2.5.1+cu124", CU126, vllm="0.7.3"), vllm_import=OK)), ("fp16-hf",), (*VLLM, *BF16, *FP8),
             ("6.1", "vllm"), codes=("VLLM-CAPABILITY",), after="fp16-hf"),
        Case("shm-of-docker", "vllm#789", machine(_A100, _A100, driver=_570, host={"shm_gib": 0.0625, "container": True},
             **with_probes(torch("2.10.0+cu128", CU128, vllm="0.19.1"), vllm_import=OK, vllm_start=failed(
             "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"))), ("bf16-vllm", "bf16-hf"), FP8,
             ("8.9",), codes=("SHM-SMALL", "VLLM-OPTION"), open=("bf16-vllm",)),
    ]  # fmt: skip


def _fp8() -> list[Case]:
    return [
        Case("5060-laptop-torch-128", "rule: no nvcc, torch's CUDA decides", machine(
             card("NVIDIA GeForce RTX 5060 Laptop GPU", "12.0", 8.0), driver=_570, **with_probes(
             torch("2.9.0+cu128", CU128, vllm="0.13.0", flashinfer="0.5.3"), vllm_import=OK)), ("bf16-vllm",), ("fp8-vllm",),
             ("12.9",), codes=("FP8-CUDA-129", "NVCC-ABSENT")),
        Case("5090-flashinfer-072", "flashinfer 0.7.2.post1, compilation_context.py", machine(_5090,
             toolkit=_NVCC128, **with_probes(torch("2.14.0+cu130", CU130, vllm="0.33.0", flashinfer="0.7.2.post1"),
             vllm_import=OK)), ("fp8-vllm",), (), (),
             open=("fp8-vllm",)),
        Case("gb10-flashinfer-072", "the same: 12.1 still asks 12.9", machine(
             card("NVIDIA GB10", "12.1", None, unified_memory=True), toolkit=_NVCC128,
             host={"ram_gib": 119.0, "arch": "aarch64"}, **with_probes(torch("2.14.0+cu130", [*CU130, "sm_121"],
             vllm="0.33.0", flashinfer="0.7.2.post1"), vllm_import=OK)),
             ("bf16-vllm",), ("fp8-vllm",), ("12.9", "nvcc"), codes=("FP8-CUDA-129", "GPU-UNIFIED")),
        Case("toolkit-unknown", "rule: unknown is not no", machine(_5090, toolkit={"state": "unknown"}, driver=_570,
             **with_probes(torch("2.9.0+cu128", CU128, vllm="0.13.0"), vllm_import=OK)), ("fp8-vllm",), (), (),
             open=("fp8-vllm",)),
        Case("4090-fp8-kernel-missing", "unsloth#3902", machine(_4090, **with_probes(torch("2.11.0+cu130", CU130,
             vllm="0.25.1"), vllm_import=OK, vllm_start=OK, fp8_matmul=failed("cutlass cannot initialize"))), ("bf16-vllm",),
             FP8, ("fp8", "matmul"), codes=("FP8-MATMUL",)),
    ]  # fmt: skip


def _locks() -> list[Case]:
    return [
        Case("kaggle-h100-unsloth", "unsloth#4541", machine(_H100, driver=_570, **with_probes(torch("2.10.0+cu128", CU128,
             vllm="0.18.0", unsloth="2026.3.10", unsloth_zoo="2026.3.4", trl="0.24.0", transformers="4.57.6"), vllm_import=OK,
             vllm_start=failed("RuntimeError: FlashInfer failed to JIT-compile: ninja (build tool) not found."))),
             ("bf16-hf", "fp8-hf"), VLLM, ("trl",), codes=("LOCK-TRL-VLLM", "VLLM-OPTION"), after="fp8-vllm"),
        Case("trl-0152-vllm-080", "trl#3115", machine(_A100, driver=_550, **with_probes(torch("2.6.0+cu124", CU126,
             vllm="0.8.0", trl="0.15.2"), vllm_import=OK)), ("bf16-hf",), (*VLLM, *FP8), ("trl",), codes=("LOCK-TRL-VLLM",)),
        Case("trl-017-vllm-07", "trl#3304", machine(_A100, driver=_550, **with_probes(torch("2.5.1+cu124", CU126,
             vllm="0.7.3", trl="0.17.0"), vllm_import=OK, vllm_start=failed("TypeError: EngineArgs.__init__() got an "
             "unexpected keyword argument 'worker_extension_cls'"))), ("bf16-hf",), (*VLLM, *FP8),
             ("trl", "worker_extension_cls"),
             codes=("LOCK-TRL-VLLM",)),
        Case("local-tag-is-no-excess", "rule: strip +cu129", machine(_H100, **with_probes(torch("2.13.0+cu129", CU130,
             vllm="0.31.0+cu129", trl="1.16.0", transformers="5.17.0"), vllm_import=OK, vllm_start=OK)), ("fp8-vllm",), (), (),
             open=VLLM),
        Case("unsloth-and-vllm-apart", "unsloth#4851", machine(_A100, driver=_570, **with_probes(torch("2.10.0+cu128", CU128,
             vllm="0.20.2", unsloth="2026.6.1", unsloth_zoo="2026.6.1", trl="0.24.0"), vllm_import=failed(
             "ImportError: libcudart.so.13: cannot open shared object file"))), ("bf16-hf",), (*VLLM, *FP8), ("vllm", "13"),
             codes=("LOCK-UNSLOTH-VLLM", "VLLM-CUDA-LIBRARY")),
        Case("unsloth-alone-warns", "rule: closes nothing", machine(_4090, **with_probes(torch("2.14.0+cu130", CU130,
             unsloth="2026.9.14", unsloth_zoo="2026.9.9", trl="1.16.0"), unsloth_import=failed("AssertionError"))),
             ("bf16-hf", "fp8-hf"), VLLM, ("vllm",), codes=("LOCK-UNSLOTH", "UNSLOTH-IMPORT"), open=("bf16-hf",)),
    ]  # fmt: skip


def _bnb_and_memory() -> list[Case]:
    return [
        Case("orin-nano-bnb", "bitsandbytes#1930", machine(
             card("Orin (Jetson Orin Nano)", "8.7", 7.4, 6.2, unified_memory=True),
             driver=driver("540.4.0", "12.6"), host={"arch": "aarch64", "os": "JetPack 6.2, L4T 36.4", "ram_gib": 7.4},
             **with_probes(torch("2.5.0a0+872d972e41.nv24.08", ["sm_87"], bitsandbytes="0.46.1"), bnb_4bit=failed(
             "RuntimeError: Error named symbol not found at line 233 in file /src/csrc/ops.cu"))), ("bf16-hf",),
             (*VLLM, *FP8, "qlora-hf"), ("bitsandbytes", "8.9"), codes=("BNB-FAILED",), after="bf16-hf"),
        Case("8gb-without-bnb", "rule", machine(card("NVIDIA GeForce RTX 4060", "8.9", 8.0), **torch("2.11.0+cu130", CU130,
             bitsandbytes="absent")), ("cpu",), (*VLLM, "qlora-hf"), ("bitsandbytes", "install"), "Qwen/Qwen3-4B",
             codes=("BNB-ABSENT",), after="qlora-hf"),
        Case("busy-4090", "rule: free memory, not total", machine(card("NVIDIA GeForce RTX 4090", "8.9", 23.5, 2.0),
             **torch("2.11.0+cu130", CU130)), ("cpu",), VLLM, ("vllm",), "Qwen/Qwen3-4B", codes=("GPU-BUSY",),
             after="fp8-vllm", open=("bf16-hf", "qlora-hf")),
        Case("mig-1g10gb", "vLLM PR 41776", machine(card("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "8.0", 79.2, mig=True),
             driver=_570, **torch("2.10.0+cu128", CU128)), ("qlora-hf",), (*VLLM, *FP8), ("8.9", "vllm"), "Qwen/Qwen3-4B",
             codes=("GPU-MIG",)),
        Case("total-only-too-small", "rule: a total bounds what is free", machine(
             card("NVIDIA GeForce RTX 3050", "8.6", 4.0, free_gib=None), **torch("2.11.0+cu130", CU130)), ("cpu",),
             (*VLLM, *FP8), ("8.9",), "Qwen/Qwen3-8B"),
        Case("70b-on-a-laptop", "rule: nothing fits", machine(card("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9", 8.0),
             host={"ram_gib": 16.0}, **torch("2.11.0+cu130", CU130)), (None,), VLLM, ("vllm",),
             "meta-llama/Llama-3.1-70B-Instruct", open=("bf16-hf", "cpu")),
        Case("weak-card-free-strong-card-busy", "rule: each card by itself", machine(
             card("NVIDIA TITAN RTX", "7.5", 24.0), card("NVIDIA GeForce RTX 3070", "8.6", 8.0, 1.0), **torch("2.11.0+cu130",
             CU130)), ("fp16-hf",), VLLM, ("vllm",), "Qwen/Qwen3-4B"),
    ]  # fmt: skip


def ours() -> list[Case]:
    return [
        *_no_card(), *_driver(), *_wheels(), *_amd(), *_vllm_import(), *_vllm_start(), *_fp8(), *_locks(), *_bnb_and_memory(),
    ]  # fmt: skip
