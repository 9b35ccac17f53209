"""What a step takes of a device, held against the ledger: torch's peak by phase, the device's own peak, and the ratios."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from doctor.memory import GIB

EVERY_S = 0.02
UNSEEN = ("context",)  # what torch's allocator knows nothing of


class PhasePeaks:
    """Peaks of torch's CUDA allocator by phase, in GiB; nothing on a CPU."""

    def __init__(self, *, cuda: bool) -> None:
        self.cuda, self.gib = cuda, dict[str, float]()

    def end(self, phase: str) -> None:
        """What came since the last call belongs to `phase`."""
        if not self.cuda:
            return
        import torch

        seen = torch.cuda.max_memory_allocated() / GIB
        self.gib[phase] = round(max(seen, self.gib.get(phase, 0.0)), 3)
        torch.cuda.reset_peak_memory_stats()


class DevicePeak:
    """The most memory in use on the device while this runs, by all of its programs, in GiB. On a CPU: of this process.

    The driver is asked (NVML), not the CUDA runtime: a thread that calls the latter can spoil a graph's capture.
    """

    def __init__(self, *, cuda: bool) -> None:
        self.cuda, self.gib, self.why = cuda, 0.0, ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> DevicePeak:
        if self.cuda:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.cuda:
            self._thread.join(timeout=10.0)
            return
        from grpo_portable.training.metrics import memory_gib

        self.gib = memory_gib()

    def _watch(self) -> None:
        import torch

        while not self._end.wait(EVERY_S):
            try:
                self.gib = max(self.gib, torch.cuda.device_memory_used(0) / GIB)
            except Exception as error:  # NVML is missing or does not tell: the step is measured without it
                self.why = f"{type(error).__name__}: {error}"
                return


def used_gib() -> dict[str, float]:
    """What is in use on each card now, by its uuid, in GiB; asked in a process of its own, so that no context is made here."""
    from doctor import child

    devices = child.run("nvml", timeout_s=20).told.get("devices") or ()
    return {
        str(d["uuid"]).removeprefix("GPU-"): (d["total"] - d["free"]) / GIB
        for d in devices
        if d.get("uuid") and d.get("total") and d.get("free") is not None
    }


def against_ledger(
    ledger: Mapping[str, float] | None, allocated: Mapping[str, float], device_gib: float | None
) -> dict[str, Any]:
    """{ledger_gib by part, ledger_sum_gib, allocated_peak_gib by phase, device_peak_gib, ledger_over_device,
    ledger_over_allocated}; the last one without the parts torch does not see. A ratio is None where either side is.
    """
    parts = dict(ledger or {})
    peak = max(allocated.values(), default=None)
    return {
        "ledger_gib": {name: round(gib, 3) for name, gib in parts.items()},
        "ledger_sum_gib": round(sum(parts.values()), 3) if parts else None,
        "allocated_peak_gib": dict(allocated),
        "device_peak_gib": None if device_gib is None else round(device_gib, 3),
        "ledger_over_device": _ratio(sum(parts.values()), device_gib),
        "ledger_over_allocated": _ratio(sum(g for name, g in parts.items() if name not in UNSEEN), peak),
    }


def _ratio(planned: float, measured: float | None) -> float | None:
    return round(planned / measured, 3) if planned and measured else None
