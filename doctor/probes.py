"""Facts about this machine. Every source is total: it gives a fact or the reason why it is unknown, and never raises.

What `Facts` has no field for is kept in `extra`:

    sources, unknown   where a fact came from; why it is unknown (both by key, one sentence)
    requires           what installed packages ask of each other, from their metadata; requires_python likewise
    torch_build        cuda, hip, xpu as torch/version.py on disk has them; also_installed: further versions
    memory_holders     programs that hold card memory: name and GiB
    devices            per card, in CUDA's order: what a real matmul there said
    nvml_order         the NVML index of each card, where CUDA counts them another way
    torch_import       how the import of torch failed (ok False) or took too long (ok None); not there when it went well
    cpu_rates          where no card answers: 10^9 operations and bytes a second of torch on its threads
    fp8_forms          one scaled matmul per tensor, per row and per block: "ok" or what it said
    compilers          gcc (Triton compiles its launchers with it) and ninja (flashinfer and torch extensions)
    toolkits           CUDA toolkits under /usr/local that hold an nvcc
    pci                vendors of display controllers on the bus, driver or not
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from doctor import child
from doctor.child import Outcome
from doctor.facts import ABSENT, PROBES, Driver, Facts, Gpu, Host, Probe, Toolkit
from doctor.ledger import Ledger
from doctor.probes_host import available_gib, environment, host, run_tool
from doctor.probes_nvidia import cards, driver_and_devices, installed_toolkits, memory_holders, toolkit
from doctor.probes_other import amd_cards, apple_card, intel_cards, pci_vendors, windows_cards
from doctor.probes_packages import packages

_NVML_S = 5.0
# Out of memory says that the card is full, not that it lacks the feature.
_FULL = re.compile(r"out of memory|cannot allocate memory|alloc_failed|no space left", re.IGNORECASE)


def probe(*, children: bool = True, timeout_s: float = 12, say: Callable[[str], None] = lambda _: None) -> Facts:
    """This machine's facts. `children` off: torch and its kin stay untouched, their probes unknown. `timeout_s` bounds
    each stage of a child. `say` hears of slow steps.
    """
    ledger = Ledger()
    nvml = child.run("nvml", timeout_s=_NVML_S)
    driver, devices = ledger.total("driver", lambda: driver_and_devices(nvml, ledger)) or (Driver(), None)
    here = ledger.total("host", lambda: host(ledger))
    versions, metadata = ledger.total("packages", lambda: packages(ledger)) or ({}, {})
    pci = ledger.total("pci", pci_vendors) or []
    if "nvidia" in pci and driver.version is None:
        _explain_missing_driver(here, ledger)
    outcomes: dict[str, Outcome] = {}
    if children:
        # libcuda alone counts: a Jetson's GPU is on no PCI bus, and older JetPacks have no NVML
        any_card = bool(devices) or bool(nvml.told.get("libcuda")) or bool(set(pci) - {"intel"})
        outcomes = _run_children(versions, any_card, timeout_s, say)
    told = outcomes["cuda"].told if "cuda" in outcomes else {}
    gpus, order = _all_cards(devices, told, versions.get("torch"), here.platform if here else None, pci, ledger)
    toolkit_here = ledger.total("toolkit", lambda: toolkit(os.environ, ledger))
    extra: dict[str, Any] = {
        **metadata,
        "memory_holders": ledger.total("memory_holders", lambda: memory_holders(devices or [], order)) or [],
        "nvml_order": order if order != sorted(order, key=str) else None,
        "compilers": ledger.total("compilers", _compilers),
        "toolkits": ledger.total("toolkits", installed_toolkits),
        "pci": pci,
        **_from_torch(told),
        "torch_import": _torch_import(outcomes.get("cuda")),
        "links": _links(told, devices or [], order) if len(gpus or ()) > 1 else None,
    }
    probes = {name: _judged(name, outcomes, ledger) for name in PROBES}
    arch = told.get("arch_list")
    return Facts(
        host=here or Host(),
        gpus=gpus,
        driver=driver,
        toolkit=toolkit_here or Toolkit(),
        packages=MappingProxyType(dict(versions)),
        probes=MappingProxyType(probes),
        torch_arch_list=tuple(arch) if isinstance(arch, list) else None,
        env=MappingProxyType(environment()),
        extra=MappingProxyType(
            {k: v for k, v in extra.items() if v not in (None, {}, [])}
            | {"sources": ledger.sources, "unknown": ledger.unknowns}
        ),
    )


def with_cpu_rates(facts: Facts, timeout_s: float = 12) -> Facts:
    """The facts with what a child measured of the CPU; as they are where torch is not installed or says nothing."""
    if facts.version("torch") is None:
        return facts
    rates = child.run("cpu", timeout_s=timeout_s).told.get("cpu_rates")
    return replace(facts, extra=MappingProxyType({**facts.extra, "cpu_rates": rates})) if rates else facts


def _explain_missing_driver(here: Host | None, ledger: Ledger) -> None:
    """Says the likeliest reason why a card on the bus has no driver that answers."""
    said = ledger.unknowns.get("driver", "no driver answered")
    if here is not None and here.container:
        ledger.unknown(
            "driver", f"{said}; this container may have been started without its GPU (docker run --gpus all)"
        )
    else:
        ledger.unknown("driver", f"{said}; an NVIDIA card is on the bus, so its driver is not installed or not loaded")


def _installed(versions: Mapping[str, str | None], name: str) -> bool:
    return versions.get(name) != ABSENT  # unknown counts as worth a try


def _run_children(
    versions: Mapping[str, str | None], any_card: bool, timeout_s: float, say: Callable[[str], None]
) -> dict[str, Outcome]:
    """The trials this machine has packages for. Without a card only torch is asked: the rest would try nothing real."""
    if not _installed(versions, "torch"):
        return {}
    trials: dict[str, tuple[str, ...]] = {"cuda": ()}
    if any_card:
        for trial, package in (("bnb", "bitsandbytes"), ("vllm_import", "vllm"), ("unsloth", "unsloth")):
            if _installed(versions, package):
                trials[trial] = ()
    names = {"cuda": "torch", "bnb": "bitsandbytes", "vllm_import": "vllm", "unsloth": "unsloth"}
    say(f"trying {', '.join(names[t] for t in trials)} in child processes (each step at most {timeout_s:g} s)")
    return child.run_all(trials, timeout_s=timeout_s)


_TRIAL_OF = {
    "torch_cuda": "cuda",
    "fp8_matmul": "cuda",
    "bnb_4bit": "bnb",
    "vllm_import": "vllm_import",
    "unsloth_import": "unsloth",
}


def _judged(name: str, outcomes: Mapping[str, Outcome], ledger: Ledger) -> Probe:
    outcome = outcomes.get(_TRIAL_OF.get(name, ""))
    if outcome is None:
        return Probe()
    if name == "fp8_matmul" and name not in outcome.told and outcome.stage not in ("fp8 matmul",):
        return Probe()  # it never came to that
    result, why = judge(name, outcome)
    if why:
        ledger.unknown(f"probes.{name}", why)
    return result


def judge(name: str, outcome: Outcome) -> tuple[Probe, str | None]:
    """The probe's fact, and why it is unknown when it is.

    A slow import and a full card are no inability: both stay unknown. A hang in a GPU call, a crash, an exception are
    failures with the last line as their text.
    """
    told = outcome.told.get(name)
    if isinstance(told, Mapping):
        ok, error = told.get("ok"), told.get("error")
    elif outcome.end == "ok":  # returned without a word on this one
        return Probe(), None
    else:
        ok, error = False, outcome.error
    if ok is False:
        if outcome.end == "unstarted" or (outcome.end == "timeout" and told is None and child.is_import(outcome.stage)):
            return Probe(), f"{error}; a cold disk or a busy machine? a longer --timeout tells"
        if name != "torch_cuda" and error and _FULL.search(error):
            return Probe(None, error), f"the card had no memory free for the trial: {error}"
    return Probe(ok, error), None


def _all_cards(
    devices: list[Any] | None,
    told: Mapping[str, Any],
    torch: str | None,
    platform: str | None,
    pci: list[str],
    ledger: Ledger,
) -> tuple[tuple[Gpu, ...] | None, list[int | None]]:
    """The cards of the vendor this torch is built for; without a torch that decides, NVIDIA's before the others.

    An integrated Intel or AMD part beside an NVIDIA card is no training device and is left out.
    """
    seen = told.get("devices") or []
    if "+rocm" in (torch or ""):
        return _others(told, platform, pci, ledger, first="amd"), []
    if devices or seen:
        found = ledger.total(
            "gpus", lambda: cards(devices or [], seen, os.environ.get("CUDA_VISIBLE_DEVICES"), available_gib())
        )
        return found or (None, [])
    if "nvidia" in pci:  # a card whose driver does not answer is still a card
        ledger.source("gpus", "the PCI bus (no driver answers)")
        return tuple(Gpu(i, "nvidia", "NVIDIA card without a working driver") for i in range(pci.count("nvidia"))), []
    return _others(told, platform, pci, ledger, first=None), []


def _others(
    told: Mapping[str, Any], platform: str | None, pci: list[str], ledger: Ledger, first: str | None
) -> tuple[Gpu, ...]:
    sources: list[tuple[str, Callable[[], list[Gpu]]]] = [
        ("amd", amd_cards),
        ("intel", partial(intel_cards, told.get("xpu") or [])),
        ("apple", apple_card),
    ]
    if platform == "windows":
        sources.append(("display adapters", windows_cards))
    for vendor, look in sources:
        found = ledger.total(f"gpus.{vendor}", look)
        if found:
            ledger.source("gpus", {"amd": "KFD", "intel": "XPU or PCI", "apple": "sysctl"}.get(vendor, vendor))
            return tuple(_with_free(g, told) for g in found)
    return ()


def _with_free(gpu: Gpu, told: Mapping[str, Any]) -> Gpu:
    """Fills what /sys did not know from what torch saw, and a shared memory's free part from the system."""
    seen: Mapping[str, Any] = next((d for d in told.get("devices") or [] if d.get("index") == gpu.index), {})
    free, total = seen.get("free"), seen.get("total")
    gib = 2**30
    return replace(
        gpu,
        name=seen.get("name") or gpu.name,
        gfx=seen.get("gfx") or gpu.gfx,
        total_gib=gpu.total_gib if gpu.total_gib is not None else (round(total / gib, 2) if total else None),
        free_gib=gpu.free_gib
        if gpu.free_gib is not None
        else (available_gib() if gpu.unified_memory else (round(free / gib, 2) if free else None)),
    )


