"""What the driver says through NVML, and libcuda's own version. In a child because a wedged driver hangs its callers.

UUIDs told here are for matching CUDA's order with NVML's only: `doctor.probes` drops them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from doctor.trials import describe, stage, tell


def nvml() -> None:
    """Tells libcuda (e.g. 13000), driver, cuda, devices and, where something could not be had, why."""
    stage("libcuda")
    tell("libcuda", _libcuda_version())
    stage("pynvml")
    try:
        import pynvml
    except ImportError:
        tell("why", "nvidia-ml-py is not installed")
        return
    stage("nvmlInit")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        tell("nvml_error", getattr(e, "value", None))
        tell("why", f"NVML: {describe(e)}")
        return
    stage("driver")
    tell("driver", _ask(pynvml, pynvml.nvmlSystemGetDriverVersion))
    tell("cuda", _ask(pynvml, _cuda_version(pynvml)))
    devices = []
    for index in range(_ask(pynvml, pynvml.nvmlDeviceGetCount) or 0):
        stage(f"device {index}")
        devices.append(_device(pynvml, index))
        tell("devices", devices)


def _libcuda_version() -> int | None:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))  # needs no cuInit and no device
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 else None


def _cuda_version(pynvml: Any) -> Callable[[], int]:
    def ask() -> int:
        try:
            return pynvml.nvmlSystemGetCudaDriverVersion_v2()
        except pynvml.NVMLError:  # no libcuda to ask, or an NVML older than the call
            return pynvml.nvmlSystemGetCudaDriverVersion()

    return ask


def _ask(pynvml: Any, call: Callable[..., Any], *args: Any) -> Any:
    """What the call returns, or None where this driver, card or permission does not give it."""
    try:
        value = call(*args)
    except (pynvml.NVMLError, AttributeError, OSError, ValueError):
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _device(pynvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as e:  # off the bus, or hidden from this container
        return {"nvml_index": index, "why": describe(e)}
    mig = _ask(pynvml, pynvml.nvmlDeviceGetMigMode, handle)
    return {
        "nvml_index": index,
        **_described(pynvml, handle),
        "mig": bool(mig and mig[0]),
        "display": _flag(_ask(pynvml, pynvml.nvmlDeviceGetDisplayActive, handle)),
        "nvlinks": _nvlinks(pynvml, handle),
        "slices": _slices(pynvml, handle) if mig and mig[0] else [],
        "holders": _holders(pynvml, handle),
    }


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _nvlinks(pynvml: Any, handle: Any) -> int:
    """Active NVLinks of a card; 0 where it has none."""
    most = getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)
    return sum(_ask(pynvml, pynvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(most))


def _described(pynvml: Any, handle: Any) -> dict[str, Any]:
    memory = _ask(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "name": _ask(pynvml, pynvml.nvmlDeviceGetName, handle),
        "uuid": _ask(pynvml, pynvml.nvmlDeviceGetUUID, handle),
        "capability": _ask(pynvml, pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        "total": getattr(memory, "total", None),
        "free": getattr(memory, "free", None),
    }


def _slices(pynvml: Any, handle: Any) -> list[dict[str, Any]]:
    slices = []
    for i in range(_ask(pynvml, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
        if part is not None:
            slices.append(_described(pynvml, part))
    return slices


def _holders(pynvml: Any, handle: Any) -> list[dict[str, Any]]:
    """Programs that hold this card's memory: name and bytes (None where the driver hides it, as on WDDM and WSL)."""
    seen: dict[int, int | None] = {}
    for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in _ask(pynvml, getattr(pynvml, call, None) or (lambda _: []), handle) or []:
            seen[process.pid] = process.usedGpuMemory
    own = {os.getpid(), os.getppid()}
    return [
        {"name": _program(pynvml, pid), "bytes": used, "doctor": pid in own, "pid": pid}
        for pid, used in seen.items()
        if pid != os.getpid()
    ]


def _program(pynvml: Any, pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as f:  # any bytes may be a name
            return f.read().strip()
    except OSError:  # not Linux, or a process of another container
        path = _ask(pynvml, pynvml.nvmlSystemGetProcessName, pid)
        return os.path.basename(str(path).replace("\\", "/")) if path else "a process outside this container"
