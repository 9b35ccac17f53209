"""Install plans: the right set for a machine, sets that agree with our own extras and with each other's declared needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

from doctor.facts import Facts, facts_from_json
from doctor.install import install_plan, torch_requirement
from doctor.install_sets import BY_KEY, PYTHON, SETS, PackageSet
from doctor.releases import asked, asked_of
from doctor.versions import specifiers

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def machine(
    capability: str | None = "8.9",
    driver: str | None = "580.95",
    cuda: str | None = "13.0",
    *,
    gpus: list[dict[str, Any]] | str | None = "one",
    name: str | None = "NVIDIA L4",
    **host: Any,
) -> Facts:
    card = {"vendor": "nvidia", "name": name, "compute_capability": capability, "total_gib": 22.0, "free_gib": 21.7}
    return facts_from_json(
        {
            "host": {"platform": "linux", "arch": "x86_64", "glibc": "2.35", "python": "3.12", **host},
            "gpus": [card] if gpus == "one" else gpus,
            "driver": {"version": driver, "cuda": cuda},
        }
    )


@pytest.mark.parametrize(
    ("facts", "chosen", "torch"),
    [
        (machine(), "vllm", ["torch==2.13.0"]),
        (machine("12.0", "570.86", "12.8"), "cu128", ["torch==2.10.0", "cu128"]),
        (machine("8.0", "550.54", "12.4"), "cu126", ["torch==2.13.0", "cu126"]),
        (machine("7.0"), "cu126", ["torch==2.13.0", "cu126"]),
        (machine("6.1", "535.1", None), "cu126", ["torch==2.13.0", "cu126"]),
        (machine("7.5"), "vllm", ["torch==2.13.0"]),
        (machine("11.0", name="NVIDIA Thor", arch="aarch64"), "vllm", ["torch==2.13.0"]),
        (machine("8.7", "540.4", "12.6", name="Orin", arch="aarch64"), "jetson", ["torch==2.8.0", "jp6"]),
        (machine(glibc="2.28"), "portable", ["torch==2.13.0"]),
        (machine(platform="windows", glibc=None), "portable", ["torch==2.13.0", "cu130"]),
        (machine(platform="wsl2"), "vllm", ["torch==2.13.0"]),
        (machine("8.6", "470.1", "11.4"), "cpu", ["torch==2.13.0", "cpu"]),
        (machine(None, name="NVIDIA GeForce GTX 1080 Ti"), "cu126", ["torch==2.13.0", "cu126"]),
        (machine(None, None, None, name=None), "vllm", ["torch==2.13.0"]),
        (machine(gpus=[]), "cpu", ["torch==2.13.0", "cpu"]),
        (machine(gpus=[], platform="darwin", arch="arm64", glibc=None), "cpu", ["torch==2.13.0"]),
        (machine(gpus=[], platform="windows", glibc=None), "cpu", ["torch==2.13.0"]),
        (machine(gpus=[{"vendor": "amd", "gfx": "gfx1100"}]), "rocm", ["torch==2.13.0", "rocm7.2"]),
        (machine(gpus=[{"vendor": "intel", "name": "Arc"}]), "cpu", ["torch==2.13.0", "cpu"]),
        (Facts(), "vllm", ["torch==2.13.0"]),
    ],
)
def test_the_set_for_a_machine(facts: Facts, chosen: str, torch: list[str]) -> None:
    plan = install_plan(facts)
    assert plan.chosen is not None and plan.chosen.key == chosen
    requirement = torch_requirement(facts)
    assert requirement[0] == torch[0] and len(requirement) == (3 if len(torch) == 2 else 1)
    assert requirement[-1].split("/")[-2:] == ["whl", "cpu"] or torch[-1] in requirement[-1]


def test_torch_for_a_machine_without_a_gpu_comes_beside_pypi() -> None:
    assert torch_requirement(machine(gpus=[])) == [
        "torch==2.13.0", "--extra-index-url", "https://download.pytorch.org/whl/cpu",
    ]  # fmt: skip


def test_why_a_faster_set_does_not_fit() -> None:
    plan = install_plan(machine("12.0", "570.86", "12.8", name="NVIDIA GeForce RTX 5090"))
    assert [s.key for s, _ in plan.refused] == ["vllm", "unsloth", "portable"]
    assert all("580" in " ".join(why) and "570.86" in " ".join(why) for _, why in plan.refused)
    text = plan.to_text()
    assert "vllm, unsloth, portable: it needs a driver for CUDA 13.0 (580 or newer)" in " ".join(text.split())
    assert "TRL 1.15 and 1.16 ask for 0.21 or 0.22" in " ".join(text.split())
    assert "A driver of 580 or newer opens the vLLM set" in text


def test_commands_for_pip_and_uv() -> None:
    plan = install_plan(machine("6.1"), source="grpo-portable")
    assert plan.pip[:3] == (
        "python -m venv .venv",
        ". .venv/bin/activate",
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126",
    )
    assert plan.pip[3].startswith("pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0")
    assert plan.pip[3].endswith('"grpo-portable[train]"')
    assert plan.uv[0] == "uv venv --python 3.12" and plan.uv[3].startswith("uv pip install torch==2.13.0 trl==")


def test_a_python_outside_the_range_gets_an_environment() -> None:
    plan = install_plan(machine(python="3.10"))
    assert plan.pip[0] == "python3.12 -m venv .venv" and plan.uv[0] == "uv venv --python 3.12"
    assert any("3.10" in note for note in plan.notes)


def test_alternatives_are_named_where_they_fit() -> None:
    assert [s.key for s in install_plan(machine()).alternatives] == ["unsloth", "vllm-0.24", "portable"]
    assert [s.key for s in install_plan(machine(python="3.14")).alternatives] == ["unsloth", "portable"]
    assert "Also fits:" in install_plan(machine()).to_text()


def test_windows_leaves_out_what_has_no_wheel() -> None:
    plan = install_plan(machine(platform="windows", glibc=None))
    assert "torchao" not in plan.packages and ".venv\\Scripts\\activate" in plan.pip
    assert not any(line.endswith("\\") for line in plan.to_text().splitlines())


@pytest.mark.parametrize("facts", [machine(), machine("6.1"), machine(gpus=[]), machine("12.0", "570.86", "12.8")])
def test_text_keeps_to_80_columns_and_json_is_json(facts: Facts) -> None:
    plan = install_plan(facts)
    assert max(map(len, plan.to_text().splitlines())) <= 80
    raw = json.loads(json.dumps(plan.to_json()))
    assert raw["set"] == plan.chosen.key and raw["packages"]["torch"] and raw["pip"] and raw["uv"]  # type: ignore[union-attr]
    for part in (raw["date"], "With pip:", "With uv:", "Why nothing newer:", "Checked:"):
        assert part in plan.to_text()


def _extra(name: str) -> list[Requirement]:
    """Requirements of one of this project's extras, ours followed."""
    table = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found: list[Requirement] = []
    for line in table[name]:
        requirement = Requirement(line)
        found += (
            [r for inner in requirement.extras for r in _extra(inner)]
            if requirement.name == "grpo-portable"
            else [requirement]
        )
    return found


