"""Dated table: what released versions ask of each other, for packages that are not installed (or say nothing themselves).

Read from the wheels' own metadata on PyPI on the day below. A row tells of its version; `asked` says what may be concluded
for versions between rows. Where a package publishes no requirement (torchao) the rule comes from its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from packaging.version import Version

READ_ON = "2026-11-29"
Row = tuple[str, Mapping[str, str]]

# Releases that a wide range does not stretch over.
_HOLES_4 = "!=4.52.0,!=4.52.1,!=4.52.2,!=4.52.3,!=4.53.0,!=4.54.0,!=4.55.0,!=4.55.1"
_HOLES_5 = f"{_HOLES_4},!=4.57.0,!=4.57.4,!=4.57.5,!=5.0.0,!=5.1.0"
_HOLES_NEW = "!=4.53.0,!=4.54.0,!=4.55.0,!=4.55.1,!=4.57.0,!=4.57.4,!=4.57.5,!=5.0.0,!=5.1.0"
_TO_5_17 = f">=4.52.4,{_HOLES_NEW},<=5.17.0"
_TRL_1_13, _TRL_1_15 = ">=0.18.2,!=0.19.0,<=1.13.0", ">=0.18.2,!=0.19.0,<=1.15.0"
_TRL_24 = ">=0.18.2,!=0.19.0,<=0.24.0"
_DATA_43 = ">=3.4.1,!=4.0.*,!=4.1.0,<4.4.0"
_DATA_49 = ">=3.4.1,!=4.0.*,!=4.1.0,!=4.4.*,!=4.5.0,<5.0.0"
_BNB = ">=0.45.5,!=0.46.0,!=0.48.0"
_VLLM_4 = ">=4.56.0,<5"
_VLLM_45 = ">=4.56.0,!=5.0.*,!=5.1.*,!=5.2.*,!=5.3.*,!=5.4.*,!=5.5.0"


def _unsloth(
    zoo: str, torch: str, transformers: str, trl: str = _TRL_24, datasets: str = _DATA_43, peft: str = ">=0.18.0"
) -> Mapping[str, str]:
    return {
        "unsloth_zoo": f">={zoo}",
        "torch": f">=2.4.0{torch}",
        "transformers": transformers,
        "trl": trl,
        "datasets": datasets,
        "peft": peft,
        "bitsandbytes": _BNB,
        "accelerate": ">=0.34.1",
    }


def _zoo(
    torch: str, transformers: str, trl: str = _TRL_24, datasets: str = _DATA_43, peft: str = ">=0.18.0"
) -> Mapping[str, str]:
    return {
        "torch": f">=2.4.0{torch}",
        "transformers": transformers,
        "trl": trl,
        "datasets": datasets,
        "peft": peft,
        "torchao": ">=0.13.0",
        "accelerate": ">=0.34.1",
    }


def _to(newest: str, holes: str = _HOLES_5) -> str:
    return f">=4.51.3,{holes},<={newest}"


def _trl(
    vllm: str, transformers: str, datasets: str = ">=4.7.0", accelerate: str = ">=1.4.0", peft: str = ">=0.8.0"
) -> Mapping[str, str]:
    return {"vllm": vllm, "transformers": transformers, "datasets": datasets, "accelerate": accelerate, "peft": peft}


RELEASES: Mapping[str, tuple[Row, ...]] = {
    "vllm": (
        ("0.7.3", {"torch": "==2.5.1", "transformers": ">=4.48.2"}),
        ("0.8.5.post1", {"torch": "==2.6.0", "transformers": ">=4.51.1"}),
        ("0.9.2", {"torch": "==2.7.0", "transformers": ">=4.51.1"}),
        ("0.10.0", {"torch": "==2.7.1", "transformers": ">=4.53.2"}),
        ("0.10.1", {"torch": "==2.7.1", "transformers": ">=4.55.0"}),
        ("0.10.2", {"torch": "==2.8.0", "transformers": ">=4.55.2"}),
        ("0.11.0", {"torch": "==2.8.0", "transformers": ">=4.55.2"}),
        ("0.11.2", {"torch": "==2.9.0", "transformers": _VLLM_4}),
        ("0.12.0", {"torch": "==2.9.0", "transformers": _VLLM_4}),
        ("0.13.0", {"torch": "==2.9.0", "transformers": _VLLM_4}),
        ("0.14.1", {"torch": "==2.9.1", "transformers": _VLLM_4}),
        ("0.15.1", {"torch": "==2.9.1", "transformers": _VLLM_4}),
        ("0.16.0", {"torch": "==2.9.1", "transformers": _VLLM_4}),
        ("0.17.1", {"torch": "==2.10.0", "transformers": _VLLM_4}),
        ("0.18.1", {"torch": "==2.10.0", "transformers": _VLLM_4}),
        ("0.19.1", {"torch": "==2.10.0", "transformers": _VLLM_45}),
        ("0.20.2", {"torch": "==2.11.0", "transformers": _VLLM_45}),
        ("0.21.0", {"torch": "==2.11.0", "transformers": _VLLM_45}),
        ("0.22.1", {"torch": "==2.11.0", "transformers": _VLLM_45}),
        ("0.23.0", {"torch": "==2.11.0", "transformers": _VLLM_45}),
        ("0.24.0", {"torch": "==2.11.0", "transformers": ">=5.5.3"}),
        ("0.25.1", {"torch": "==2.11.0", "transformers": ">=5.5.3"}),
        ("0.26.0", {"torch": "==2.11.0", "transformers": ">=5.5.3"}),
        ("0.27.1", {"torch": "==2.13.0", "transformers": ">=5.5.3"}),
        ("0.28.0", {"torch": "==2.13.0", "transformers": ">=5.5.3"}),
        ("0.29.0", {"torch": "==2.13.0", "transformers": ">=5.10.4"}),
        ("0.30.0", {"torch": "==2.13.0", "transformers": ">=5.10.4"}),
        ("0.31.0", {"torch": "==2.13.0", "transformers": ">=5.10.4,<5.18.0"}),
        ("0.32.0", {"torch": "==2.13.0", "transformers": ">=5.16.1,<5.20.0"}),
        ("0.33.0", {"torch": "==2.14.0", "transformers": ">=5.16.1,<5.21.0"}),
    ),
    "trl": (
        ("0.15.0", _trl(">=0.7.1", ">=4.46.0", ">=2.21.0", ">=0.34.0")),
        ("0.15.1", _trl(">=0.7.1", ">=4.46.0", ">=2.21.0", ">=0.34.0")),
        ("0.15.2", _trl("==0.7.2", ">=4.46.0", ">=2.21.0", ">=0.34.0")),
        ("0.16.1", _trl(">=0.7.0", ">=4.46.0", ">=3.0.0", ">=0.34.0")),
        ("0.17.0", _trl(">=0.8.3", ">=4.46.0", ">=3.0.0", ">=0.34.0")),
        ("0.18.2", _trl(">=0.8.3", ">=4.50.0", ">=3.0.0", ">=0.34.0")),
        ("0.19.1", _trl(">=0.8.3", ">=4.51.0", ">=3.0.0")),
        ("0.20.0", _trl(">=0.8.3", ">=4.53.2", ">=3.0.0")),
        ("0.21.0", _trl(">=0.10.0", ">=4.55.0", ">=3.0.0")),
        ("0.22.2", _trl(">=0.10.0", ">=4.55.0", ">=3.0.0")),
        ("0.23.1", _trl(">=0.10.0", ">=4.56.1", ">=3.0.0")),
        ("0.24.0", _trl("==0.10.2", ">=4.56.1", ">=3.0.0")),
        ("0.25.1", _trl("==0.10.2", ">=4.56.1", ">=3.0.0")),
        ("0.26.2", _trl(">=0.10.2,<0.12.0", ">=4.56.1", ">=3.0.0")),
        ("0.27.2", _trl(">=0.10.2,<0.13.0", ">=4.56.2", ">=3.0.0")),
        ("0.28.0", _trl(">=0.10.2,<0.13.0", ">=4.56.2", ">=3.0.0")),
        ("0.29.1", _trl(">=0.10.2,<0.13.0", ">=4.56.2", ">=3.0.0")),
        ("1.0.0", _trl(">=0.10.2,<=0.17.1", ">=4.56.2")),
        ("1.1.0", _trl(">=0.11.0,<=0.17.1", ">=4.56.2")),
        ("1.2.0", _trl(">=0.11.0,<=0.18.0", ">=4.56.2")),
        ("1.3.0", _trl(">=0.12.0,<=0.18.0", ">=4.56.2")),
        ("1.4.0", _trl(">=0.12.0,<=0.18.0", ">=4.56.2")),
        ("1.5.1", _trl(">=0.12.0,<=0.18.0", ">=4.56.2")),
        ("1.6.0", _trl(">=0.12.0,<=0.19.0", ">=4.56.2")),
        ("1.7.1", _trl(">=0.14.0,<=0.23.0", ">=4.56.2")),
        ("1.8.0", _trl(">=0.16.0,<=0.23.0", ">=4.56.2")),
        ("1.9.2", _trl(">=0.17.0,<=0.25.1", ">=4.56.2")),
        ("1.10.0", _trl(">=0.17.0,<=0.26.0", ">=4.56.2")),
        ("1.11.0", _trl(">=0.19.0,<=0.27.1", ">=4.56.2")),
        ("1.12.0", _trl(">=0.19.0,<=0.27.1", ">=4.56.2")),
        ("1.13.0", _trl(">=0.19.1,<=0.28.0", ">=4.56.2", peft=">=0.13.0")),
        ("1.14.2", _trl(">=0.20.0,<=0.30.0", ">=4.56.2", peft=">=0.13.0")),
        ("1.15.0", _trl(">=0.21.0,<=0.31.0", ">=4.56.2", peft=">=0.13.0")),
        ("1.16.0", _trl(">=0.22.0,<=0.31.0", ">=4.56.2", accelerate=">=1.10.1", peft=">=0.13.0")),
    ),
    "unsloth": (
        ("2025.6.2", {"unsloth_zoo": ">=2025.6.1", "torch": ">=2.4.0,<=2.7.0", "transformers": ">=4.51.3"}),
        ("2025.9.11", {"unsloth_zoo": ">=2025.9.13", "torch": ">=2.4.0", "trl": ">=0.7.9,<=0.23.0",
                       "transformers": f">=4.51.3,{_HOLES_4},<=4.56.2"}),
        ("2025.11.4", _unsloth("2025.11.4", "", _to("4.57.2", holes=f"{_HOLES_4},!=4.57.0"), peft=">=0.7.1")),
        ("2025.12.9", _unsloth("2025.12.7", "", _to("4.57.3", holes=f"{_HOLES_4},!=4.57.0"), peft=">=0.7.1")),
        ("2026.1.2", _unsloth("2026.1.2", "", _to("4.57.3", holes=f"{_HOLES_4},!=4.57.0"), peft=">=0.7.1")),
        ("2026.3.11", _unsloth("2026.3.4", "", _to("5.3.0"))),
        ("2026.3.18", _unsloth("2026.3.7", ",<2.11.0", _to("5.3.0"))),
        ("2026.4.2", _unsloth("2026.4.2", ",<2.11.0", _to("5.5.0"))),
        ("2026.5.1", _unsloth("2026.5.1", ",<2.11.0", _to("5.5.0"))),
        ("2026.5.9", _unsloth("2026.5.5", ",<2.11.0", _to("5.5.0"))),
        ("2026.6.1", _unsloth("2026.6.1", ",<2.11.0", _to("5.5.0"))),
        ("2026.6.9", _unsloth("2026.6.7", ",<2.11.0", _to("5.5.0"))),
        ("2026.7.6", _unsloth("2026.7.7", ",<2.12.0", _to("5.5.0"))),
        ("2026.8.22", _unsloth("2026.8.16", ",<2.12.0", _to("5.5.0"))),
        ("2026.9.4", _unsloth("2026.9.3", ",<2.13.0", _to("5.5.0"))),
        ("2026.9.14", _unsloth("2026.9.9", ",<2.13.0", _to("5.5.0"))),
        ("2026.10.1", _unsloth("2026.10.1", ",<2.15.0", _TO_5_17, _TRL_1_13, _DATA_49)),
        ("2026.10.9", _unsloth("2026.10.9", ",<2.15.0", _TO_5_17, _TRL_1_15, _DATA_49)),
    ),
    "unsloth_zoo": (
        ("2025.6.4", {"torch": "<=2.7.0", "transformers": ">=4.51.3"}),
        ("2025.11.5", _zoo("", _to("4.57.2", holes=_HOLES_4), peft=">=0.7.1")),
        ("2025.12.7", _zoo("", _to("4.57.3", holes=_HOLES_4))),
        ("2026.1.3", _zoo("", _to("4.57.3", holes=_HOLES_4))),
        ("2026.3.7", _zoo(",<2.11.0", _to("5.3.0"))),
        ("2026.5.4", _zoo(",<2.13.0", _to("5.5.0"))),
        ("2026.6.1", _zoo(",<2.13.0", _to("5.5.0"))),
        ("2026.6.7", _zoo(",<2.13.0", _to("5.5.0"))),
        ("2026.7.7", _zoo(",<2.13.0", _to("5.5.0"))),
        ("2026.8.13", _zoo(",<2.13.0", _to("5.5.0"))),
        ("2026.9.9", _zoo(",<2.15.0", _TO_5_17, _TRL_1_13, _DATA_49)),
        ("2026.10.1", _zoo(",<2.15.0", _TO_5_17, _TRL_1_13, _DATA_49)),
        ("2026.10.9", _zoo(",<2.15.0", _TO_5_17, _TRL_1_15, _DATA_49)),
    ),
    # torchao declares nothing: its compiled kernels load beside one torch and are skipped with a warning beside others
    # (ao#2919, unsloth PR 6400; 0.18: torchao/__init__.py asks for torch >= 2.11.0).
    "torchao": (
        ("0.12.0", {"torch": ">=2.5,<2.8"}),
        ("0.13.0", {"torch": "==2.8.*"}),
        ("0.14.0", {"torch": "==2.9.*"}),
        ("0.15.0", {"torch": "==2.10.*"}),
        ("0.16.0", {"torch": "==2.10.*"}),
        ("0.17.0", {"torch": "==2.11.*"}),
        ("0.18.0", {"torch": ">=2.11"}),
    ),
    "bitsandbytes": (("0.50.2", {"torch": ">=2.4,<3"}),),
    "peft": (("0.18.1", {"torch": ">=1.13"}), ("0.21.2", {"torch": ">=1.13"})),
}  # fmt: skip

# Versions a remedy may name, oldest first, and the CUDA version of the build that PyPI has of each torch.
TORCH_CUDA: Mapping[str, tuple[int, int]] = {
    "2.6.0": (12, 4), "2.7.0": (12, 6), "2.7.1": (12, 6), "2.8.0": (12, 8), "2.9.0": (12, 8), "2.9.1": (12, 8),
    "2.10.0": (12, 8), "2.11.0": (13, 0), "2.13.0": (13, 0), "2.14.0": (13, 0), "2.15.0": (13, 2),
}  # fmt: skip
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "torch": tuple(TORCH_CUDA),
    "transformers": ("4.51.3", "4.56.2", "4.57.3", "4.57.6", "5.3.0", "5.5.0", "5.10.4", "5.17.0", "5.20.2", "5.24.0"),
    "datasets": ("3.6.0", "4.3.0", "4.8.5", "5.2.0"),
    "accelerate": ("1.4.0", "1.10.1", "1.15.0"),
}
# Python ranges, from this version on.
_PYTHON: Mapping[str, tuple[tuple[str, str], ...]] = {
    "vllm": (("0", ">=3.9,<3.13"), ("0.10.2", ">=3.9,<3.14"), ("0.11.1", ">=3.10,<3.14"), ("0.20", ">=3.10,<3.15"),
             ("0.32", ">=3.11,<3.15")),
    "trl": (("0", ">=3.9"), ("0.25", ">=3.10"), ("1.15", ">=3.11")),
    "unsloth": (("0", ">=3.9,<3.13"), ("2025.8", ">=3.9,<3.14"), ("2026.2", ">=3.9,<3.15")),
    "unsloth_zoo": (("0", ">=3.9,<3.13"), ("2025.8", ">=3.9,<3.14"), ("2026.2", ">=3.9,<3.15")),
    "transformers": (("0", ">=3.9"), ("5", ">=3.10"), ("5.20", ">=3.11")),
    "datasets": (("0", ">=3.9"), ("5", ">=3.11")),
    "torch": (("0", ">=3.9"), ("2.9", ">=3.10"), ("2.15", ">=3.11")),
}  # fmt: skip
# What this project itself asks (pyproject.toml; a test holds the two together).
OURS: Mapping[str, str] = {
    "torch": ">=2.8", "transformers": ">=5.8", "trl": ">=1.15,<1.17", "peft": ">=0.18", "accelerate": ">=1.10.1",
    "datasets": ">=4.7", "torchao": ">=0.15", "bitsandbytes": ">=0.49", "vllm": ">=0.24,<0.32", "unsloth": ">=2026.10.9",
    "unsloth_zoo": ">=2026.10.9",
}  # fmt: skip
OUR_PYTHON = ">=3.11,<3.15"
_SMALLEST_MINOR = {"vllm", "trl", "torchao", "bitsandbytes", "peft"}  # patch releases keep what their minor asks


@cache
def versions(package: str) -> tuple[str, ...]:
    """Releases a remedy may name, oldest first."""
    return _OTHERS.get(package) or tuple(version for version, _ in RELEASES.get(package, ()))


@cache
def _parsed(package: str) -> tuple[tuple[Version, Mapping[str, str]], ...]:
    return tuple((Version(version), asks) for version, asks in RELEASES.get(package, ()))


@cache
def asked_of(package: str) -> frozenset[str]:
    """The packages that any version in the table asks something of."""
    return frozenset(of for _, asks in RELEASES.get(package, ()) for of in asks)


@cache
def asked(package: str, version: Version, of: str) -> str | None:
    """The range that this version of a package asks of another; None when the table cannot say.

    An exact row answers. Between rows: the row of the same minor version, or what both neighbours agree on. Outside the
    table and for development versions nobody can say.
    """
    if version.is_devrelease:
        return None
    rows = _parsed(package)
    exact = next((asks for v, asks in rows if v == version), None)
    if exact is not None:
        return exact.get(of)
    if package in _SMALLEST_MINOR:
        same = {asks.get(of) for v, asks in rows if v.release[:2] == version.release[:2]}
        if len(same) == 1:
            return same.pop()
        if same:
            return None
    before = [asks.get(of) for v, asks in rows if v < version]
    after = [asks.get(of) for v, asks in rows if v > version]
    return before[-1] if before and after and before[-1] == after[0] else None


def asked_python(package: str, version: Version) -> str | None:
    """The Python range of a version, None when the table does not know the package."""
    steps = [python for first, python in _PYTHON.get(package, ()) if version >= Version(first)]
    return steps[-1] if steps else None
