"""The page: exact text for a typical machine, and what must hold for any."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import doctor_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor import phrases, render
from doctor.diagnosis import GPU_PATHS, PATHS, Diagnosis, Help, Wall
from doctor.facts import Facts, Gpu, Probe, facts_from_json
from doctor.plan import diagnose

PAGE = """\
bf16-hf: Qwen/Qwen3-4B runs on NVIDIA GeForce RTX 5090 (31.0 GiB free)
  16-bit base + LoRA, computes in bfloat16, rollouts by the portable engine
  needs 13.5 of 31.0 GiB: weights 7.5, kv cache 2.2, activations 1.9, workspace
    1.4, optimizer 0.5
  4 completions in a backward pass, 64 generated at once
  - bfloat16, since compute capability 12.0 >= 8.0

Paths, best first
  fp8-vllm   closed   VLLM-ABSENT, FP8-CUDA-129
  bf16-vllm  closed   VLLM-ABSENT
  fp16-vllm  closed   VLLM-ABSENT
  fp8-hf     closed   FP8-HF-UNPROVEN
  bf16-hf    chosen
  fp16-hf    closed   FP16-NEEDLESS
  qlora-hf   open
  cpu        open

Walls in front of better paths

  VLLM-ABSENT closes fp8-vllm, bf16-vllm, fp16-vllm
    vLLM is not installed
    because  packages.vllm = absent
             the vLLM paths draw their rollouts with vLLM
    help     Install the set for a CUDA 12.8 driver
             $ pip install "torch==2.10.0+cu128" "vllm==0.19.1" "trl==0.24.0" \\
                 "transformers==4.57.6" --extra-index-url \\
                 "https://download.pytorch.org/whl/cu128"
    no use   A newer vLLM: its torch needs driver 580

  FP8-CUDA-129 closes fp8-vllm
    flashinfer finds nvcc 12.8.61, and SM 12.x needs CUDA 12.9 or newer
    because  toolkit.nvcc = 12.8.61
    help     Install toolkit 12.9 and point CUDA_HOME at it (likely)
             $ export CUDA_HOME=/usr/local/cuda-12.9

  FP8-HF-UNPROVEN closes fp8-hf
    nobody has measured FP8 without vLLM to be faster on this card

Then this machine can take fp8-vllm.

Warnings, which close nothing

  SHM-SMALL: /dev/shm has 0.06 GiB

Worse paths are also closed by FP16-NEEDLESS (-v shows them)

This machine (nothing private in it: paste it into a bug report)
  grpo-doctor 0.1.0: bf16-hf for Qwen/Qwen3-4B
  closed by VLLM-ABSENT, FP8-CUDA-129: fp8-vllm
  closed by VLLM-ABSENT: bf16-vllm, fp16-vllm
  closed by FP8-HF-UNPROVEN: fp8-hf
  closed by FP16-NEEDLESS: fp16-hf
  linux x86_64, Ubuntu 22.04, glibc 2.35, Python 3.12, RAM 64 GiB, /dev/shm
    0.062 GiB, in a container
  GPU 0: NVIDIA GeForce RTX 5090, 12.0, 31.0 of 31.8 GiB free
  driver 570.86, CUDA 12.8, nvcc 12.8.61 (/usr/local/cuda)
  torch 2.10.0+cu128, bitsandbytes 0.49.2
  not installed: vllm
  works: torch_cuda
  fails: fp8_matmul: cutlass cannot initialize
  GPU 0: Xorg holds 0.8 GiB
  HF_HUB_OFFLINE=1
