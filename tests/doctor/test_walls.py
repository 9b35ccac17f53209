"""Walls: each has a machine that raises it and one that does not; edges of the rules; what no facts file may break."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_cases import BF16, CU128, CU130, FP8, OK, VLLM, card, driver, failed, handed, machine, torch, with_probes
from machine_more import ours
from wall_pairs import MODEL_PAIRS, PAIRS

import doctor
from doctor.diagnosis import GPU_PATHS, PATHS, diagnosis_to_json
from doctor.explain import CODES
from doctor.facts import FactsError, facts_from_json
from doctor.plan import diagnose
from doctor.readings import driver_cuda
from doctor.walls import LASTING, find_walls
from doctor.walls_torch import covers

ROOM = Path(doctor.__file__).parent
MACHINES = [case.facts for case in (*handed(), *ours())]


def codes(facts: dict[str, Any], model: str | None = None) -> set[str]:
    return {wall.code for wall in diagnose(facts_from_json(facts), model).walls}


def closed(facts: dict[str, Any]) -> set[str]:
    return {path for path, state in diagnose(facts_from_json(facts)).paths.items() if not state.open}


@pytest.mark.parametrize("code", PAIRS)
def test_a_machine_raises_it_and_another_does_not(code: str) -> None:
    raising, sparing = PAIRS[code]
    assert code in codes(raising)
    assert code not in codes(sparing)


@pytest.mark.parametrize("code", MODEL_PAIRS)
def test_a_model_raises_it_and_another_does_not(code: str) -> None:
    facts, raising, sparing = MODEL_PAIRS[code]
    assert code in codes(facts, raising)
    assert code not in codes(facts, sparing)


@pytest.mark.parametrize(
    ("packages", "model", "wall"),
    [
        ({"datasets": "absent"}, None, "STACK-INCOMPLETE"),
        ({"trl": "1.15.0", "triton": "absent"}, None, "TRL-TRITON"),
        ({"gguf": "absent"}, "Qwen3-0.6B-Q8_0.gguf", "MODEL-GGUF"),
    ],
)
@pytest.mark.parametrize("gpus", [(), (card("RTX 4090", "8.9", 23.5),)], ids=["cpu", "gpu"])
def test_what_every_path_needs_closes_every_path_until_it_is_installed(
    gpus: tuple[Any, ...], packages: dict[str, str], model: str | None, wall: str
) -> None:
    sees = OK if gpus else failed("no CUDA device")
    found = diagnose(facts_from_json(machine(*gpus, packages=packages, probes={"torch_cuda": sees})), model)
    assert all(wall in state.walls for state in found.paths.values()) and found.plan.path is None
    assert found.after_fix == ("fp8-vllm" if gpus else "cpu")


def test_every_code_has_a_pair_and_a_page() -> None:
    assert set(CODES) == set(PAIRS) | set(MODEL_PAIRS)
    assert set(CODES) >= LASTING


def test_every_code_in_the_source_has_a_page() -> None:
    """Codes are the first argument of Wall, Cause, Trial and their makers: literals all, so the syntax tree knows them."""
    makers = {"Wall", "_cause", "_wrong_maker", "Trial"}
    found = set()
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
                found |= {
                    a.value for a in node.args[:3]
                    if isinstance(a, ast.Constant) and isinstance(a.value, str) and a.value.isupper() and "-" in a.value
                }  # fmt: skip
    assert found <= set(CODES)
    assert len(found) > 60


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [
        ("6.0", False, False), ("7.0", False, False), ("7.5", False, False), ("8.0", True, False), ("8.6", True, False),
        ("8.7", True, False), ("8.9", True, True), ("9.0", True, True), ("10.0", True, True), ("12.1", True, True),
    ],
)  # fmt: skip
def test_precision_by_capability(capability: str, bf16: bool, fp8: bool) -> None:
    """bf16 iff >= 8.0; FP8 iff >= 8.9, as a pair: the L4 (8.9) has it, the A100 (8.0) and the Orin (8.7) have not."""
    facts = machine(
        card("card", capability, 24.0), packages={"torch": None, "vllm": None}, probes={"torch_arch_list": None}
    )
    assert (not closed(facts) & set(BF16)) == bf16
    assert ("fp8-vllm" not in closed(facts)) == fp8


@pytest.mark.parametrize(
    ("arch", "capability", "jit", "runs"),
    [
        (["sm_86"], (8, 9), True, True),  # 8.6 code on 8.9
        (["sm_89"], (8, 6), True, False),  # not downwards
        (["sm_80"], (9, 0), True, False),  # not across majors
        (["sm_120"], (12, 1), True, True),
        (["sm_121"], (12, 0), True, False),
        (["sm_90a"], (9, 0), True, True),
        (["sm_100a"], (10, 3), True, False),  # `a` is exactly that
        (["sm_100f"], (10, 3), True, True),  # `f` is the family
        (["compute_90"], (12, 0), True, True),  # PTX, if the driver compiles it
        (["compute_90"], (12, 0), False, False),
        (["compute_90a"], (12, 0), True, False),
        (["compute_120"], (9, 0), True, False),
        ([], (9, 0), True, False),
        (["gfx1100", "nonsense", "sm_"], (9, 0), True, False),
    ],
)
def test_which_code_runs_on_which_card(arch: list[str], capability: tuple[int, int], jit: bool, runs: bool) -> None:
    assert covers(tuple(arch), capability, jit=jit) == runs


@pytest.mark.parametrize(
    ("branch", "cuda"),
    [("570.86.16", (12, 8)), ("580.95", (13, 0)), ("575.57", (12, 9)), ("596.49", (13, 2)), ("535.1", (12, 2)),
     ("470.82", (11, 4)), ("100.1", None), ("nonsense", None)],
)  # fmt: skip
def test_the_drivers_cuda_by_its_branch(branch: str, cuda: tuple[int, int] | None) -> None:
    assert driver_cuda(facts_from_json(machine(driver=driver(branch, None)))) == cuda


@pytest.mark.parametrize(
    ("torch_version", "served", "worked", "closes"),
    [
        ("2.11.0+cu130", "12.8", None, True),
        ("2.11.0+cu130", "13.0", None, False),
        ("2.10.0+cu128", "12.2", None, False),  # within one major
        ("2.5.1+cu121", "11.8", None, True),
        ("2.5.1+cu118", "13.0", None, False),  # a newer driver always serves
        ("2.11.0+cu130", "12.8", True, False),  # forward compatibility: a passed trial outranks the rule
        ("2.11.0", "12.8", None, False),  # no tag: nobody knows
        ("2.11.0+cu130", None, None, False),
    ],
)
def test_the_driver_rule_binds_by_major(
    torch_version: str, served: str | None, worked: bool | None, closes: bool
) -> None:
    sections = torch(torch_version, None, {"ok": worked})
    assert ("TORCH-DRIVER" in codes(machine(card("c", "9.0", 80.0), driver=driver(None, served), **sections))) == closes


@pytest.mark.parametrize(
    ("nvcc", "state", "torch_version", "flashinfer", "capability", "closes"),
    [
        ("12.8", "present", "2.11.0+cu130", "0.6.18", "12.0", True),  # nvcc is asked before torch
        ("12.9", "present", "2.10.0+cu128", "0.6.18", "12.0", False),
        ("13.0", "present", "2.10.0+cu128", "0.6.18", "12.1", False),
        (None, "absent", "2.10.0+cu128", "0.6.18", "12.0", True),  # torch where there is no nvcc
        (None, "absent", "2.11.0+cu130", "0.6.18", "12.0", False),
        (None, "unknown", "2.10.0+cu128", "0.6.18", "12.0", False),  # unknown is not no
        (None, "present", "2.10.0+cu128", "0.6.18", "12.0", False),
        ("12.8", "present", "2.14.0+cu130", "0.7.2", "12.0", False),  # flashinfer PR 3633
        ("12.8", "present", "2.14.0+cu130", "0.7.2", "12.1", True),
        ("12.8", "present", "2.13.0+cu130", "0.7.0.post1", "12.0", True),
        ("12.8", "present", "2.13.0+cu130", None, "12.0", True),  # vllm 0.27 pins an older one
        ("12.4", "present", "2.11.0+cu130", "0.6.18", "9.0", False),  # only SM 12.x
    ],
)
def test_flashinfers_toolkit_gate(
    nvcc: str | None, state: str, torch_version: str, flashinfer: str | None, capability: str, closes: bool
) -> None:
    facts = machine(
        card("c", capability, 31.8),
        toolkit={"state": state, "nvcc": nvcc, "where": None},
        **torch(torch_version, None, vllm="0.27.1", flashinfer=flashinfer),
    )
    walls = {w.code: w for w in find_walls(facts_from_json(facts))}
    assert ("FP8-CUDA-129" in walls) == closes
    if closes:
        assert walls["FP8-CUDA-129"].closes == ("fp8-vllm",)


@pytest.mark.parametrize(
    ("error", "closes"),
    [
        ("Bfloat16 is only supported on GPUs with compute capability of at least 8.0", ()),
        ("mma -> mma layout conversion is only supported on Ampere", ()),
        ("VLLM_USE_V1=1 is not supported with Compute Capability < 8.0", ()),
        ("Free memory on device (7.34/139.72 GiB) on startup is less than desired", ()),
        ("User-specified max_model_len (8192) is greater than the derived max_model_len (2048)", ()),
        ("max_num_batched_tokens (2048) is smaller than max_model_len (4096)", ()),
        ("LoRA rank 64 is greater than max_lora_rank 16.", ()),
        ("gpu_memory_utilization must be less than or equal to 1.0", ()),
        ("Too large swap space. 8.00 GiB out of the 6.00 GiB total CPU memory is allocated for the swap space.", ()),
        ("Sleep mode is not supported on current platform.", ()),
        ("torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]", ()),
        ("CUDA graph capture failed; try enforce_eager=True", ()),
        (
            "An attempt has been made to start a new process before the current process has finished its bootstrapping",
            (),
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", ()),
        ("To serve at least one request with the models's max seq len (32768), 4.5 GiB KV cache is needed", ()),
        ("nvcc fatal   : Unknown option '-static-global-template-stub=false'", ()),
        ("FlashInfer requires GPUs with sm75 or higher", ()),
        ("NCCL error: unhandled system error", ()),
        ("Cannot re-initialize CUDA in forked subprocess", ()),
        ("We couldn't connect to 'https://huggingface.co' to load the files", ()),
        ("type fp8e4nv not supported in this architecture", ("fp8-vllm",)),
        ("no kernel image is available for execution on the device", VLLM),
        ("the provided PTX was compiled with an unsupported toolchain", VLLM),
        ("'LRUCacheWorkerLoRAManager' object has no attribute 'get_dummy_lora_warmup_rank'", VLLM),
        ("NameError: name 'align_completion_tool_mask' is not defined", VLLM),
        ("cannot import name 'GuidedDecodingParams' from 'vllm.sampling_params'", VLLM),
        ("'aimv2' is already used by a Transformers config, pick another name.", VLLM),
        ("no answer within 180 s in stage 'start vllm'", VLLM),
        ("killed by SIGSEGV", VLLM),
        ("", VLLM),
    ],
)
def test_what_a_failed_start_proves(error: str, closes: tuple[str, ...]) -> None:
    """An option or memory explains it: nothing is closed. Anything else: the three vLLM paths."""
    sections = with_probes(torch("2.10.0+cu128", CU128, vllm="0.19.1"), vllm_import=OK, vllm_start=failed(error))
    facts = machine(card("NVIDIA H100", "9.0", 79.2), driver=driver("570.1", "12.8"), **sections)
    assert closed(facts) - {"fp8-hf"} == set(closes)
    said = [w for w in find_walls(facts_from_json(facts)) if any("vllm_start failed" in b for b in w.because)]
    assert len(said) == 1 and said[0].closes == closes


def test_one_cause_gives_one_wall() -> None:
    """No GPU: neither the CPU build, nor missing vLLM and bitsandbytes are told beside it."""
    facts = machine(**torch("2.13.0+cpu", [], failed("no CUDA device"), bitsandbytes="absent"))
    assert codes(facts) == {"GPU-NONE"}
    old = machine(
        card("RTX 5090", "12.0", 31.8), **torch("2.6.0+cu124", ["sm_90"], failed("no kernel image is available"))
    )
    assert {c for c in codes(old) if c.startswith(("CUDA", "TORCH"))} == {"TORCH-ARCH"}


def test_the_best_card_decides_and_the_others_are_named() -> None:
    both = machine(card("RTX 2080 Ti", "7.5", 10.8), card("RTX 3090", "8.6", 23.6))
    walls = {w.code: w for w in find_walls(facts_from_json(both))}
    assert "BF16-HARDWARE" not in walls
    assert "RTX 3090" in walls["FP8-HARDWARE"].fact and any("2080" in b for b in walls["FP8-HARDWARE"].because)
    assert diagnose(facts_from_json(both)).plan.gpus == (1,)


def test_walls_that_close_come_before_warnings() -> None:
    for facts in MACHINES:
        walls = find_walls(facts_from_json(facts))
        closes = [len(w.closes) for w in walls]
        assert closes == sorted(closes, reverse=True)


def test_a_reason_is_not_said_to_be_one_twice() -> None:
    """Every place that shows a reason writes `because` before it."""
    reasons = [b for facts in MACHINES for w in find_walls(facts_from_json(facts)) for b in w.because]
    assert reasons and not [b for b in reasons if b.lower().startswith("because") or b.endswith(".")]


# What no facts file may break.

_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12))
_json = st.recursive(
    _scalars,
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=8), x, max_size=3)),
    max_leaves=8,
)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in _leaves(v, (*path, k))] or [path]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in _leaves(v, (*path, i))] or [path]
    return [path]


def _put(facts: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(facts)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def _verdict(raw: Any) -> bool:
    """True for a verdict, False for a refusal; both are right, anything else is a crash."""
    try:
        d = diagnose(facts_from_json(raw), "Qwen/Qwen3-4B")
    except FactsError as e:
        assert str(e) and "\n" not in str(e) and len(str(e)) < 300
        return False
    assert tuple(d.paths) == PATHS
    assert d.plan.path is None or d.paths[d.plan.path].open
    json.dumps(diagnosis_to_json(d))
    return True


@settings(max_examples=150, deadline=None)
@given(raw=_json)
def test_any_json_gives_a_verdict_or_one_line(raw: Any) -> None:
    _verdict(raw)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_machine_with_odd_values_gives_a_verdict_or_one_line(data: st.DataObject) -> None:
    facts = data.draw(st.sampled_from(MACHINES))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(_leaves(facts)))
        if path:
            facts = _put(facts, path, data.draw(_json))
    _verdict(facts)


_ODD = (
    "",
    " ",
    "0",
    "-1",
    "9" * 5000,
    "1." * 50,
    "+",
    "+cu",
    "+cu9",
    "cu130",
    "NaN",
    "12.8.",
    "sm_",
    "\n",
    "\x00",
    "é" * 300,
)
_odd_text = st.one_of(st.text(max_size=20), st.sampled_from(_ODD))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_odd_text_in_text_fields_gives_a_verdict(data: st.DataObject) -> None:
    """Text is always accepted: what cannot be read as a version is unknown."""
    facts = data.draw(st.sampled_from(MACHINES))
    texts = [
        p
        for p in _leaves(facts)
        if (p[0] in ("packages", "env", "driver", "toolkit") and len(p) > 1)
        or p[-1] in ("error", "compute_capability", "gfx", "name")
    ]
    for path in data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4)):
        facts = _put(facts, path, data.draw(_odd_text))
    assert _verdict(facts)


def _speaks_for_the_machine(path: tuple[Any, ...], value: Any) -> bool:
    """A passed trial outranks rules, and a failed start's text may excuse it: forgetting either may close something."""
    return path[:1] == ("probes",) and (value is True or path[-1] == "error")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_forgetting_a_fact_never_closes_more(data: st.DataObject) -> None:
    facts = data.draw(st.sampled_from(MACHINES))
    path = data.draw(
        st.sampled_from([p for p in _leaves(facts) if p and p != ("schema",) and "torch_arch_list" not in p])
    )
    inner: Any = facts
    for key in path:
        inner = inner[key]
    if not _speaks_for_the_machine(path, inner):
        assert closed(_put(facts, path, None)) <= closed(facts)