def _from_torch(told: Mapping[str, Any]) -> dict[str, Any]:
    devices = [
        {"name": d.get("name"), "integrated": d.get("integrated"), "error": d.get("error")}
        for d in told.get("devices") or []
    ]
    forms = told.get("fp8_forms") or {}
    return {
        "devices": devices if any(d["error"] for d in devices) else None,
        "fp8_forms": {form: error or "ok" for form, error in forms.items()},
        "cpu_rates": told.get("cpu_rates"),
        "mps": told.get("mps"),
        "xpu_error": told.get("xpu_error"),
    }


def _links(told: Mapping[str, Any], devices: list[Any], order: list[int | None]) -> dict[str, Any]:
    """What lies between several cards: NVLinks by card, whether they reach each other's memory, NCCL's version."""
    counts = {device.get("nvml_index"): device.get("nvlinks") for device in devices}
    nvlinks = [counts.get(index) for index in order]
    return {**(told.get("links") or {}), **({"nvlinks": nvlinks} if None not in nvlinks and nvlinks else {})}


def _torch_import(outcome: Outcome | None) -> dict[str, Any] | None:
    """How a torch that was never imported ended its child: ok False with what it said, ok None when it took too long."""
    if outcome is None or "torch" in outcome.told or outcome.end not in ("error", "crash", "timeout"):
        return None
    return {"ok": None if outcome.end == "timeout" else False, "error": outcome.error}


def _compilers() -> dict[str, str]:
    """Version of the C compiler and of ninja, ABSENT where none is on PATH."""
    found = {}
    for name, tools in {"cc": (os.environ.get("CC") or "gcc", "clang"), "ninja": ("ninja",)}.items():
        found[name] = ABSENT
        for tool in tools:
            code, text = run_tool(tool, "-dumpfullversion" if tool == "gcc" else "--version")
            version = re.search(r"\d+(?:\.\d+)+", text) if code == 0 else None
            if version:
                found[name] = version.group()
                break
    return found