"""


def test_the_whole_page() -> None:
    assert render.text(samples.diagnosis()) == PAGE


def test_colour_only_adds_colour() -> None:
    coloured = render.text(samples.diagnosis(), colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == PAGE


def test_verbose_shows_every_fact_with_its_source_or_reason() -> None:
    page = render.text(samples.diagnosis(), verbose=True)
    assert "driver.version = 570.86 [NVML]" in page
    assert "probes.vllm_start = unknown, because nobody tried" in page
    assert "env.CUDA_VISIBLE_DEVICES = unset" in page
    assert "torch_arch_list = sm_90 sm_120" in page
    assert "Walls in front of worse paths" in page and "the card has bfloat16" in page


def test_no_path_open_says_so_first_and_what_will_be() -> None:
    absent = Wall(
        "TORCH-ABSENT", PATHS, "torch is not installed", (), (Help("Install torch", "pip install torch", "certain"),)
    )
    d = samples.diagnosis(None, walls=(absent,))
    d = replace(d, plan=replace(d.plan, memory=None, micro_batch=None, rollout_rows=None, reasons=()))
    page = render.text(d)
    assert page.startswith("no path is open on this machine as it is\n")
    assert "TORCH-ABSENT closes every path" in page and "$ pip install torch" in page
    assert "Then this machine can take fp8-vllm." in page
    assert page.index("no path is open") < page.index("TORCH-ABSENT closes") < page.index("This machine")


def test_no_room_is_not_called_closed() -> None:
    d = samples.diagnosis(None, walls=())
    d = replace(d, paths={p: replace(s, fits=False) for p, s in d.paths.items()})
    page = render.text(d)
    assert page.startswith("no room: ") and "bf16-hf    open     does not fit into memory" in page


def test_where_a_better_path_is_open_but_has_no_room_the_warnings_are_told_in_full() -> None:
    full = Wall("GPU-BUSY", (), "others hold 25 GiB", ("free_gib = 6.0",), (Help("Stop them", "nvidia-smi", "likely"),))
    d = samples.diagnosis("qlora-hf", walls=(full,))
    page = render.text(d)
    assert "free_gib = 6.0" in page and "$ nvidia-smi" in page
    assert page.index("$ nvidia-smi") < page.index("Then this machine can take")
    assert "free_gib" not in render.text(samples.diagnosis("fp8-vllm", walls=(full,)))


def test_reasons_are_not_said_twice() -> None:
    assert "is closed (FP8-HF-UNPROVEN)" not in render.text(samples.diagnosis())
    assert "is closed (FP8-HF-UNPROVEN)" in render.text(samples.diagnosis(), verbose=True)


def test_cpu_verdict() -> None:
    none = Wall("GPU-NONE", GPU_PATHS, "no GPU")
    d = samples.diagnosis("cpu", walls=(none,), facts=samples.facts(gpus=()))
    assert render.text(d).startswith("cpu: Qwen/Qwen3-4B runs on the CPU\n")
    assert "GPU-NONE closes every GPU path" in render.text(d) and "GPU: none" in render.text(d)


def test_of_a_model_of_unknown_size_it_is_not_said_that_it_runs() -> None:
    for facts, where in ((samples.facts(gpus=(), probes=MappingProxyType({})), "on the CPU"), (samples.facts(), "on ")):
        head = phrases.verdict(diagnose(facts, "someone/nameless"))
        assert "runs" not in head and f"would be taken {where}" in head and "memory is not checked" in head
        assert "memory is not checked" not in phrases.verdict(diagnose(facts, "Qwen/Qwen3-0.6B"))


def test_a_missing_card_is_not_a_trial_that_failed() -> None:
    trial = MappingProxyType({"torch_cuda": Probe(False, "AssertionError: Torch not compiled with CUDA enabled")})
    without = render.text(samples.diagnosis("cpu", facts=samples.facts(gpus=(), probes=trial)))
    assert "GPU: none" in without and "Torch not compiled" not in without
    with_card = render.text(samples.diagnosis("cpu", facts=samples.facts(probes=trial)))
    assert "fails: torch_cuda: AssertionError: Torch not compiled with CUDA enabled" in " ".join(with_card.split())


def test_several_cards() -> None:
    two = (samples.RTX_5090, replace(samples.RTX_5090, index=1))
    d = samples.diagnosis(facts=samples.facts(gpus=two))
    assert phrases.place(replace(d, plan=replace(d.plan, gpus=(0, 1)))).startswith("on 2 cards, first NVIDIA")
    assert phrases.place(replace(d, plan=replace(d.plan, gpus=(1,)))) == "on NVIDIA GeForce RTX 5090 (31.0 GiB free)"


def test_markdown_has_a_table_commands_and_a_folded_machine() -> None:
    page = render.markdown(samples.diagnosis(), notes=("restart the kernel",))
    assert "| `bf16-hf` | chosen |  |" in page
    assert "```sh\n  export CUDA_HOME=/usr/local/cuda-12.9\n  ```" in page
    assert "<details><summary>This machine</summary>" in page and "note: restart the kernel" in page
    assert page.count("```") % 2 == 0


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (None, []),
        ("pip install torch", ["$ pip install torch"]),
        ("one\ntwo", ["$ one", "$ two"]),
        (
            'pip install "a >= 1, < 2" bbbbbbbbbb cccccccccc',
            ['$ pip install "a >= 1, < 2" \\', "    bbbbbbbbbb cccccccccc"],
        ),
        ("x" * 50, ["$ " + "x" * 50]),
    ],
)
def test_commands_can_be_pasted(command: str | None, lines: list[str]) -> None:
    assert render.command_lines(command, 32) == lines


def test_a_broken_command_is_the_same_command_to_a_shell() -> None:
    import shlex

    command = samples.NO_VLLM.help[0].command or ""
    shown = "\n".join(line.removeprefix("$ ") for line in render.command_lines(command, 60))
    assert shlex.split(shown.replace("\\\n", " ")) == shlex.split(command)


@pytest.mark.parametrize(
    "extra",
    [
        {"sources": 3, "unknown": ["x"], "memory_holders": "y", "requires": 7},
        {"memory_holders": [None, {"gib": "big"}, {"name": 4}], "unknown": {"a": {"b": 1}}},
        {"deep": {"a": [{"b": [1, 2, {"c": None}]}]}},
    ],
)
def test_odd_extras_are_shown_not_tripped_over(extra: dict[str, Any]) -> None:
    d = samples.diagnosis(facts=samples.facts(extra=MappingProxyType(extra)))
    assert render.text(d, verbose=True) and render.markdown(d)


def test_nothing_private_from_a_foreign_facts_file() -> None:
    raw = {"host": {"os": "Linux of /home/ada"}, "gpus": [{"name": "L4 GPU-3f7a1c22-9d2b-4c1e-8f00-0123456789ab"}],
           "probes": {"vllm_import": {"ok": False, "error": "no /home/ada/x hf_abcdefghijklmnop1234"}},
           "env": {"CUDA_VISIBLE_DEVICES": "GPU-3f7a1c22-9d2b-4c1e-8f00-0123456789ab"}}  # fmt: skip
    d = samples.diagnosis(facts=facts_from_json(raw))
    for page in (render.text(d, verbose=True), render.markdown(d)):
        assert "ada" not in page and "3f7a1c22" not in page and "abcdefghij" not in page


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=120)
walls = st.builds(
    Wall,
    st.sampled_from(["A-1", "LONG-CODE-OF-A-WALL"]),
    st.lists(st.sampled_from(PATHS), unique=True).map(tuple),
    words,
    st.lists(words, max_size=3).map(tuple),
    st.lists(st.builds(Help, words, st.none() | words, st.sampled_from(["certain", "likely", "try"])), max_size=2).map(
        tuple
    ),
    st.none() | words,
)
gpus = st.builds(Gpu, st.none() | st.integers(0, 9), st.none(), st.none() | words, st.none() | words, st.none(),
                 st.none() | st.floats(0, 1e4), st.none() | st.floats(0, 1e4))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(walls, max_size=3),
    st.sampled_from([None, *PATHS]),
    st.none() | st.lists(gpus, max_size=2).map(tuple),
    st.booleans(),
)
def test_any_diagnosis_fits_eighty_columns(found: list[Wall], path: str | None, cards: Any, verbose: bool) -> None:
    d = samples.diagnosis(path, walls=tuple(found), facts=Facts(gpus=cards))
    for line in render.text(d, verbose=verbose).splitlines():
        longest = max((len(w) for w in re.split(r"\s", line)), default=0)
        command = "$ " in line or line.startswith(" " * 17)
        assert len(line) <= render.WIDTH or longest > 60 or command, line
    assert render.markdown(d).endswith("\n")


def test_every_state_is_a_word() -> None:
    d: Diagnosis = samples.diagnosis()
    assert {state for _, state, _ in phrases.path_rows(d)} == {"closed", "chosen", "open"}