@pytest.mark.parametrize("facts", MACHINES[:: max(1, len(MACHINES) // 40)])
def test_forgetting_a_whole_section_never_closes_more(facts: dict[str, Any]) -> None:
    for section in ("driver", "toolkit", "env", "gpus", "host"):
        assert closed({**facts, section: None}) <= closed(facts), section
    forgotten = {**facts, "probes": {**facts["probes"], "torch_arch_list": None}}
    assert closed(forgotten) <= closed(facts)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_one_more_card_never_closes_anything(data: st.DataObject) -> None:
    facts = data.draw(st.sampled_from([f for f in MACHINES if f.get("gpus")]))
    other = data.draw(st.sampled_from([g for f in MACHINES for g in f.get("gpus") or ()]))
    more = {**facts, "gpus": [*facts["gpus"], {**other, "index": len(facts["gpus"])}]}
    assert closed(more) <= closed(facts)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_higher_capability_never_closes_a_precision(data: st.DataObject) -> None:
    """On hardware alone: nothing installed that could lack code for the newer card."""
    known = ["5.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
    low, high = sorted(data.draw(st.lists(st.sampled_from(range(len(known))), min_size=2, max_size=2)))

    def bare(cc: str) -> dict[str, Any]:
        return machine(card("c", cc, 24.0), packages={"torch": None, "vllm": None}, probes={"torch_arch_list": None})

    assert closed(bare(known[high])) <= closed(bare(known[low])) | {"fp8-hf"}


def test_nothing_known_closes_nothing() -> None:
    d = diagnose(facts_from_json({}))
    assert all(state.open for state in d.paths.values()) and d.walls == ()


@pytest.mark.parametrize("facts", [machine(card("c", "9.0", 80.0), **torch("2.11.0+cu130", CU130, failed("x" * 5000)))])
def test_a_long_error_is_no_trouble(facts: dict[str, Any]) -> None:
    assert closed(facts) >= set(GPU_PATHS) and set(FP8) <= closed(facts)
