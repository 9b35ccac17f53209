"""The policy the machine cases are judged by, written down a second time as a plain table, against the doctor's walls.

On any machine put together from these values: what the table closes is closed, and what is closed beyond it is closed by a
wall whose extra rule is named here. The verdict is the first path in order that is open.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from machine_cases import BF16, CU126, CU128, CU130, FP8, GPU, OK, VLLM, card, driver, failed, machine
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from doctor.diagnosis import PATHS
from doctor.facts import facts_from_json
from doctor.plan import diagnose

_CARDS = [("P100", "6.0"), ("V100", "7.0"), ("T4", "7.5"), ("A100", "8.0"), ("RTX 3090", "8.6"), ("L4", "8.9"), ("H100", "9.0"),
          ("B200", "10.0"), ("Thor", "11.0"), ("RTX 5090", "12.0"), ("GB10", "12.1")]  # fmt: skip
_DRIVERS = [("580.95", "13.0"), ("570.86", "12.8"), ("550.54", "12.4"), ("470.82", "11.4"), (None, None)]
_TORCHES = [
    ("2.11.0+cu130", CU130),
    ("2.10.0+cu128", CU128),
    ("2.5.1+cu124", CU126),
    ("2.13.0+cpu", []),
    ("2.9.0", None),
]
_TOOLKITS = [("absent", None), ("present", "12.4"), ("present", "12.8"), ("present", "12.9"), ("present", "13.0")]
_TRL = {"0.25.0": "==0.10.2", "0.29.1": ">=0.10.2,<0.13", "1.0.0": ">=0.10.2,<=0.17.1", "1.9.2": ">=0.17,<=0.25.1",
        "1.16.0": ">=0.22,<=0.31.0"}  # fmt: skip
_HARD = ["no kernel image is available", "the provided PTX was compiled with an unsupported toolchain", "who knows"]
_EXCUSED = [
    "Free memory on device (1/2 GiB) is less than desired",
    "Bfloat16 is only supported on GPUs with compute capability",
]
# Closed beyond the table, by rules with sources of their own.
_EXTRA = {"FP8-HF-UNPROVEN", "VLLM-CAPABILITY", "FP8-CUDA-129"}


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    gpus = [card(name, cc, 80.0) for name, cc in draw(st.lists(st.sampled_from(_CARDS), min_size=1, max_size=3))]
    torch, arch = draw(st.sampled_from(_TORCHES))
    state, nvcc = draw(st.sampled_from(_TOOLKITS))
    vllm = draw(st.sampled_from(["absent", "0.10.2", "0.12.0", "0.19.1", "0.25.1", "0.31.0+cu129"]))
    there = vllm != "absent"
    start = draw(st.sampled_from([{"ok": None}, OK, *map(failed, _HARD + _EXCUSED)])) if there else {"ok": None}
    return machine(
        *gpus,
        driver=driver(*draw(st.sampled_from(_DRIVERS))),
        toolkit={"state": state, "nvcc": nvcc},
        host={"platform": draw(st.sampled_from(["linux", "wsl2", "windows"]))},
        packages={
            "torch": torch,
            "vllm": vllm,
            "trl": draw(st.sampled_from([None, *_TRL])),
            "bitsandbytes": draw(st.sampled_from(["absent", "0.50.2"])),
        },
        probes={
            "torch_cuda": draw(
                st.sampled_from([{"ok": None}, failed("Error 804: forward compatibility"), failed("boom")])
            ),
            "torch_arch_list": arch,
            "fp8_matmul": draw(st.sampled_from([{"ok": None}, OK, failed("cutlass cannot initialize")])),
            "bnb_4bit": draw(st.sampled_from([{"ok": None}, OK, failed("no kernel image")])),
            "vllm_import": draw(st.sampled_from([{"ok": None}, OK, failed("undefined symbol")]))
            if there
            else {"ok": None},
            "vllm_start": start,
        },
    )


def table(facts: dict[str, Any]) -> set[str]:
    """CASES.md, "What closes what", for one machine with NVIDIA cards: the union of every rule that fires."""
    packages, probes = facts["packages"], facts["probes"]
    torch, vllm = packages["torch"], packages["vllm"]
    tag = torch.partition("+")[2]
    cuda = (int(tag[2:-1]), int(tag[-1])) if tag.startswith("cu") else None
    served = facts["driver"]["cuda"]
    closed: set[str] = set()
    if probes["torch_cuda"]["ok"] is False or tag == "cpu" or (cuda and served and cuda[0] > int(served.split(".")[0])):
        closed |= set(GPU)
    if probes["fp8_matmul"]["ok"] is False:
        closed |= set(FP8)
    start = probes["vllm_start"]
    if vllm == "absent" or facts["host"]["platform"] == "windows" or probes["vllm_import"]["ok"] is False:
        closed |= set(VLLM)
    if start["ok"] is False and start["error"] in _HARD:
        closed |= set(VLLM)
    if (
        packages["trl"]
        and vllm != "absent"
        and not SpecifierSet(_TRL[packages["trl"]]).contains(Version(Version(vllm).public))
    ):
        closed |= set(VLLM)
    if packages["bitsandbytes"] == "absent" or probes["bnb_4bit"]["ok"] is False:
        closed.add("qlora-hf")
    return closed | set.intersection(*(_of_card(facts, gpu, cuda) for gpu in facts["gpus"]))


def _of_card(facts: dict[str, Any], gpu: dict[str, Any], cuda: tuple[int, int] | None) -> set[str]:
    major, minor = map(int, gpu["compute_capability"].split("."))
    closed: set[str] = set()
    arch = facts["probes"]["torch_arch_list"]
    if arch and not any(int(a[3:-1]) == major and int(a[-1]) <= minor for a in arch):
        closed |= set(GPU)
    if (major, minor) < (8, 0):
        closed |= set(BF16)
    if (major, minor) < (8, 9):
        closed |= set(FP8)
    nvcc = facts["toolkit"]["nvcc"]
    asked = tuple(map(int, nvcc.split("."))) if nvcc else cuda
    if major == 12 and facts["packages"]["vllm"] != "absent" and asked and asked < (12, 9):
        closed.add("fp8-vllm")
    return closed


@settings(max_examples=400, deadline=None)
@given(facts=machines())
def test_the_table_and_the_walls_agree(facts: dict[str, Any]) -> None:
    d = diagnose(facts_from_json(facts))
    ours = {path for path, state in d.paths.items() if not state.open}
    theirs = table(facts)
    assert theirs <= ours
    for path in ours - theirs:
        assert set(d.paths[path].walls) & _EXTRA, (path, d.paths[path].walls)
    refused = facts["probes"]["vllm_start"].get("error") == _EXCUSED[0]
    order = [p for p in PATHS if p not in ours and not (refused and p in VLLM)]
    assert d.plan.path == next(p for p in order if not p.startswith("fp16") or p.replace("fp16", "bf16") in ours)
