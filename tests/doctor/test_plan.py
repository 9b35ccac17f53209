"""The choice: the first path in the contract's order that is open and fits, on the card that takes it, with reasons."""

from __future__ import annotations

from typing import Any

import pytest
from machine_cases import CU128, CU130, OK, VLLM, amd, card, driver, failed, machine, torch, with_probes

from doctor import phrases, walls_gpu
from doctor.diagnosis import PATHS, About, Diagnosis, Reason
from doctor.facts import Gpu, facts_from_json
from doctor.memory import Sizes, settle
from doctor.plan import diagnose
from doctor.readings import card_memory, fused_norms
from doctor.shapes import shape_of

_4B, _06B, _8B = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"
_VLLM = with_probes(
    torch("2.13.0+cu130", CU130, vllm="0.31.0", trl="1.16.0", bitsandbytes="0.50.2"), vllm_import=OK, vllm_start=OK
)


@pytest.fixture(autouse=True)
def fp8_without_vllm_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured since is no part of these cases."""
    monkeypatch.setattr(walls_gpu, "FP8_HF_MEASURED", {})


def plan(facts: dict[str, Any], model: str | None = _4B, **options: Any) -> Diagnosis:
    return diagnose(facts_from_json(facts), model, Sizes(**options))


@pytest.mark.parametrize(
    ("gpu", "model", "path", "engine", "dtype", "quantization"),
    [
        (card("H100", "9.0", 79.2), _4B, "fp8-vllm", "vllm", "bfloat16", "fp8"),
        (card("A100", "8.0", 79.2), _4B, "bf16-vllm", "vllm", "bfloat16", None),
        (card("T4", "7.5", 14.7), _06B, "fp16-vllm", "vllm", "float16", None),
        (card("T4", "7.5", 14.7), _8B, "qlora-hf", "portable", "float16", "nf4"),
        (card("RTX 4060", "8.9", 8.0), _4B, "qlora-hf", "portable", "bfloat16", "nf4"),
        (card("RTX 3060", "8.6", 12.0), _4B, "bf16-hf", "portable", "bfloat16", None),
    ],
)
def test_the_best_path_that_is_open_and_fits(
    gpu: dict[str, Any], model: str, path: str, engine: str, dtype: str, quantization: str | None
) -> None:
    d = plan(machine(gpu, **_VLLM), model)
    assert (d.plan.path, d.plan.engine, d.plan.dtype, d.plan.quantization) == (path, engine, dtype, quantization)
    assert d.plan.gpus == (0,) and d.plan.model == model
    assert d.plan.memory is not None and d.plan.memory.need_gib is not None
    assert sum(d.plan.memory.ledger.values()) == pytest.approx(d.plan.memory.need_gib)
    assert d.plan.memory.need_gib <= gpu["free_gib"]
    assert d.plan.micro_batch and d.plan.rollout_rows


def test_the_ledger_is_settled_for_what_was_asked() -> None:
    facts = machine(card("RTX 4090", "8.9", 23.5))
    shape = shape_of(_4B)
    assert shape is not None
    sizes = {"group_size": 4, "prompt_tokens": 1024, "completion_tokens": 1024, "lora_rank": 8}
    d = plan(facts, _4B, **sizes)
    want = settle(shape, "bf16-hf", 23.1, Sizes(**sizes, fused_norms=True))
    assert d.plan.micro_batch == want.micro_batch and d.plan.rollout_rows == want.rollout_rows
    assert d.plan.memory is not None and d.plan.memory.ledger == want.ledger


@pytest.mark.parametrize(
    ("installed", "fused"),
    [
        ("2.11.0+cu130", True),
        ("2.13.0+cu126", True),
        ("2.10.0+cu128", False),
        ("2.13.0+rocm7.2", False),
        ("2.13.0+cpu", False),
        ("absent", False),
    ],
)
def test_fused_norms_are_counted_where_torch_is_known_to_have_them(installed: str, fused: bool) -> None:
    facts = facts_from_json(machine(card("RTX 4090", "8.9", 23.5), **torch(installed, CU130)))
    assert fused_norms(facts) is fused


def test_without_a_model_nothing_is_said_about_memory() -> None:
    d = plan(machine(card("A100", "8.0", 79.2), **_VLLM), None)
    assert d.plan.path == "bf16-vllm" and d.plan.memory is None
    assert {state.fits for state in d.paths.values()} == {None}


def test_an_unknown_model_fits_as_far_as_anybody_knows() -> None:
    d = plan(machine(card("A100", "8.0", 79.2), **_VLLM), "somebody/some-model")
    assert d.plan.path == "bf16-vllm" and any("is not known here" in r.text for r in d.plan.reasons)


def test_open_is_about_the_machine_and_fits_about_memory() -> None:
    """A busy card keeps its paths open; they only do not fit."""
    d = plan(machine(card("RTX 4090", "8.9", 23.5, 1.0), **_VLLM))
    assert all(d.paths[p].open and d.paths[p].fits is False for p in ("fp8-vllm", "bf16-vllm", "bf16-hf", "qlora-hf"))
    assert d.plan.path == "cpu" and d.after_fix == "fp8-vllm"
    assert any("open, but too large" in r.text for r in d.plan.reasons)


def test_a_start_refused_for_memory_outranks_the_ledger() -> None:
    busy = with_probes(
        _VLLM, vllm_start=failed("Free memory on device (20.0/79.2 GiB) on startup is less than desired")
    )
    d = plan(machine(card("H100", "9.0", 79.2, 20.0), **busy), _06B)
    assert [d.paths[p].fits for p in VLLM] == [False] * 3 and all(d.paths[p].open for p in VLLM)
    assert d.plan.path == "bf16-hf" and d.after_fix == "fp8-vllm"


@pytest.mark.parametrize(
    ("gpu", "ram", "have", "known"),
    [
        (Gpu(total_gib=24.0, free_gib=20.0), 64.0, 20.0, True),
        (Gpu(total_gib=24.0), 64.0, 24.0, False),  # a total bounds what is free
        (Gpu(unified_memory=True), 119.0, 119.0, True),  # unified memory without a figure: the system's
        (Gpu(unified_memory=True, free_gib=110.0), 119.0, 110.0, True),
        (Gpu(unified_memory=True), None, None, False),
        (Gpu(), 64.0, None, False),
        (Gpu(name="A100 MIG 1g.10gb", mig=True, total_gib=79.2, free_gib=79.0), 64.0, 10.0, True),  # NVML's parent
        (Gpu(name="A100 MIG 1g.10gb", mig=True, total_gib=9.5, free_gib=9.0), 64.0, 9.0, True),
    ],
)
def test_what_a_run_could_have(gpu: Gpu, ram: float | None, have: float | None, known: bool) -> None:
    facts = facts_from_json({"host": {"ram_gib": ram}})
    assert card_memory(facts, gpu) == (have, known)


@pytest.mark.parametrize(("free", "path", "have"), [(None, "cpu", 64.0), (40.0, "cpu", 40.0), (0.5, None, None)])
def test_the_cpu_path_counts_memory_in_use(free: float | None, path: str | None, have: float | None) -> None:
    """A help that frees memory opens it again, so after it the path is `cpu` all the same."""
    facts = machine(host={"ram_gib": 64.0, "free_gib": free}, **torch("2.13.0+cpu", [], failed("no CUDA device")))
    d = plan(facts, _06B)
    assert d.plan.path == path and d.paths["cpu"].open and d.after_fix == "cpu"
    assert (d.plan.memory.have_gib if d.plan.memory else None) == have


def test_where_only_the_total_is_known_too_large_is_certain_and_fitting_is_not() -> None:
    d = plan(machine(card("RTX 3080", "8.6", 10.0, free_gib=None), **_VLLM))
    assert d.paths["bf16-hf"].fits is False and d.paths["qlora-hf"].fits is None
    assert d.plan.path == "qlora-hf"


def test_each_card_is_judged_by_itself() -> None:
    """The strong card is full, so the weak one trains, in its own type."""
    d = plan(machine(card("TITAN RTX", "7.5", 24.0), card("RTX 3070", "8.6", 8.0, 1.0)))
    assert (d.plan.path, d.plan.dtype, d.plan.gpus) == ("fp16-hf", "float16", (0,))
    both_free = plan(machine(card("RTX 2080 Ti", "7.5", 10.8), card("RTX 3090", "8.6", 23.6)))
    assert (both_free.plan.path, both_free.plan.gpus) == ("bf16-hf", (1,))


def test_equal_cards_train_together_and_the_least_free_memory_decides() -> None:
    d = plan(machine(card("L4", "8.9", 22.0, 20.0), card("L4", "8.9", 22.0, 21.0)))
    assert d.plan.gpus == (0, 1) and d.plan.memory is not None and d.plan.memory.have_gib == 20.0
    told = "2 equal cards are used, one process each: GPU 0, 1; the least free on any of them, 20.0 GiB, decides"
    assert Reason(About.GPUS, told) in d.plan.reasons


@pytest.mark.parametrize(
    ("cards", "gpus", "why"),
    [
        ([card("L4", "8.9", 22.0, 3.0), card("L4", "8.9", 22.0, 21.0)], (1,), "3.0 GiB free on it are not enough"),
        ([card("L4", "8.9", 22.0, 10.4), card("L4", "8.9", 22.0, 21.0)], (1,), "10.4 GiB are free on it, and 21.0"),
        ([card("T1000", "7.5", 4.0), card("L4", "8.9", 22.0, 21.0)], (1,), "no equal of GPU 1 (L4)"),
        ([card("A100", "8.0", 39.4), card("A100", "8.0", 79.2)], (1,), "no equal of GPU 1 (A100)"),
        ([{**card("L4", "8.9", 22.0), "display": True}, card("L4", "8.9", 22.0)], (1,), "it draws the screen"),
        ([card("L4", "8.9", 22.0)] * 3, (0, 1, 2), ""),
    ],
    ids=["full", "busy", "display card", "another size", "screen", "three"],
)
def test_which_cards_train_together(cards: list[dict[str, Any]], gpus: tuple[int, ...], why: str) -> None:
    facts = machine(*({**gpu, "index": index} for index, gpu in enumerate(cards)))
    told = diagnose(facts_from_json(facts), _4B).plan
    assert told.gpus == gpus
    assert why in "; ".join(reason.text for reason in told.reasons if reason.about is About.GPUS)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"host": {"shm_gib": 0.06}}, "SHM-SMALL"), ({"links": {"nccl": ""}}, "NCCL-ABSENT")],
    ids=["shm", "nccl"],
)
def test_what_nccl_lacks_leaves_one_card(changes: dict[str, Any], why: str) -> None:
    facts = machine(card("L4", "8.9", 22.0), card("L4", "8.9", 22.0))
    facts = {**facts, **changes, "host": {**facts["host"], **changes.get("host", {})}}
    told = diagnose(facts_from_json(facts), _06B).plan
    assert len(told.gpus) == 1 and any(why in reason.text for reason in told.reasons if reason.about is About.GPUS)


def test_fp16_paths_count_only_without_bf16() -> None:
    """Where bf16-hf is too large, fp16-hf would be as large: 4 bit comes next, and float16 is not mentioned."""
    d = plan(machine(card("RTX 4060", "8.9", 8.0), **_VLLM))
    assert d.paths["fp16-hf"].open and d.plan.path == "qlora-hf"
    assert not any("fp16" in r.text for r in d.plan.reasons)


@pytest.mark.parametrize(
    ("facts", "after"),
    [
        (machine(card("H100", "9.0", 79.2), **_VLLM), "fp8-vllm"),  # nothing to fix
        (machine(card("H100", "9.0", 79.2)), "fp8-vllm"),  # install vLLM
        (machine(card("A100", "8.0", 79.2)), "bf16-vllm"),  # no software adds FP8 units
        (machine(card("RTX 5090", "12.0", 31.8), driver=driver("570.86", "12.8"), toolkit={"state": "present", "nvcc": "12.8"},
                 **torch("2.10.0+cu128", CU128)), "fp8-vllm"),  # driver, nvcc and vLLM are software
        (machine(card("V100", "7.0", 31.7), **torch("2.11.0+cu130", CU130)), "fp16-hf"),  # no current vLLM for Volta
        (machine(card("RTX 4060", "8.9", 8.0), host={"platform": "windows"}, **torch("2.11.0+cpu", [], failed("no"))),
         "qlora-hf"),
        (machine(card("Orin", "8.7", 61.4, unified_memory=True), host={"os": "JetPack 6.2, L4T 36.4"},
                 driver=driver("540.4", "12.6"), **torch("2.8.0", ["sm_87"])), "bf16-hf"),
        (machine(amd("MI300X", "gfx942", 191.0), **torch("2.9.1+rocm6.4", ["gfx942"])), "fp8-vllm"),
        (machine(amd("MI50", "gfx906", 32.0), **torch("2.9.1+rocm6.3", ["gfx906"])), "fp16-hf"),
        (machine(**torch("2.13.0+cpu", [], failed("no CUDA device"))), "cpu"),
        (machine(card("H100", "9.0", 79.2), host={"platform": "darwin"}, **torch("2.2.2", [], failed("no"))), "cpu"),
    ],
)  # fmt: skip
def test_after_fix_follows_helps_that_need_no_new_hardware(facts: dict[str, Any], after: str) -> None:
    assert plan(facts).after_fix == after


def test_the_first_run_says_what_the_machine_becomes() -> None:
    """torch absent: every path is closed, and the reasons tell both steps: after the install, and after every help."""
    nothing = dict.fromkeys(("torch", "vllm", "trl", "transformers", "peft", "bitsandbytes"), "absent")
    facts = machine(
        card("RTX 5090", "12.0", 31.8), driver=driver("570.86", "12.8"), toolkit={"state": "present", "nvcc": "12.8"},
        packages=nothing, probes={"torch_cuda": {"ok": None}, "torch_arch_list": None},
    )  # fmt: skip
    d = plan(facts)
    assert d.plan.path is None and d.after_fix == "fp8-vllm" and not any(s.open for s in d.paths.values())
    assert [reason.text for reason in d.plan.reasons if reason.about is About.PROMISE] == [
        "Once torch and its set are installed this machine takes bf16-hf",
        "With all helps followed it could take fp8-vllm",
    ]
    wall = d.walls[0]
    assert wall.code == "TORCH-ABSENT" and wall.closes == PATHS
    commands = [h.command for h in wall.help]
    assert commands[0] == 'pip install "torch==2.10.0" --index-url https://download.pytorch.org/whl/cu128'
    assert any("driver 580" in b for b in wall.because)  # what would stop vLLM, before anything is downloaded
    assert wall.wont_help is not None and "12.9" in wall.wont_help


def test_reasons_group_paths_and_name_the_wall() -> None:
    d = plan(machine(card("RTX 4090", "8.9", 23.5)))
    chosen = "bf16-hf on RTX 4090 is the best path that is open and fits"
    assert d.plan.reasons[0] == Reason(About.CHOICE, chosen)
    assert any(
        r.text.startswith("fp8-vllm, bf16-vllm are closed: vLLM is not installed") and r.wall == "VLLM-ABSENT"
        for r in d.plan.reasons
    )


def test_nothing_fits() -> None:
    d = plan(machine(card("RTX 4060", "8.9", 8.0), host={"ram_gib": 8.0}), "meta-llama/Llama-3.1-70B-Instruct")
    assert (
        d.plan.path is None
        and d.paths["bf16-hf"].open
        and d.plan.reasons[0] == Reason(About.CHOICE, "No path is open and fits")
    )
    assert d.plan.engine is None and d.plan.gpus == () and d.plan.memory is None


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError):
        plan(machine(card("RTX 4090", "8.9", 23.5)), groop_size=4)


@pytest.mark.parametrize(
    ("name", "capability", "path"),
    [("Tesla T4", None, "fp16-hf"), ("NVIDIA GeForce RTX 3090", None, "bf16-hf"), ("Tesla V100-SXM2-32GB", None, "fp16-hf"),
     ("NVIDIA GeForce RTX 4090", None, "bf16-hf"), ("Tesla T4", "9.0", "bf16-hf")],
)  # fmt: skip
def test_a_card_told_by_name_only_is_judged_by_its_name(name: str | None, capability: str | None, path: str) -> None:
    facts = {"gpus": [{"name": name, "compute_capability": capability}], "packages": {"vllm": "absent"}}
    assert diagnose(facts_from_json(facts)).plan.path == path


def test_a_card_of_which_nothing_is_known_is_not_called_the_cpu() -> None:
    d = diagnose(facts_from_json({"packages": {"vllm": "absent"}}))
    assert phrases.verdict(d).endswith("runs on a GPU of which nothing is known")


def test_fp8_without_vllm_is_taken_where_it_was_measured_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    h200, ada = machine(card("H200", "9.0", 139.8)), machine(card("RTX 4090", "8.9", 23.5))
    before = plan(h200)
    assert before.plan.path == "bf16-hf" and before.paths["fp8-hf"].walls == ("FP8-HF-UNPROVEN",)
    for speedup, path in ((0.97, "bf16-hf"), (1.26, "fp8-hf")):
        monkeypatch.setattr(walls_gpu, "FP8_HF_MEASURED", {(9, 0): ((0.6, 1.0), (4.0, speedup))})
        assert plan(h200).plan.path == path
        assert plan(h200, _06B).plan.path == "bf16-hf"  # too small to gain
        assert plan(ada).plan.path == "bf16-hf"  # another kind of card: nobody has measured
    after, shape = plan(h200).plan, shape_of(_4B)
    assert (after.engine, after.dtype, after.quantization) == ("portable", "bfloat16", "fp8")
    assert after.memory is not None and shape is not None
    assert after.memory.ledger["rollout_copy"] * 2**30 == shape.linear_params  # a byte a weight
    failing = machine(card("H200", "9.0", 139.8), probes={"fp8_matmul": failed("no kernel image")})
    assert plan(failing).plan.path == "bf16-hf"
