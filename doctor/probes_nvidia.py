"""NVIDIA's side: the driver and cards through NVML, then nvidia-smi; the toolkit in the order flashinfer looks for it.

What NVML says is joined with what torch sees (`cards`): CUDA numbers the cards its own way, hides some, and alone knows
the memory of a MIG slice. UUIDs serve this join and go no further.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doctor.child import Outcome
from doctor.facts import Driver, Gpu, Toolkit
from doctor.ledger import Ledger
from doctor.probes_host import GIB, run_tool

# Exit codes of nvidia-smi, from its manual, and NVML's error numbers, which are the same family.
_SMI_EXIT = {
    4: "no permission to ask the driver",
    6: "no card was found",
    8: "a card's power cables are not attached",
    9: "the NVIDIA driver is not loaded",
    10: "the driver has an interrupt problem with a card",
    12: "the NVML library is missing",
    13: "the NVML library is older than nvidia-smi",
    14: "a card's infoROM is corrupt",
    15: "a card has fallen off the bus or cannot be reached",
    18: "the NVML library and the loaded kernel driver are of different versions; a reboot loads the new one",
}
_SMI_PLACES = ("/usr/lib/wsl/lib", "/usr/bin", "/usr/local/nvidia/bin", r"C:\Windows\System32")
_SMI_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "memory.free",
    "mig.mode.current",
    "compute_cap",
)
_SMI_NOTHING = ("", "[N/A]", "N/A", "[Not Supported]", "Not Supported", "[Insufficient Permissions]")

Device = Mapping[str, Any]


def driver_and_devices(seen: Outcome, ledger: Ledger) -> tuple[Driver, list[Device] | None]:
    """The driver, and the cards in NVML's order (None: nobody could say) from the NVML trial, else from nvidia-smi."""
    told = seen.told
    if "driver" in told and isinstance(told.get("devices", []), list):
        ledger.source("driver", "NVML")
        ledger.source("gpus", "NVML")
        return Driver(told["driver"], cuda_version(told.get("cuda") or told.get("libcuda"))), list(
            told.get("devices", [])
        )
    why = told.get("why") or f"NVML: {seen.error or 'no answer'}"
    driver, devices = _smi(ledger, why)
    if devices is None and told.get("nvml_error") in _SMI_EXIT:
        ledger.unknown("driver", f"{_SMI_EXIT[told['nvml_error']]} (NVML error {told['nvml_error']})")
    cuda = cuda_version(told.get("libcuda")) or driver.cuda
    return Driver(driver.version or _proc_driver_version(), cuda), devices


