"""AMD, Intel and Apple: cards from /sys, rocminfo, the Windows display list or the chip's name."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from doctor.facts import Gpu
from doctor.probes_host import GIB, run_tool

_PCI_VENDOR = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}


def gfx_name(version: int) -> str | None:
    """KFD's gfx_target_version as the compiler's name: 90006 -> gfx906, 90010 -> gfx90a, 110001 -> gfx1101."""
    if version <= 0:
        return None
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def amd_cards(root: Path = Path("/")) -> list[Gpu]:
    """AMD cards that compute (KFD nodes with a gfx version), memory from the amdgpu driver; rocminfo where /sys is silent."""
    gpus: list[Gpu] = []
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda p: p.name.zfill(4)):
        properties = dict(re.findall(r"^(\w+) (\d+)$", _read(node / "properties"), re.MULTILINE))
        gfx = gfx_name(int(properties.get("gfx_target_version", 0)))
        if gfx is None:  # the CPU is a node too
            continue
        drm = root / f"sys/class/drm/renderD{properties.get('drm_render_minor', '')}/device"
        total, used = _number(drm / "mem_info_vram_total"), _number(drm / "mem_info_vram_used")
        gpus.append(
            Gpu(
                index=len(gpus),
                vendor="amd",
                name=_read(drm / "product_name").strip() or f"AMD {gfx}",
                gfx=gfx,
                total_gib=None if total is None else round(total / GIB, 2),
                free_gib=None if total is None or used is None else round((total - used) / GIB, 2),
                mig=False,
                unified_memory=int(properties.get("cpu_cores_count", 0)) > 0,  # an APU's node holds cores as well
            )
        )
    return gpus or (_rocminfo() if (root / "dev/kfd").exists() or (root / "dev/dxg").exists() else [])


def _rocminfo() -> list[Gpu]:
    code, text = run_tool("rocminfo")
    return parse_rocminfo(text) if code == 0 else []


def parse_rocminfo(text: str) -> list[Gpu]:
    """The GPU agents of rocminfo's text."""
    gpus: list[Gpu] = []
    for agent in re.split(r"^\s*Agent \d+\s*$", text, flags=re.MULTILINE)[1:]:
        gfx = re.search(r"^\s*Name:\s*(gfx\w+)", agent, re.MULTILINE)
        name = re.search(r"^\s*Marketing Name:\s*(\S.*?)\s*$", agent, re.MULTILINE)
        sizes = [int(s) for s in re.findall(r"Segment:\s*GLOBAL.*?\n\s*Size:\s*(\d+)", agent)]
        if gfx:
            total = round(max(sizes) / 2**20, 2) if sizes else None  # rocminfo counts KiB
            gpus.append(
                Gpu(
                    len(gpus),
                    "amd",
                    name.group(1) if name else f"AMD {gfx.group(1)}",
                    None,
                    gfx.group(1),
                    total,
                    None,
                    False,
                )
            )
    return gpus


def pci_vendors(root: Path = Path("/")) -> list[str]:
    """Vendors of the display and 3D controllers on the PCI bus, with or without a driver."""
    vendors = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(device / "class").startswith("0x03"):
            vendor = _PCI_VENDOR.get(_read(device / "vendor").strip())
            if vendor:
                vendors.append(vendor)
    return vendors


def intel_cards(xpu: Sequence[Any], root: Path = Path("/")) -> list[Gpu]:
    """Intel GPUs as torch's XPU build saw them, else as the PCI bus shows them (no memory figures then)."""
    if xpu:
        return [
            Gpu(i, "intel", d.get("name"), None, None, _gib(d.get("total")), _gib(d.get("free")), False, False)
            for i, d in enumerate(xpu)
        ]
    found = [v for v in pci_vendors(root) if v == "intel"]
    return [Gpu(i, "intel", "Intel graphics", mig=False) for i, _ in enumerate(found)]


def apple_card() -> list[Gpu]:
    """The GPU of an Apple chip, which shares the system's memory; none on an Intel Mac."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return []
    _, name = run_tool("sysctl", "-n", "machdep.cpu.brand_string")
    _, size = run_tool("sysctl", "-n", "hw.memsize")
    total = int(size) / GIB if size.strip().isdigit() else None
    total_gib = None if total is None else round(total, 2)
    return [Gpu(0, "apple", name.strip() or "Apple GPU", total_gib=total_gib, mig=False, unified_memory=True)]


def windows_cards() -> list[Gpu]:
    """Display adapters by the names Windows gives them; the last resort where no driver library answers."""

    class Device(ctypes.Structure):
        _fields_ = [
            ("cb", ctypes.c_ulong),
            ("name", ctypes.c_wchar * 32),
            ("text", ctypes.c_wchar * 128),
            ("state", ctypes.c_ulong),
            ("id", ctypes.c_wchar * 128),
            ("key", ctypes.c_wchar * 128),
        ]

    names: list[str] = []
    index = 0
    device = Device(cb=ctypes.sizeof(Device))
    while ctypes.windll.user32.EnumDisplayDevicesW(None, index, ctypes.byref(device), 0):  # type: ignore[attr-defined]
        if device.text not in names:
            names.append(device.text)
        index += 1
    return [Gpu(i, v, n, mig=False) for i, (v, n) in enumerate((vendor_of(n), n) for n in names) if v]


def vendor_of(name: str) -> str | None:
    """The vendor in an adapter's name, None for a virtual one."""
    lower = name.lower()
    for vendor, words in {"nvidia": ("nvidia",), "amd": ("amd", "radeon"), "intel": ("intel",)}.items():
        if any(word in lower for word in words):
            return vendor
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _gib(size: Any) -> float | None:
    return round(size / GIB, 2) if isinstance(size, (int, float)) else None
