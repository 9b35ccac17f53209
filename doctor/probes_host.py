"""The machine around the cards: platform, memory, glibc, container; and the three environment variables that matter."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from doctor.facts import Host
from doctor.ledger import Ledger
from doctor.privacy import scrub

ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HF_HUB_OFFLINE")
_ARCH = {"amd64": "x86_64", "x64": "x86_64"}
GIB = 2**30


def host(ledger: Ledger) -> Host:
    """What is known of the machine; each part on its own, so that one that cannot be read hides no other."""
    place = ledger.total("host.platform", _platform)
    return Host(
        platform=place,
        arch=ledger.total(
            "host.arch", lambda: _ARCH.get(platform.machine().lower(), platform.machine().lower()) or None
        ),
        os=ledger.total("host.os", _os_name),
        glibc=ledger.total("host.glibc", lambda: _glibc(ledger)) if place in ("linux", "wsl2") else None,
        python=platform.python_version(),
        ram_gib=ledger.total("host.ram_gib", lambda: _ram_gib(ledger)),
        shm_gib=ledger.total("host.shm_gib", _shm_gib),
        container=ledger.total("host.container", lambda: _container(os.environ, Path("/"))),
        free_gib=ledger.total("host.free_gib", available_gib),
    )


def environment(env: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """The values the contract lists, None where unset, UUIDs taken out; nothing else of the environment is recorded."""
    return {name: None if (value := env.get(name)) is None else scrub(value) for name in ENVIRONMENT}


def _platform() -> str | None:
    if sys.platform == "linux":
        return "wsl2" if is_wsl2(_read("/proc/version")) else "linux"
    return {"win32": "windows", "cygwin": "windows", "darwin": "darwin"}.get(sys.platform)


def is_wsl2(proc_version: str) -> bool:
    """WSL 2 runs Microsoft's own Linux kernel; WSL 1 (no GPU) says Microsoft too, with a 4.4 kernel."""
    text = proc_version.lower()
    return "microsoft" in text and "version 4.4.0" not in text


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _os_name() -> str | None:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}".strip()
    if sys.platform == "win32":
        return f"Windows {platform.release()} ({platform.version()})"
    return linux_name(_read("/etc/os-release"), _read("/etc/nv_tegra_release"), os.environ) or platform.system() or None


def linux_name(os_release: str, tegra: str, env: Mapping[str, str]) -> str | None:
    """The distribution's own name, with what changes the advice: Colab, Kaggle, NVIDIA's L4T on a Jetson."""
    found = re.search(r"^PRETTY_NAME=[\"']?(.*?)[\"']?\s*$", os_release, re.MULTILINE)
    name = found.group(1) if found else None
    l4t = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", tegra)
    if l4t:
        return f"L4T R{l4t[1]}.{l4t[2]}" + (f" ({name})" if name else "")
    service = "Google Colab" if "COLAB_RELEASE_TAG" in env else "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in env else None
    return f"{service} ({name})" if service and name else service or name


def _glibc(ledger: Ledger) -> str | None:
    name, version = platform.libc_ver()
    if name == "glibc" and version:
        return version
    ledger.unknown("host.glibc", f"the C library is {name or 'not glibc'}, for which most wheels are not built")
    return None


def _ram_gib(ledger: Ledger) -> float | None:
    total = (
        _windows_memory()[0] if sys.platform == "win32" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    limit = cgroup_limit(Path("/"))
    if limit is not None and limit < total:
        ledger.source("host.ram_gib", f"the container's limit (the host has {total / GIB:.1f} GiB)")
        total = limit
    return round(total / GIB, 2)


def cgroup_limit(root: Path) -> int | None:
    """The memory limit of this control group in bytes, None when there is none (v2, then v1)."""
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / name).strip()
        if text.isdigit() and int(text) < 2**60:  # v1 says "no limit" with a number near 2**63
            return int(text)
    return None


def available_gib() -> float | None:
    """Memory a program could have now, page cache included; what a unified-memory card can use. None where nobody says."""
    found = _windows_memory()[1] if sys.platform == "win32" else room(Path("/"))
    return None if found is None else round(found / GIB, 2)


def room(root: Path) -> int | None:
    """Bytes that Linux calls available, or what this control group's limit leaves where that is less."""
    said = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    system = int(said[1]) * 1024 if said else None
    return min((left for left in (system, _cgroup_room(root)) if left is not None), default=None)


def _cgroup_room(root: Path) -> int | None:
    """The limit less what is used, of which file pages are given up when others need the room."""
    limit = cgroup_limit(root)
    if limit is None:
        return None
    for usage, counts, prefix in (
        ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", ""),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "sys/fs/cgroup/memory/memory.stat", "total_"),
    ):
        used = _read(root / usage).strip()
        if used.isdigit():
            files = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", _read(root / counts), re.MULTILINE)
            return max(0, min(limit, limit - int(used) + sum(map(int, files))))
    return limit


def _windows_memory() -> tuple[int, int]:
    """All of the machine's memory, and what of it is free, in bytes."""

    class Status(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *(
                (name, ctypes.c_ulonglong)
                for name in ("total", "free", "p_total", "p_free", "v_total", "v_free", "ext")
            ),
        ]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.total), int(status.free)


def _shm_gib() -> float | None:
    if not os.path.isdir("/dev/shm"):
        return None
    stat = os.statvfs("/dev/shm")
    return round(stat.f_blocks * stat.f_frsize / GIB, 3)


def _container(env: Mapping[str, str], root: Path) -> bool | None:
    if sys.platform != "linux":
        return False
    marks = (root / ".dockerenv", root / "run/.containerenv", root / "singularity", root / ".singularity.d")
    if any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in env or "container" in env:
        return True
    groups = _read(root / "proc/1/cgroup") + _read(root / "proc/self/mountinfo")
    return any(word in groups for word in ("docker", "kubepods", "containerd", "libpod", "/lxc/"))


def run_tool(*command: str, timeout_s: float = 5) -> tuple[int | None, str]:
    """Exit code and output (both streams) of a small program; (None, why) when it cannot be run or does not answer."""
    path = shutil.which(command[0])
    if path is None:
        return None, f"{os.path.basename(command[0])} was not found"
    try:
        done = subprocess.run(
            [path, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return None, f"{os.path.basename(command[0])} did not answer within {timeout_s:g} s"
    except OSError as e:
        return None, scrub(f"{os.path.basename(command[0])} could not be run: {e.strerror or e}")
    return done.returncode, done.stdout + done.stderr
