"""Facts about one machine: frozen records, and their JSON form (schema 1).

A fact is what a probe saw. It carries no judgement: whether 570.86 is old enough to hurt is a wall's business
(`doctor.walls`). Every value may be None, which means "nobody knows", and unknown never counts as "no". A package that
was looked for and is not there has the version `ABSENT`.

This module knows nothing of how facts are collected (`doctor.probes`) and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

SCHEMA = 1
ABSENT = "absent"

PACKAGES = (
    "torch", "vllm", "unsloth", "unsloth_zoo", "trl", "transformers", "peft", "bitsandbytes", "torchao",
    "flashinfer", "triton", "accelerate", "datasets", "gguf", "xformers", "torchaudio", "numpy", "kernels",
)  # fmt: skip
PROBES = ("torch_cuda", "fp8_matmul", "bnb_4bit", "vllm_import", "vllm_start", "unsloth_import")


class FactsError(ValueError):
    """A facts file that cannot be read as facts; the message is one line."""


@dataclass(frozen=True)
class Host:
    platform: str | None = None  # linux | wsl2 | windows | darwin
    arch: str | None = None  # x86_64 | aarch64 | arm64
    os: str | None = None
    glibc: str | None = None
    python: str | None = None
    ram_gib: float | None = None
    shm_gib: float | None = None
    container: bool | None = None
    free_gib: float | None = None  # what a program could have now, page cache included


@dataclass(frozen=True)
class Gpu:
    index: int | None = None
    vendor: str | None = None  # nvidia | amd | intel | apple
    name: str | None = None
    compute_capability: str | None = None
    gfx: str | None = None
    total_gib: float | None = None
    free_gib: float | None = None
    mig: bool | None = None
    unified_memory: bool | None = None
    display: bool | None = None  # a screen hangs on it


@dataclass(frozen=True)
class Driver:
    version: str | None = None
    cuda: str | None = None


@dataclass(frozen=True)
class Toolkit:
    state: str | None = None  # present | absent | unknown
    nvcc: str | None = None
    where: str | None = None


@dataclass(frozen=True)
class Probe:
    """How one child probe ended: ok True/False/None (not run), and the last line of what it printed."""

    ok: bool | None = None
    error: str | None = None


NOT_RUN = Probe()


@dataclass(frozen=True)
class Facts:
    """One machine. `extra` and `inner_extra` (path of keys → value) keep every key this version does not know, at the top
    and inside sections, so that a newer file survives a round trip."""

    host: Host = Host()
    gpus: tuple[Gpu, ...] | None = None  # None: nobody looked; (): looked, none there
    driver: Driver = Driver()
    toolkit: Toolkit = Toolkit()
    packages: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}))
    probes: Mapping[str, Probe] = field(default_factory=lambda: MappingProxyType({}))
    torch_arch_list: tuple[str, ...] | None = None
    env: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}))
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inner_extra: Mapping[tuple[str, ...], Any] = field(default_factory=lambda: MappingProxyType({}))

    def version(self, package: str) -> str | None:
        """The installed version, or None when the package is absent or nobody looked."""
        found = self.packages.get(package)
        return None if found is None or found == ABSENT else found

    def absent(self, package: str) -> bool:
        """True only when somebody looked and the package is not installed."""
        return self.packages.get(package) == ABSENT

    def probe(self, name: str) -> Probe:
        return self.probes.get(name, NOT_RUN)


_HUGE = 1e15
_TEXT, _NUMBER, _FLAG, _INT = "text", "number", "true or false", "whole number"
_KINDS = {
    "str | None": _TEXT,
    "float | None": _NUMBER,
    "bool | None": _FLAG,
    "int | None": _INT,
}


def _value(kind: str, raw: Any, where: str) -> Any:
    if raw is None:
        return None
    if kind == _TEXT and isinstance(raw, (str, int, float)) and not isinstance(raw, bool):
        return raw if isinstance(raw, str) else _number_text(raw, where)
    if kind == _FLAG and isinstance(raw, bool):
        return raw
    if kind == _INT and isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if kind == _NUMBER and isinstance(raw, (int, float)) and not isinstance(raw, bool):
        if 0 <= raw < _HUGE:  # false for nan too
            return float(raw)
        raise FactsError(f"`{where}` must be a number from 0 to {_HUGE:g}")
    raise FactsError(f"`{where}` must be {kind} or null, not {type(raw).__name__}")


def _number_text(raw: int | float, where: str) -> str:
    if abs(raw) < _HUGE:
        return str(raw)
    raise FactsError(f"`{where}` must be text or a number within ±{_HUGE:g}")


def _section(raw: Any, where: str) -> Mapping[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise FactsError(f"`{where}` must be an object, not {type(raw).__name__}")
    return raw


def _record(cls: type, raw: Any, where: str) -> Any:
    section = _section(raw, where)
    return cls(**{f.name: _value(_KINDS[str(f.type)], section.get(f.name), f"{where}.{f.name}") for f in fields(cls)})


def _unknown_inside(raw: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Keys inside known sections that no record has, by their path; list positions are written as text."""
    gpus = raw.get("gpus") or ()
    probes = {k: v for k, v in _section(raw.get("probes"), "probes").items() if k != "torch_arch_list"}
    sections: list[tuple[tuple[str, ...], type, Any]] = [
        (("host",), Host, raw.get("host")),
        (("driver",), Driver, raw.get("driver")),
        (("toolkit",), Toolkit, raw.get("toolkit")),
        *((("gpus", str(i)), Gpu, g) for i, g in enumerate(gpus)),
        *((("probes", name), Probe, probe) for name, probe in probes.items()),
    ]
    found = {}
    for path, cls, section in sections:
        known = {f.name for f in fields(cls)}
        found.update({(*path, k): v for k, v in (section or {}).items() if k not in known})
    return found


