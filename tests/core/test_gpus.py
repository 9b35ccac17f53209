"""Which GPUs a run takes: the doctor's equal ones or those named, as many as share a step evenly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machine_cases import CU130, OK, amd, card, machine, torch

from doctor import memory
from doctor.diagnosis import About
from doctor.facts import Facts, facts_from_json
from doctor.plan import diagnose
from doctor.shapes import shape_of
from grpo_portable.errors import PathClosed, RecipeError, UsageError
from grpo_portable.plan import announce, gpus, planning
from grpo_portable.recipe import Recipe, check
from grpo_portable.supervision import ranks_command, supervisor
from grpo_portable.supervision.ladder import Ending, Rung, next_step
from grpo_portable.supervision.phase import Doing, Phase

L4 = card("NVIDIA L4", "8.9", 22.0)
RECIPE = replace(Recipe(), model="Qwen/Qwen3-0.6B", data="openai/gsm8k", prompts_per_step=8, group_size=8)


def facts(*found: dict[str, Any], **sections: Any) -> Facts:
    return facts_from_json(machine(*found, **torch("2.13.0+cu130", CU130, OK, bitsandbytes="0.50.2"), **sections))


def planned(here: Facts, asked: tuple[int, ...] | None = None, **changes: Any) -> Any:
    return planning.plan(replace(RECIPE, **changes), here, auto=True, asked=asked)


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, None), ("1", (1,)), ("0,1", (0, 1)), (" 2 , 0", (2, 0)), ("1,1", (1,))]
)
def test_numbers_on_the_command_line(text: str | None, numbers: tuple[int, ...] | None) -> None:
    assert gpus.parsed(text) == numbers


@pytest.mark.parametrize("text", ["", "x", "0,", "-1", "0;1", "0-3"])
def test_what_names_no_gpu_is_a_mistake(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus cannot be"):
        gpus.parsed(text)


@pytest.mark.parametrize(
    ("cards", "questions", "taken"),
    [(1, 8, (0,)), (2, 8, (0, 1)), (3, 8, (0, 1)), (3, 9, (0, 1, 2)), (8, 4, (0, 1, 2, 3)), (4, 1, (0,))],
)
def test_as_many_as_share_a_step_evenly(cards: int, questions: int, taken: tuple[int, ...]) -> None:
    settled, diagnosis = planned(facts(*[L4] * cards), prompts_per_step=questions)
    assert diagnosis.plan.gpus == taken
    each = questions * 8 // len(taken)
    assert each % settled.recipe.micro_batch == 0 and settled.recipe.rollout_rows <= each


def test_the_ledger_is_of_one_card_with_its_share_and_the_least_free_memory() -> None:
    """Two cards of 20 and 21 GiB, 64 completions: at most 32 are generated at once on each, and 20 GiB count."""
    here = facts({**L4, "free_gib": 20.0}, {**L4, "free_gib": 21.0})
    settled, diagnosis = planned(here)
    assert settled.ledger.have_gib == 20.0 and settled.recipe.rollout_rows == 32
    alone = planned(here, asked=(1,))[0]
    assert alone.ledger.have_gib == 21.0 and alone.recipe.rollout_rows == 64
    text = announce.plan_text(settled, diagnosis, None)
    assert "GPUs      0, 1, one process each: 4 of 8 questions a step" in text and "of 32 in each process" in " ".join(
        text.split()
    )


def test_named_gpus_are_taken_and_said() -> None:
    _, diagnosis = planned(facts(*[L4] * 4), asked=(1, 3))
    assert diagnosis.plan.gpus == (1, 3)
    assert [reason.text for reason in gpus.reasons(diagnosis)] == ["GPU 1, 3 were asked for"]


@pytest.mark.parametrize("path", ["auto", "bf16-hf"])
def test_why_these_gpus_is_told_once_also_where_the_path_was_asked_for(path: str) -> None:
    settled, diagnosis = planned(facts(L4, L4, {**L4, "display": True}), path=path)
    about = [reason for reason in settled.reasons if reason.about is About.GPUS]
    assert about == list(gpus.reasons(diagnosis)) and len(about) == 2
    assert about[0].text.startswith("2 equal cards") and "it draws the screen" in about[1].text


@pytest.mark.parametrize(
    ("found", "asked", "told"),
    [
        ([L4], (1,), "there is no GPU 1"),
        ([L4, card("Tesla T4", "7.5", 15.0)], (0, 1), "cannot train together"),
        ([], (0,), "there is no GPU 0"),
    ],
)
def test_gpus_that_cannot_be_had(found: list[dict[str, Any]], asked: tuple[int, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        planned(facts(*found), asked=asked)
    assert "leave --gpus out" in str(refused.value.help) or "cannot train together" in told


def test_one_of_two_different_cards_can_be_named() -> None:
    assert planned(facts(L4, card("Tesla T4", "7.5", 15.0)), asked=(1,))[1].plan.gpus == (1,)


def test_a_named_gpu_is_judged_by_itself() -> None:
    """An 8 GiB card beside one of 23.5: what has room on the larger one alone is no path of a run on the smaller one."""
    here = facts(card("NVIDIA GeForce RTX 4090", "8.9", 23.5), card("NVIDIA GeForce RTX 4060", "8.9", 8.0))
    settled, diagnosis = planned(here, asked=(1,), model="Qwen/Qwen3-4B")
    assert settled.recipe.path == "qlora-hf" and settled.ledger.fits and diagnosis.plan.gpus == (1,)
    assert planning.others(settled, diagnosis) is None
    assert planned(here, asked=(0,), model="Qwen/Qwen3-4B")[0].recipe.path != "qlora-hf"


def test_the_room_of_a_gpu_is_not_that_of_another_makers_with_its_number() -> None:
    mine, display = card("NVIDIA GeForce RTX 4090", "8.9", 23.5), amd("AMD Radeon Graphics", "gfx1036", 0.5)
    raw = machine(display, mine, **torch("2.13.0+cu130", CU130, OK, bitsandbytes="0.50.2"))
    for found in raw["gpus"]:
        found["index"] = 0
    here = facts_from_json(raw)
    settled, diagnosis = planned(here, model="Qwen/Qwen3-4B")
    assert settled.ledger.fits and settled.ledger.have_gib > 20
    assert planning.step_seconds(settled, diagnosis) is not None


def test_unsloth_holds_the_weights_of_one_process() -> None:
    recipe = replace(RECIPE, backend="unsloth")
    taken = gpus.on_gpus(recipe, diagnose(facts(L4, L4), recipe.model), None)
    assert taken.plan.gpus == (0,)
    assert "One GPU trains" in gpus.reasons(taken)[-1].text


def answer(count: int, taken: list[int], **of_each: Any) -> dict[str, Any]:
    return {"plan": {"gpus": taken}, "facts": {"gpus": [{"index": i, **of_each} for i in range(count)]}}


SETTLED = replace(RECIPE, path="bf16-hf", micro_batch=16, rollout_rows=64)


@pytest.mark.parametrize(
    ("plan", "taken", "processes"),
    [
        (answer(1, [0]), (), 1),  # nothing to choose: CUDA's own choice is left alone
        (answer(4, [2]), (2,), 1),
        (answer(4, [0, 1]), (0, 1), 2),
        (answer(2, [0, 1], mig=True), (), 1),
        ({}, (), 1),
    ],
)
def test_the_first_rung_is_on_the_plans_gpus(plan: dict[str, Any], taken: tuple[int, ...], processes: int) -> None:
    rung = supervisor._rung(SETTLED, plan)
    assert (rung.gpus, rung.processes) == (taken, processes)


def test_a_resumed_run_stays_on_the_gpus_it_was_left_with() -> None:
    """Of four GPUs two were left: 32 completions on each, and the micro-batch of 16 divides them."""
    rung = supervisor._rung(SETTLED, answer(4, [0, 1, 2, 3]), {"gpus": [0, 2], "processes": 2})
    assert rung == Rung("bf16-hf", 16, 64, gpus=(0, 2), processes=2)
    assert supervisor._rung(replace(SETTLED, path="cpu"), answer(4, [0, 1])).processes == 1


@pytest.mark.parametrize(
    ("visible", "gpus", "shown"),
    [(None, (0, 2), "0,2"), ("4,5,6,7", (0, 2), "4,6"), ("GPU-aa,GPU-bb", (1,), "GPU-bb"), (None, (), None)],
)
def test_a_worker_sees_its_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: tuple[int, ...], shown: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = ranks_command.environment(Rung("bf16-hf", 8, 64, gpus=gpus, processes=max(1, len(gpus))))
    assert environment.get("CUDA_VISIBLE_DEVICES") == (shown if gpus else visible)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


# --- a model that does not fit one card

SERVER = "http://10.0.0.1:8000"


def test_weights_lie_in_parts_where_one_card_has_no_room_and_a_server_samples() -> None:
    """Qwen3-14B in bfloat16 takes 27.5 GiB of weights; four L4 of 22 GiB hold a quarter of the blocks each."""
    settled, diagnosis = planned(facts(*[L4] * 4), model="Qwen/Qwen3-14B", path="bf16-hf", vllm_server=SERVER)
    assert settled.recipe.fsdp is True and diagnosis.plan.gpus == (0, 1, 2, 3)
    assert settled.ledger.fits and settled.ledger.ledger["weights"] < 12 and "kv_cache" not in settled.ledger.ledger
    assert any("in parts on 4 GPUs" in reason.text for reason in settled.reasons)
    small, _ = planned(facts(*[L4] * 4), path="bf16-hf", vllm_server=SERVER)
    assert small.recipe.fsdp is False, "what fits is kept whole"


def test_without_a_server_the_refusal_says_what_would_run_it() -> None:
    here = facts(*[card("NVIDIA L40S", "8.9", 44.4)] * 8)
    with pytest.raises(PathClosed) as refused:
        planned(here, model="Qwen/Qwen2.5-72B")
    assert "in parts on 8 GPUs" in str(refused.value.help) and "--tensor-parallel-size" in str(refused.value.help)
    settled, _ = planned(here, model="Qwen/Qwen2.5-72B", vllm_server=SERVER)
    assert (settled.recipe.path, settled.recipe.fsdp) == ("bf16-hf", True)


@pytest.mark.parametrize(
    "changes", [{"fsdp": True}, {"fsdp": True, "vllm_server": SERVER, "path": "qlora-hf"}], ids=["no server", "4-bit"]
)
def test_what_does_not_go_with_weights_in_parts_is_told_before_anything_loads(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="fsdp"):
        check(replace(RECIPE, **changes), "here")


def test_weights_in_parts_have_no_lower_rung() -> None:
    rung = Rung("bf16-hf", 4, 16, backend="server", gpus=(0, 1), processes=2)
    for kind in ("engine", "collective", "crash"):
        step = next_step(rung, Ending(kind, Doing(Phase.ROLLOUT), "gone", 1), ("bf16-hf", "cpu"), 1, rung, (8, 8), True)
        assert step.rung is None and "in parts" in step.reason
    smaller = next_step(rung, Ending("oom", Doing(Phase.UPDATE), "full", 1), ("bf16-hf",), 0, rung, (8, 8), True)
    assert smaller.rung == replace(rung, micro_batch=2)


def test_the_ledger_of_weights_in_parts() -> None:
    """On two cards half of the blocks, and two whole ones that are at work."""
    shape = shape_of("Qwen/Qwen3-0.6B")
    whole = memory.ledger(shape, memory.Setting(base="bf16"))
    parts = memory.ledger(shape, memory.Setting(base="bf16", spread=2))
    blocks = 2 * shape.linear_params / 2**30
    assert parts["weights"] == pytest.approx(whole["weights"] - blocks / 2 + 2 * blocks / shape.layers)
    assert "kv_cache" not in parts and "sampling" not in parts
    assert parts["adapter"] == whole["adapter"] and parts["optimizer"] == whole["optimizer"]
