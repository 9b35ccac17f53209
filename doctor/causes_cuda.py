"""What a failed first CUDA call means, by its text. Error numbers are CUDA's own (driver_types.h, cudaError_t)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from doctor.diagnosis import GPU_PATHS, Help, Wall
from doctor.facts import Facts
from doctor.readings import driver_shown, driver_upgrade
from doctor.versions import Pair


@dataclass(frozen=True)
class Cause:
    """One known text: what it means, the rule and its source, what helps."""

    code: str
    pattern: re.Pattern[str]
    fact: str
    rule: str
    helps: tuple[Help, ...]
    wont_help: str | None = None


def _cause(code: str, pattern: str, fact: str, rule: str, *helps: Help, wont_help: str | None = None) -> Cause:
    return Cause(code, re.compile(pattern, re.IGNORECASE), fact, rule, helps, wont_help)


_CAUSES = (
    _cause(
        "CUDA-804",
        r"\b804\b|forward compatibility was attempted",
        "CUDA error 804: forward compatibility was attempted on a card that does not support it",
        "an image that brings a newer libcuda (cuda-compat) works on data-centre cards only (gpustack#1254)",
        Help("Upgrade the host's driver to the CUDA version of the image", None, "certain"),
        Help("Or keep the image's /usr/local/cuda/compat out of LD_LIBRARY_PATH and the linker's cache", None, "likely"),
        Help("Or start from an image of the driver's own CUDA version", None, "certain"),
        wont_help="Reinstalling torch: the library that fails comes with the image",
    ),
    _cause(
        "CUDA-802",
        r"\b802\b|system not yet initialized",
        "CUDA error 802: the system is not initialised, as on NVSwitch machines without a running fabric manager",
        "HGX and DGX boards need nvidia-fabricmanager of exactly the driver's version before CUDA starts (pytorch#35710)",
        Help("Start the fabric manager (install the package of the driver's exact version first)",
             "sudo systemctl enable --now nvidia-fabricmanager", "likely"),
        Help("In a rented container only the provider can do that: take another machine", None, "likely"),
        wont_help="Another torch or vLLM",
    ),
    _cause(
        "CUDA-803",
        r"\b803\b|unsupported display driver",
        "CUDA error 803: the CUDA libraries and the loaded driver do not belong together",
        "libcuda and the kernel module must be of one release (CUDA runtime API, cudaErrorSystemDriverMismatch)",
        Help("Reboot, so that the installed driver is the loaded one", "sudo reboot", "likely"),
        Help("In a container: remove a libcuda that came with the image", None, "likely"),
    ),
    _cause(
        "CUDA-MISMATCH",
        r"driver/library version mismatch",
        "The driver on disk and the driver in the kernel are of different versions",
        "an update replaced the libraries while the old module stayed loaded (NVML error 18)",
        Help("Reboot, so that the new driver is loaded", "sudo reboot", "certain"),
    ),
    _cause(
        "CUDA-NO-DRIVER",
        r"found no nvidia driver|libcuda\.so(?:\.1)?: cannot open|driver is not loaded|\berror 100\b|"
        r"no cuda-capable device|no cuda device|"
        r"couldn't communicate with the nvidia driver|no cuda gpus are available",
        "torch finds no working NVIDIA driver or no device that it may use",
        "CUDA needs the driver's libcuda.so.1 and access to /dev/nvidia*",
        Help("In a container: start it with the GPU and the NVIDIA container toolkit", "docker run --gpus all ...", "likely"),
        Help("On the host: install or load the driver", "sudo modprobe nvidia && nvidia-smi", "likely"),
    ),
    _cause(
        "CUDA-OUT-OF-MEMORY",
        r"out of memory|alloc_failed",
        "The card had not even the memory to start CUDA",
        "a CUDA context alone takes some 0.5 GiB",
        Help("Stop what holds the memory, then ask again",
             "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv", "certain"),
    ),
    _cause(
        "CUDA-BUSY",
        r"devices are busy or unavailable|\berror 46\b|exclusive",
        "The card is busy or in exclusive mode: another process owns it",
        "in compute mode EXCLUSIVE_PROCESS a second process gets error 46",
        Help("Stop the other process, or set the mode back", "sudo nvidia-smi --compute-mode=DEFAULT", "likely"),
    ),
    _cause(
        "CUDA-UNKNOWN-999",
        r"\b999\b|cuda unknown error",
        "CUDA error 999: the driver is in a bad state, often after sleep",
        "nvidia_uvm loses its state over suspend (pytorch#49540)",
        Help("Reload the module, or reboot", "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm", "likely"),
    ),
    _cause(
        "CUDA-NO-KERNEL",
        r"no kernel image|not compatible with the current pytorch|invalid device function|nobinaryforgpu|image is invalid",
        "torch has no kernel for this card (no sm_ entry of the card's architecture that runs there)",
        "a wheel carries code for the architectures it was built for",
        Help("Install a torch whose arch list has the card's sm_", "grpo-doctor --install-plan", "likely"),
        wont_help="A newer driver: the code would still not be in the wheel",
    ),
    _cause(
        "CUDA-PTX",
        r"unsupported toolchain|unsupported ptx|\b222\b",
        "The driver cannot compile this build's PTX",
        "PTX needs a driver as new as the compiler that wrote it (NVIDIA's compatibility guide)",
        Help("Upgrade the driver to the CUDA version of torch or newer", None, "certain"),
    ),
    _cause(
        "CUDA-LIBRARY",
        r"undefined symbol|cannot open shared object file|symbol lookup|\.dll\b|dll load failed|iJIT_NotifyEvent",
        "torch does not load: one of its libraries is missing or of another version",
        "each torch wheel needs the nvidia-* wheels (and on Windows the Visual C++ runtime) of its own metadata",
        Help("Reinstall torch with its own dependencies in a fresh environment", "grpo-doctor --install-plan", "likely"),
        Help("Check that LD_LIBRARY_PATH names no other CUDA, cuDNN or NCCL", "unset LD_LIBRARY_PATH", "try"),
    ),
)  # fmt: skip


def cuda_cause(facts: Facts, error: str) -> Wall:
    """The wall for a torch_cuda trial that failed with this text, by name where the text is known."""
    said = f'torch_cuda failed: "{error}"' if error else "torch_cuda failed without a message"
    if cause := next((c for c in _CAUSES if c.pattern.search(error)), None):
        return Wall(cause.code, GPU_PATHS, cause.fact, (said, cause.rule), cause.helps, cause.wont_help)
    if found := driver_in_text(error):
        return Wall(
            "TORCH-DRIVER",
            GPU_PATHS,
            f"The NVIDIA driver is too old for this torch: it serves CUDA {found[0]}.{found[1]}",
            (
                said,
                "a CUDA 12.x build needs driver 525 or newer, a CUDA 13.x build 580 (NVIDIA's CUDA compatibility guide)",
            ),
            (
                Help(
                    f"{driver_upgrade(facts, None)}, or take the torch build for it",
                    "grpo-doctor --install-plan",
                    "certain",
                ),
            ),
        )
    return Wall(
        "CUDA-FAILED",
        GPU_PATHS,
        "torch is installed, but its first computation on the GPU failed",
        (
            said,
            f"one small matmul in a child process is the test; {driver_shown(facts)}, "
            f"torch {facts.version('torch') or 'of unknown version'}",
        ),
        (
            Help(
                "Repeat it to see the whole traceback",
                'python -c "import torch; print(torch.ones(2).cuda() + 1)"',
                "try",
            ),
            Help("Install a matching set", "grpo-doctor --install-plan", "try"),
        ),
    )


def driver_in_text(error: str) -> Pair | None:
    """The driver's CUDA in torch's complaint: "too old (found version 12080)" → (12, 8)."""
    found = re.search(r"too old.*?found version (\d{4,6})", error)
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None
