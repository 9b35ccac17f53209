"""Nothing private leaves: UUIDs, homes, users, tokens, addresses."""

from __future__ import annotations

import os

import pytest

from doctor.privacy import scrub

HOME = os.path.expanduser("~")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("GPU-3f7a1c22-9d2b-4c1e-8f00-0123456789ab busy", "GPU-... busy"),
        ("MIG-3f7a1c22-9d2b-4c1e-8f00-0123456789ab", "MIG-..."),
        ("MIG-GPU-3f7a1c22-9d2b-4c1e-8f00-0123456789ab/1/0", "MIG-..."),
        ("0,GPU-3f7a1c22", "0,GPU-..."),
        ("at /home/ada/models/x.bin", "at ~/models/x.bin"),
        ("/Users/ada/x", "~/x"),
        (r"C:\Users\ada\x", r"~\x"),
        ("token hf_abcdefghijklmnop1234 used", "token hf_... used"),
        ("connect 10.1.2.3:29500 failed", "connect ... failed"),
        ("https://me:secret@host/simple", "https://...@host/simple"),
        (
            "torch 2.11.0+cu130, flashinfer 0.6.8.1, driver 580.95.05",
            "torch 2.11.0+cu130, flashinfer 0.6.8.1, driver 580.95.05",
        ),
        ("two\n  lines\tand \x1b[31mcolour\x1b[0m", "two lines and colour"),
        ("NVIDIA GPU-accelerated", "NVIDIA GPU-accelerated"),
        ("vllm/platforms/cuda.py::import_kernels", "vllm/platforms/cuda.py::import_kernels"),
    ],
)
def test_scrub(text: str, clean: str) -> None:
    assert scrub(text) == clean


def test_home_becomes_a_tilde() -> None:
    if len(HOME) > 3:
        assert scrub(f"in {HOME}/venv/lib") == "in ~/venv/lib"
        assert scrub(f"{HOME}2/venv").startswith(f"{HOME}2")


def test_long_text_keeps_both_ends() -> None:
    cut = scrub("start " + "x" * 5000 + " end")
    assert len(cut) <= 400 and cut.startswith("start") and cut.endswith("end")
    assert len(scrub("x" * 5000, None)) == 5000


def test_scrubbing_twice_changes_nothing() -> None:
    text = "GPU-3f7a1c22-9d2b-4c1e-8f00-0123456789ab at /home/ada with hf_abcdefghijklmnop1234"
    assert scrub(scrub(text)) == scrub(text)


def test_secrets_of_the_environment_are_taken_out_whatever_they_look_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalr/XUtnFEMI")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tokenizers")
    text = "key=0123456789abcdef0123456789abcdef01234567 and wJalr/XUtnFEMI of tokenizers"
    assert scrub(text) == "key=... and ... of tokenizers"


@pytest.mark.parametrize(
    ("name", "clean"),
    [("gpu-box-07", "cannot reach ...: no route"), ("ubuntu", "cannot reach ubuntu: no route")],
    ids=["a name", "a word as others"],
)
def test_the_name_of_this_machine(monkeypatch: pytest.MonkeyPatch, name: str, clean: str) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", name, "6", "1", "x86_64")))
    assert scrub(f"cannot reach {name}: no route") == clean