@pytest.mark.parametrize("wanted", SETS, ids=lambda s: s.key)
def test_sets_satisfy_our_own_extras(wanted: PackageSet) -> None:
    pins = {"torch": wanted.torch, **wanted.pins}
    for extra in wanted.extra.split(","):
        for requirement in _extra(extra):
            name = requirement.name.replace("-", "_")
            if name in pins:
                assert requirement.specifier.contains(pins[name]), f"{wanted.key}: {requirement}"


@pytest.mark.parametrize("wanted", SETS, ids=lambda s: s.key)
def test_sets_satisfy_what_their_packages_declare(wanted: PackageSet) -> None:
    pins = {"torch": wanted.torch, **wanted.pins}
    asked_for = 0
    for name, version in pins.items():
        for of in asked_of(name) & set(pins):
            spec = asked(name, Version(version), of)
            if spec is not None:
                asked_for += 1
                assert specifiers(spec).contains(pins[of]), f"{wanted.key}: {name} {version} asks {of}{spec}"
    assert asked_for >= 2


def test_every_set_says_how_it_was_checked() -> None:
    assert len(BY_KEY) == len(SETS)
    for wanted in SETS:
        assert wanted.evidence and wanted.ceilings and all(Version(v) for v in wanted.pins.values())


PYTHONS = st.sampled_from([None, "3.9", "3.11.7", "3.14", "3.15", "banana"])


@settings(max_examples=120, deadline=None)
@given(
    capability=st.sampled_from([None, "", "5.2", "7.0", "7.5", "8.9", "10.3", "12.1", "99.9", "x"]),
    driver=st.sampled_from([None, "390.1", "525", "570.86", "580.1", "?"]),
    cuda=st.sampled_from([None, "9.0", "12.8", "13.2", "x"]),
    platform=st.sampled_from([None, "linux", "wsl2", "windows", "darwin", "plan9"]),
    python=PYTHONS,
    name=st.sampled_from([None, "", "NVIDIA Thor", "Orin", "RTX 4090", "???"]),
)
def test_no_facts_break_it(
    capability: str | None,
    driver: str | None,
    cuda: str | None,
    platform: str | None,
    python: str | None,
    name: str | None,
) -> None:
    plan = install_plan(machine(capability, driver, cuda, name=name, platform=platform, python=python))
    assert plan.to_text() and json.dumps(plan.to_json())
    assert (plan.chosen is None) == (not plan.pip)
    assert torch_requirement(machine(capability, driver, cuda, name=name, platform=platform, python=python))


def test_python_range_is_ours() -> None:
    spec = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["requires-python"]
    low, high = PYTHON
    assert Requirement(f"x{spec}").specifier.contains(f"{low[0]}.{low[1]}")
    assert Requirement(f"x{spec}").specifier.contains(f"{high[0]}.{high[1]}")
    assert not Requirement(f"x{spec}").specifier.contains(f"{high[0]}.{high[1] + 1}")


def test_module_prints_arguments_for_a_makefile() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "doctor.install"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("torch==") and done.stdout.count("\n") == 1
