"""Version locks: who needs what, told as a proof; and the change of fewest packages that meets every need."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_cases import card, driver, machine
from packaging.requirements import Requirement
from packaging.version import Version

from doctor.facts import Facts, facts_from_json
from doctor.locks import conflicts, installed, need, no_common, pip_line, remedy, runs_here
from doctor.releases import OUR_PYTHON, OURS, RELEASES, TORCH_CUDA, asked, asked_python, versions
from doctor.versions import allows, base, specifiers
from doctor.walls import find_walls

_H100 = card("NVIDIA H100", "9.0", 79.2)


def facts(requires: Any = None, cuda: str = "13.0", python: str = "3.12", **packages: str) -> Facts:
    raw = machine(_H100, driver=driver(None, cuda), host={"python": python}, packages=packages)
    return facts_from_json({**raw, "requires": requires} if requires is not None else raw)


@pytest.mark.parametrize(
    ("package", "text", "of", "range_"),
    [
        ("trl", "0.25.0", "vllm", "==0.10.2"),  # between rows that agree
        ("trl", "1.16.0", "vllm", ">=0.22.0,<=0.31.0"),
        ("trl", "1.9.0", "vllm", ">=0.17.0,<=0.25.1"),  # the row of its minor version
        ("trl", "1.17.0", "vllm", None),  # beyond the table nobody can say
        ("trl", "1.16.0.dev0", "vllm", None),
        ("vllm", "0.11.1", "torch", None),  # two rows of its minor disagree
        ("vllm", "0.19.0", "torch", "==2.10.0"),
        ("unsloth", "2026.6.5", "torch", ">=2.4.0,<2.11.0"),
        ("unsloth", "2026.8.30", "torch", None),  # its neighbours disagree
        ("unsloth", "2026.3.11", "torch", ">=2.4.0"),  # no cap yet
        ("torchao", "0.14.1", "torch", "==2.9.*"),
        ("nobody", "1.0", "torch", None),
    ],
)
def test_the_table(package: str, text: str, of: str, range_: str | None) -> None:
    assert asked(package, Version(text), of) == range_


def test_the_table_is_sorted_and_readable() -> None:
    for package, rows in RELEASES.items():
        order = [Version(v) for v, _ in rows]
        assert order == sorted(order), package
        assert all(len(specifiers(spec)) for _, asks in rows for spec in asks.values())
    assert [Version(v) for v in TORCH_CUDA] == sorted(Version(v) for v in TORCH_CUDA)


def test_what_we_ask_is_what_pyproject_asks() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [Requirement(line) for extra in ("train", "vllm", "unsloth") for line in extras[extra]]
    declared: dict[str, str] = {}
    for r in lines:
        declared.setdefault(r.name.replace("-", "_"), str(r.specifier))
    for package, range_ in OURS.items():
        assert specifiers(declared[package]) == specifiers(range_), package
    assert specifiers(project["requires-python"]) == specifiers(OUR_PYTHON)


def test_installed_metadata_speaks_before_the_table() -> None:
    told = facts({"trl": ["vllm<=0.40,>=0.35; extra == 'vllm'"]}, trl="1.16.0", vllm="0.36.0")
    wanted = need(told, "trl", Version("1.16.0"), "vllm")
    assert wanted is not None and "installed metadata" in wanted.source
    assert conflicts(told) == []
    # but it speaks for the installed version only
    other = need(told, "trl", Version("1.15.0"), "vllm")
    assert other is not None and "released metadata" in other.source


def test_markers_are_read_for_the_machine_not_for_us() -> None:
    lines = {"unsloth_zoo": ["torch<2.9; sys_platform != 'darwin'", "torch<2.1; python_version < '3.9'"]}
    assert [str(n.range) for n in conflicts(facts(lines, unsloth_zoo="2026.10.9", torch="2.13.0"))] == ["<2.9"]
    mac = machine(
        host={"platform": "darwin", "arch": "arm64"}, packages={"unsloth_zoo": "2026.10.9", "torch": "2.13.0"}
    )
    assert conflicts(facts_from_json({**mac, "requires": lines})) == []


@pytest.mark.parametrize(
    "requires", [None, 3, [], {"trl": 3}, {"trl": [3, "not a requirement ///", ""]}, {"trl": {"a": 1}}]
)
def test_odd_metadata_is_passed_over(requires: Any) -> None:
    assert conflicts(facts(requires, trl="1.16.0", vllm="0.31.0", torch="2.13.0")) == []


@pytest.mark.parametrize(
    ("range_", "text", "takes"),
    [
        ("<=0.31.0", "0.31.0+cu129", True),  # the local tag is no excess
        ("==2.10.0", "2.10.0a0+nv25.11", True),  # a vendor's pre-release of it
        ("==2.10.0", "2.10.1", False),
        (">=0.21.0", "0.21.1.dev0", True),
        (">=4.56,!=5.0.*,!=5.1.*", "5.1.0", False),
    ],
)
def test_ranges(range_: str, text: str, takes: bool) -> None:
    assert allows(specifiers(range_), Version(text)) == takes


def test_the_proof_names_both_sides_and_what_does_not_help() -> None:
    walls = {
        w.code: w for w in find_walls(facts(trl="0.25.0", vllm="0.12.0", transformers="4.57.1", torch="2.9.0+cu128"))
    }
    wall = walls["LOCK-TRL-VLLM"]
    assert wall.because[0].startswith("trl 0.25.0 needs vllm ==0.10.2")
    assert wall.because[1] == "and packages.vllm = 0.12.0"
    assert wall.because[2].startswith("therefore ")
    assert wall.help[0].command == 'pip install "trl==1.6.0"'
    assert wall.wont_help is not None and "1.16.0 needs vllm >=0.22.0" in wall.wont_help


@pytest.mark.parametrize(
    ("packages", "change"),
    [
        # one package: TRL knows this vLLM from 0.27 to 1.6; swapping vLLM would swap torch
        ({"trl": "0.25.0", "vllm": "0.12.0", "transformers": "4.57.1", "torch": "2.9.0"}, {"trl": "1.6.0"}),
        ({"torchao": "0.14.0", "torch": "2.10.0+cu130"}, {"torchao": "0.16.0"}),
        ({"vllm": "0.11.0", "transformers": "5.1.0", "torch": "2.8.0"}, {"transformers": "4.57.6"}),
        # TRL is ours and stays; vLLM 0.30 is the newest that takes this transformers, and brings its torch
        (
            {"trl": "1.16.0", "vllm": "0.33.0", "torch": "2.14.0", "transformers": "5.24.0"},
            {"vllm": "0.30.0", "torch": "2.13.0"},
        ),
        ({"unsloth": "2026.3.11", "unsloth_zoo": "2025.12.7"}, {"unsloth_zoo": "2026.10.9"}),
        ({"trl": "1.16.0", "vllm": "0.31.0", "torch": "2.13.0", "transformers": "5.17.0"}, {}),
    ],
)
def test_the_smallest_change(packages: dict[str, str], change: dict[str, str]) -> None:
    known = facts(**packages)
    assert remedy(known, conflicts(known)) == change


def test_a_change_minds_the_driver_and_python() -> None:
    old_driver = facts(cuda="12.8", vllm="0.31.0", torch="2.10.0+cu128", trl="1.16.0")
    assert remedy(old_driver, conflicts(old_driver)) is None  # vLLM 0.22 and newer pin CUDA 13 builds
    assert not runs_here(facts(python="3.10"), "trl", Version("1.16.0"))
    assert not runs_here(facts(python="3.14"), "vllm", Version("0.19.1"))
    assert runs_here(facts(python="3.14"), "vllm", Version("0.31.0"))


def test_two_packages_without_a_third_in_common() -> None:
    apart = facts(unsloth="2026.6.1", unsloth_zoo="2026.6.1", vllm="0.21.0", torch="2.10.0+cu128")
    pair = no_common(apart, "unsloth", "vllm", "torch")
    assert pair is not None and str(pair[0].range) == "<2.11.0,>=2.4.0" and str(pair[1].range) == "==2.11.0"
    wall = next(w for w in find_walls(apart) if w.code == "LOCK-UNSLOTH-VLLM")
    assert any(line.startswith("therefore no torch") for line in wall.because)
    assert no_common(facts(unsloth="2026.10.9", vllm="0.21.0"), "unsloth", "vllm", "torch") is None


_PACKAGES = ("vllm", "trl", "torch", "transformers", "unsloth", "unsloth_zoo", "torchao")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_remedy_leaves_no_need_unmet_and_its_command_installs_it(data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(_PACKAGES), min_size=2))
    packages = {p: data.draw(st.sampled_from(versions(p))) for p in chosen}
    known = facts(**packages)
    unmet = conflicts(known)
    change = remedy(known, unmet)
    if change is None:
        return
    after = {**installed(known), **{p: Version(v) for p, v in change.items()}}
    touched = {name for n in unmet for name in (n.who, n.of)} | set(change)
    assert [str(n) for n in conflicts(known, after) if {n.who, n.of} & touched] == []
    assert set(re.findall(r'"(\w+)==([^"]+)"', pip_line(change))) == set(change.items())
    for package, text in change.items():
        ours, old = specifiers(OURS.get(package, "")), installed(known)[package]
        assert allows(ours, Version(text)) or not allows(ours, old)
        assert base(Version(text)) != base(old)


def test_python_ranges_are_steps() -> None:
    assert asked_python("vllm", Version("0.10.1")) == ">=3.9,<3.13"
    assert asked_python("vllm", Version("0.32.0")) == ">=3.11,<3.15"
    assert asked_python("nobody", Version("1")) is None


def test_walls_of_locks_are_json() -> None:
    known = facts(unsloth="2026.6.1", unsloth_zoo="2026.6.1", vllm="0.33.0", trl="1.16.0", torch="2.15.0")
    assert json.dumps([w.because for w in find_walls(known)])
