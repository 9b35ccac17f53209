"""In a notebook: the diagnosis shows itself, and a kernel that differs from the disk is told so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import doctor_samples as samples
import pytest

import doctor
from doctor import notebook
from doctor.diagnosis import Diagnosis, Help, Wall
from doctor.memory import Sizes


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A plan that only remembers what it was asked."""
    asked: list[tuple[Any, ...]] = []

    def diagnose(facts: Any, model: str | None, sizes: Sizes) -> Diagnosis:
        asked.append((facts, model, sizes))
        return samples.diagnosis(facts=facts)

    monkeypatch.setitem(sys.modules, "doctor.plan", SimpleNamespace(diagnose=diagnose))
    return asked


class Tags(HTMLParser):
    """Holds that every tag that opens also closes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> str:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags.text


def test_the_public_call(judged: list[tuple[Any, ...]]) -> None:
    d = doctor.diagnose("Qwen/Qwen3-4B", facts=samples.facts(), group_size=4)
    assert judged == [(samples.facts(), "Qwen/Qwen3-4B", Sizes(group_size=4))]
    assert isinstance(d, Diagnosis) and d.plan.path == "bf16-hf"
    assert all(getattr(d, f.name) == getattr(samples.diagnosis(), f.name) for f in fields(Diagnosis))
    assert repr(d).startswith("bf16-hf: Qwen/Qwen3-4B runs on NVIDIA GeForce RTX 5090")
    assert "### grpo-doctor" in d._repr_markdown_()


def test_a_folder_that_holds_no_model_is_told_before_the_machine_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model, because there is no config\.json in it"):
        doctor.diagnose(str(tmp_path))


def test_a_probe_of_this_kernel(judged: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doctor.probes.probe", lambda **_: samples.facts())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.11.0+cu128"))
    d = doctor.diagnose()
    assert "this kernel has torch 2.11.0+cu128 loaded, but 2.10.0+cu128 is installed on disk" in d.notes
    assert any(note.startswith("restart the kernel") for note in d.notes)
    assert judged[0][0].extra["loaded"]["torch"] == "2.11.0+cu128"
    assert repr(d).index("note: this kernel") < repr(d).index("Paths, best first")


@pytest.mark.parametrize(
    ("live", "on_disk", "words"),
    [
        ("2.11.0+cu128", "2.9.1+cu128", "2.9.1+cu128 is installed on disk"),
        ("2.11.0+cu128", "2.11.0+cpu", "2.11.0+cpu is installed on disk"),
        ("2.11.0+cu128", "absent", "no longer installed"),
        ("2.11.0+cu128", "2.11.0", None),
        ("2.11.0", "2.11.0", None),
        ("2.11.0", None, None),
    ],
)
def test_loaded_against_installed(live: str, on_disk: str | None, words: str | None) -> None:
    facts = samples.facts(packages=MappingProxyType({"torch": on_disk}), extra=MappingProxyType({}))
    notes = notebook.kernel_notes(facts, {"torch": live})
    assert bool(notes) == (words is not None)
    assert words is None or (words in notes[0] and "restart the kernel" in notes[-1])


def test_memory_this_kernel_holds() -> None:
    extra = MappingProxyType({"memory_holders": [{"gpu": 0, "name": "this Python process", "gib": 6.5}]})
    assert notebook.kernel_notes(samples.facts(extra=extra), {}) == [
        "this kernel itself holds 6.5 GiB of GPU 0; a restart frees it"
    ]


def test_loaded_versions_never_trip() -> None:
    odd = {
        "torch": SimpleNamespace(__version__="2.1"),
        "trl": SimpleNamespace(),
        "vllm": None,
        "numpy": SimpleNamespace(__version__=3),
    }
    assert notebook.loaded_versions(odd) == {"torch": "2.1"}


def test_html_is_whole_escaped_and_says_the_same() -> None:
    evil = Wall(
        "X-1", ("cpu",), "<script>alert(1)</script> & more", ("a < b",), (Help("do <b>", "echo '<x>' && y", "try"),)
    )
    d = samples.diagnosis("bf16-hf", walls=(samples.NO_VLLM, evil, samples.SMALL_SHM))
    shown = notebook.ShownDiagnosis(**{f.name: getattr(d, f.name) for f in fields(Diagnosis)}, notes=("restart",))
    page = shown._repr_html_()
    assert "<script>" not in page
    text = parsed(page)
    for words in ("bf16-hf: Qwen/Qwen3-4B runs on", "needs 13.5 of 31.0 GiB", "VLLM-ABSENT", "pip install", "restart",
                  "<script>alert(1)</script> & more", "Then this machine can take fp8-vllm.", "driver 570.86"):  # fmt: skip
        assert words in text, words


def test_html_without_a_plan() -> None:
    d = samples.diagnosis(None)
    d = replace(d, plan=replace(d.plan, memory=None, reasons=(), micro_batch=None, rollout_rows=None))
    shown = notebook.ShownDiagnosis(**{f.name: getattr(d, f.name) for f in fields(Diagnosis)})
    assert "no room: paths are open" in parsed(shown._repr_html_())


def test_import_doctor_is_light() -> None:
    code = "import sys; before = set(sys.modules); import doctor; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "doctor.notebook" not in done.stdout and "torch" not in done.stdout