def _texts(raw: Any, where: str) -> dict[str, str | None]:
    return {str(k): _value(_TEXT, v, f"{where}.{k}") for k, v in _section(raw, where).items()}


def facts_from_json(raw: Any) -> Facts:
    """Facts from a parsed JSON object. Unknown keys are kept in `extra`; a wrong type raises FactsError in one line."""
    if not isinstance(raw, Mapping):
        raise FactsError(f"a facts file holds one JSON object, not {type(raw).__name__}")
    schema = raw.get("schema", SCHEMA)
    if schema is None or isinstance(schema, bool) or schema != SCHEMA:
        raise FactsError(f"facts schema {str(schema)[:40]!r} is not known here (this version reads {SCHEMA})")
    gpus = raw.get("gpus")
    if gpus is not None and not isinstance(gpus, (list, tuple)):
        raise FactsError(f"`gpus` must be a list, not {type(gpus).__name__}")
    probes = dict(_section(raw.get("probes"), "probes"))
    arch = probes.pop("torch_arch_list", None)
    if arch is not None and not isinstance(arch, (list, tuple)):
        raise FactsError(f"`probes.torch_arch_list` must be a list, not {type(arch).__name__}")
    known = {"schema", "host", "gpus", "driver", "toolkit", "packages", "probes", "env"}
    return Facts(
        host=_record(Host, raw.get("host"), "host"),
        gpus=None if gpus is None else tuple(_record(Gpu, g, f"gpus[{i}]") for i, g in enumerate(gpus)),
        driver=_record(Driver, raw.get("driver"), "driver"),
        toolkit=_record(Toolkit, raw.get("toolkit"), "toolkit"),
        packages=MappingProxyType(_texts(raw.get("packages"), "packages")),
        probes=MappingProxyType({str(k): _record(Probe, v, f"probes.{k}") for k, v in probes.items()}),
        torch_arch_list=None if arch is None else tuple(str(a) for a in arch),
        env=MappingProxyType(_texts(raw.get("env"), "env")),
        extra=MappingProxyType({str(k): v for k, v in raw.items() if k not in known}),
        inner_extra=MappingProxyType(_unknown_inside(raw)),
    )


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """The JSON object of the facts (schema 1), the inverse of `facts_from_json`."""

    def record(value: Any) -> dict[str, Any]:
        return {f.name: getattr(value, f.name) for f in fields(value)}

    probes: dict[str, Any] = {name: record(probe) for name, probe in facts.probes.items()}
    probes["torch_arch_list"] = None if facts.torch_arch_list is None else list(facts.torch_arch_list)
    raw: dict[str, Any] = {
        "schema": SCHEMA,
        "host": record(facts.host),
        "gpus": None if facts.gpus is None else [record(g) for g in facts.gpus],
        "driver": record(facts.driver),
        "toolkit": record(facts.toolkit),
        "packages": dict(facts.packages),
        "probes": probes,
        "env": dict(facts.env),
        **dict(facts.extra),
    }
    for path, value in facts.inner_extra.items():
        section = _walk(raw, path[:-1])
        if section is not None:  # None where the facts were altered since, as by leaving a card out
            section.setdefault(path[-1], value)
    return raw


def _walk(raw: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
    for key in path:
        if isinstance(raw, list):
            raw = raw[int(key)] if int(key) < len(raw) else None
        else:
            raw = raw.get(key) if isinstance(raw, dict) else None
    return raw