def cuda_version(number: Any) -> str | None:
    """13000 as "13.0", 12080 as "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) and number > 0 else None


def _proc_driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", text)
    return found.group(1) if found else None


def _smi(ledger: Ledger, why: str) -> tuple[Driver, list[Device] | None]:
    tool = shutil.which("nvidia-smi") or next(
        (p for d in _SMI_PLACES if (p := shutil.which("nvidia-smi", path=d))), None
    )
    if tool is None:
        ledger.unknown("driver", f"{why}; nvidia-smi was not found")
        return Driver(), None
    fields: Sequence[str] = _SMI_FIELDS
    code, text = run_tool(tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if code == 2:  # drivers before 510 do not know compute_cap and refuse the whole query
        fields = _SMI_FIELDS[:-1]
        code, text = run_tool(tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if code != 0:
        meaning = _SMI_EXIT.get(code or -1, text.strip().splitlines()[0] if text.strip() else "no message")
        ledger.unknown("driver", f"{meaning} (nvidia-smi exit {code}); {why}")
        return Driver(), ([] if code == 6 else None)
    devices, version = parse_smi(text, fields)
    ledger.source("driver", f"nvidia-smi ({why})")
    ledger.source("gpus", "nvidia-smi")
    head = run_tool(tool)[1]
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", head)
    return Driver(version, cuda.group(1) if cuda else None), devices


def parse_smi(text: str, fields: Sequence[str]) -> tuple[list[Device], str | None]:
    """Devices and driver version from `nvidia-smi --query-gpu ... --format=csv,noheader,nounits` (memory in MiB)."""
    devices: list[Device] = []
    version = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields):
            continue
        row = {f: None if c in _SMI_NOTHING else c for f, c in zip(fields, cells, strict=True)}
        version = row["driver_version"] or version
        capability = re.fullmatch(r"(\d+)\.(\d+)", row.get("compute_cap") or "")
        devices.append(
            {
                "nvml_index": int(index) if (index := row["index"] or "").isdigit() else len(devices),
                "name": row["name"],
                "uuid": row["uuid"],
                "capability": [int(capability[1]), int(capability[2])] if capability else None,
                "total": _mib(row["memory.total"]),
                "free": _mib(row["memory.free"]),
                "mig": row["mig.mode.current"] == "Enabled",
                "slices": [],
                "holders": [],
            }
        )
    return devices, version


def _mib(text: str | None) -> int | None:
    return int(float(text)) * 2**20 if text and re.fullmatch(r"\d+(\.\d+)?", text) else None


def toolkit(env: Mapping[str, str], ledger: Ledger, default: str = "/usr/local/cuda") -> Toolkit:
    """nvcc as flashinfer finds it: CUDA_HOME, CUDA_PATH, the nvcc on PATH, /usr/local/cuda. The first that is set wins,
    even when it holds no nvcc: then flashinfer has none, whatever else is installed.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            return _nvcc_of(Path(env[name]), name, ledger)
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    if on_path:
        return _nvcc_version(on_path, "PATH", ledger)
    if Path(default).exists():
        return _nvcc_of(Path(default), default, ledger)
    ledger.source("toolkit", f"no CUDA_HOME, no CUDA_PATH, no nvcc on PATH, no {default}")
    return Toolkit("absent")


def installed_toolkits(root: Path = Path("/usr/local")) -> list[str]:
    """Folders of the CUDA toolkits that hold an nvcc, oldest first; what CUDA_HOME could point to."""
    return sorted(str(p.parents[1]) for p in root.glob("cuda-*/bin/nvcc"))


def _nvcc_of(root: Path, where: str, ledger: Ledger) -> Toolkit:
    nvcc = shutil.which("nvcc", path=str(root / "bin"))
    if nvcc is None:
        ledger.source("toolkit", f"{where} leads to {root}, which holds no bin/nvcc")
        return Toolkit("absent", None, where)
    return _nvcc_version(nvcc, where, ledger)


def _nvcc_version(nvcc: str, where: str, ledger: Ledger) -> Toolkit:
    code, text = run_tool(nvcc, "--version")
    found = re.search(r"release (\d+\.\d+)(?:, V(\d+(?:\.\d+)+))?", text)
    if code != 0 or found is None:
        ledger.unknown("toolkit.nvcc", f"{nvcc} --version said nothing readable (exit {code})")
        return Toolkit("unknown", None, where)
    ledger.source("toolkit", f"{where}: {os.path.realpath(nvcc)}")
    return Toolkit("present", found.group(2) or found.group(1), where)


def cards(
    devices: Sequence[Device], torch_devices: Sequence[Device], visible: str | None, available_gib: float | None
) -> tuple[tuple[Gpu, ...], list[int | None]]:
    """The cards a program on this machine gets, in CUDA's order where torch told it, and the NVML index of each.

    Memory: free as NVML saw it before any trial opened a context; on a MIG slice and on unified memory, where NVML
    answers for another pool or not at all, what torch saw (unified: what the system has available).
    """
    if not torch_devices:
        shown = [part for d in visible_devices(devices, visible) for part in (_slices(d) or [d])]
        return tuple(_card(i, d, None, available_gib) for i, d in enumerate(shown)), [
            d.get("nvml_index") for d in shown
        ]
    pairs = [(t, _match(t, i, devices, torch_devices)) for i, t in enumerate(torch_devices)]
    gpus = tuple(_card(i, n or {}, t, available_gib) for i, (t, n) in enumerate(pairs))
    return gpus, [None if n is None else n.get("nvml_index") for _, n in pairs]


def _slices(device: Device) -> list[Device]:
    return [{**s, "mig": True, "nvml_index": device.get("nvml_index")} for s in device.get("slices") or []]


def _uuid(text: Any) -> str:
    return re.sub(r"^(GPU|MIG)-", "", str(text or "")).lower()


def _match(card: Device, index: int, devices: Sequence[Device], torch_devices: Sequence[Device]) -> Device | None:
    """The NVML device that is this torch device: by UUID; by place when the names agree in order; else by lone name."""
    if card.get("uuid"):
        for device in devices:
            ids = [device.get("uuid"), *(s.get("uuid") for s in device.get("slices") or [])]
            if _uuid(card["uuid"]) in map(_uuid, ids):
                return device
    if [d.get("name") for d in devices] == [t.get("name") for t in torch_devices]:
        return devices[index]
    same = [d for d in devices if d.get("name") and str(card.get("name", "")).startswith(str(d["name"]))]
    return same[0] if len(same) == 1 else None


def visible_devices(devices: Sequence[Device], visible: str | None) -> list[Device]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order; all of them where it cannot be told without CUDA
    (plain numbers on a machine whose cards differ: CUDA may count them another way). Empty or -1 hides nothing here:
    the machine still has the cards, and the variable is a fact of its own.
    """
    wanted = [w.strip() for w in (visible or "").split(",") if w.strip()]
    alike = len({d.get("name") for d in devices}) <= 1
    chosen = []
    for word in wanted:
        if word.isdigit() and alike and int(word) < len(devices):
            chosen.append(devices[int(word)])
        elif word.startswith("GPU-"):
            chosen += [d for d in devices if _uuid(d.get("uuid")).startswith(_uuid(word))]
        else:  # -1, a MIG name, a number out of range
            return list(devices)
    return chosen or list(devices)


def _card(index: int, nvml: Device, torch_device: Device | None, available_gib: float | None) -> Gpu:
    seen = torch_device or {}
    name = seen.get("name") or nvml.get("name")
    mig = bool(nvml.get("mig")) or "MIG" in str(name or "")
    unified = bool(seen.get("integrated")) or (bool(nvml) and nvml.get("total") is None and not mig)
    total, free = nvml.get("total"), nvml.get("free")
    if (mig and seen) or total is None:
        total, free = seen.get("total") or total, seen.get("free") or free
    capability = seen.get("capability") or nvml.get("capability")
    free_gib = _gib(free)
    if unified:
        total = seen.get("total") or total
        # cudaMemGetInfo leaves the page cache out there; the system's own figure is what an allocation can get
        free_gib = max((v for v in (available_gib, free_gib) if v is not None), default=None)
    return Gpu(
        index=index,
        vendor="nvidia",
        name=name,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        total_gib=_gib(total),
        free_gib=free_gib,
        mig=mig,
        unified_memory=unified,
        display=nvml.get("display"),
    )


def _gib(size: Any) -> float | None:
    return round(size / GIB, 2) if isinstance(size, (int, float)) and size > 0 else None


def memory_holders(devices: Sequence[Device], order: Sequence[int | None]) -> list[dict[str, Any]]:
    """Programs that hold memory of the cards: {"gpu", "name", "gib"}, largest first; no process ids, no users."""
    holders = []
    for device in devices:
        index = device.get("nvml_index")
        gpu = list(order).index(index) if index in order else None
        for process in device.get("holders") or []:
            name = "this Python process" if process.get("doctor") else os.path.basename(str(process.get("name")))[:40]
            holders.append({"gpu": gpu, "name": name, "gib": _gib(process.get("bytes"))})
    return sorted(holders, key=lambda h: -(h["gib"] or 0))
