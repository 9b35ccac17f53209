"""Every `auto` is replaced by a value with its reason; a closed path is refused with the wall's fact and help."""

from dataclasses import asdict, replace

import pytest

from doctor import memory
from doctor.diagnosis import PATHS, About, Diagnosis, Help, PathState, Plan, Reason, Wall
from doctor.facts import Facts
from grpo_portable.errors import PathClosed, RecipeError
from grpo_portable.plan import announce
from grpo_portable.plan.catalogue import pick
from grpo_portable.plan.settle import settle
from grpo_portable.recipe import Recipe

RECIPE = Recipe(model="org/model", data="org/data")
RUNS = dict.fromkeys(PATHS)
FP8 = Wall("FP8-CC-89", ("fp8-vllm", "fp8-hf"), "the card has no FP8", help=(Help("rent a newer card"),))
NO_VLLM = Wall(
    "VLLM-ABSENT",
    ("fp8-vllm", "bf16-vllm", "fp16-vllm"),
    "vLLM is not installed",
    help=(Help("x", "pip install vllm"),),
)


FREE = Reason(About.MEMORY, "24 GiB are free")


def diagnosis(path, closed=(), misfits=(), walls=(FP8, NO_VLLM)):
    states = {
        p: PathState(p not in closed, p not in misfits, tuple(w.code for w in walls if p in w.closes)) for p in PATHS
    }
    plan = Plan(path, "portable", "bfloat16", None, (0,), "org/model", None, None, None, (FREE,))
    return Diagnosis(plan, walls, states, None, Facts())


def ledger(micro_batch=16, rows=128):
    parts = {"weights": 4.0, "KV cache": 2.0}
    setting = memory.Setting(base="bf16")
    return lambda path: memory.Settled(
        6.0, 24.0, parts, micro_batch, rows, True, True, True, "fits", "bf16", "update", setting
    )


LEDGER = ledger()
CLOSED = ("fp8-vllm", "bf16-vllm", "fp16-vllm", "fp8-hf", "fp16-hf")


def test_nothing_is_auto_afterwards_and_the_reasons_stay():
    settled = settle(RECIPE, diagnosis("bf16-hf", CLOSED), auto=True, can_run=RUNS, ledger_of=LEDGER)
    assert (
        "auto"
        not in asdict(replace(settled.recipe, chat_template="none", question_column="q", answer_column="a")).values()
    )
    assert (settled.recipe.path, settled.recipe.micro_batch, settled.recipe.rollout_rows) == ("bf16-hf", 16, 128)
    assert settled.recipe.eval_data == "org/data"
    assert settled.reasons[0] == FREE


@pytest.mark.parametrize(
    ("room", "prompts", "group", "expected"), [(16, 8, 8, 16), (7, 8, 8, 4), (100, 2, 3, 6), (5, 3, 5, 5)]
)
def test_the_micro_batch_divides_the_step(room, prompts, group, expected):
    recipe = replace(RECIPE, prompts_per_step=prompts, group_size=group)
    assert (
        settle(recipe, diagnosis("bf16-hf", CLOSED), auto=True, can_run=RUNS, ledger_of=ledger(room)).recipe.micro_batch
        == expected
    )


def test_without_auto_an_open_choice_is_refused():
    with pytest.raises(RecipeError) as caught:
        settle(RECIPE, diagnosis("bf16-hf", CLOSED), auto=False, can_run=RUNS, ledger_of=LEDGER)
    assert "`path` is `auto`" in str(caught.value) and "--auto" in caught.value.help


def test_a_settled_recipe_needs_no_auto_and_settles_to_itself():
    d = diagnosis("bf16-hf", CLOSED)
    once = settle(RECIPE, d, auto=True, can_run=RUNS, ledger_of=LEDGER).recipe
    assert settle(once, d, auto=False, can_run=RUNS, ledger_of=LEDGER).recipe == once


def test_a_path_without_an_engine_here_is_passed_over_with_the_reason():
    settled = settle(
        RECIPE,
        diagnosis("fp8-hf"),
        auto=True,
        can_run={**RUNS, "fp8-vllm": "no engine", "bf16-vllm": "none"},
        ledger_of=LEDGER,
    )
    assert settled.recipe.path == "fp16-vllm"
    assert settled.passed == {"fp8-vllm": "no engine", "bf16-vllm": "none"} and not settled.asked
    assert "fp8-vllm is passed over: no engine" in [reason.text for reason in settled.reasons]


def test_a_path_without_room_is_no_choice():
    assert (
        settle(
            RECIPE, diagnosis("qlora-hf", CLOSED, misfits=("bf16-hf",)), auto=True, can_run=RUNS, ledger_of=LEDGER
        ).recipe.path
        == "qlora-hf"
    )


def test_a_path_closed_for_its_speed_alone_is_given_to_who_asks_for_it():
    slow = Wall("FP8-HF-UNPROVEN", ("fp8-hf",), "FP8 has not been measured to be faster here")
    asked = replace(RECIPE, path="fp8-hf")
    machine = diagnosis("bf16-hf", CLOSED, walls=(NO_VLLM, slow))
    settled = settle(asked, machine, auto=True, can_run=RUNS, ledger_of=LEDGER)
    assert settled.recipe.path == "fp8-hf"
    assert settled.asked and not settled.passed
    assert [reason.text for reason in settled.reasons[:2]] == ["path fp8-hf was asked for", f"but: {slow.fact}"]
    assert settle(RECIPE, machine, auto=True, can_run=RUNS, ledger_of=LEDGER).recipe.path == "bf16-hf"
    with pytest.raises(PathClosed, match="fp8-hf is closed"):
        settle(asked, diagnosis("bf16-hf", CLOSED, walls=(FP8, slow)), auto=True, can_run=RUNS, ledger_of=LEDGER)


def test_a_closed_path_that_was_asked_for_names_the_wall():
    with pytest.raises(PathClosed) as caught:
        settle(
            replace(RECIPE, path="bf16-vllm"), diagnosis("bf16-hf", CLOSED), auto=True, can_run=RUNS, ledger_of=LEDGER
        )
    assert caught.value.because == "vLLM is not installed" and caught.value.help == "x: pip install vllm"
    assert caught.value.exit_code == 1


def test_no_open_path_is_an_error_with_the_first_wall():
    with pytest.raises(PathClosed) as caught:
        settle(RECIPE, diagnosis(None, PATHS), auto=True, can_run=RUNS, ledger_of=LEDGER)
    assert "no path is open" in str(caught.value)


def test_all_weights_are_never_trained_on_a_quantised_base():
    recipe = replace(RECIPE, lora_rank=0)
    settled = settle(recipe, diagnosis("qlora-hf", (*CLOSED, "bf16-hf")), auto=True, can_run=RUNS, ledger_of=LEDGER)
    assert settled.recipe.path == "cpu"


def test_the_plan_tells_how_long_an_answer_may_be():
    def told(**lengths):
        recipe = replace(RECIPE, max_completion_tokens=1984, **lengths)
        settled = settle(recipe, diagnosis("bf16-hf", CLOSED), auto=True, can_run=RUNS, ledger_of=LEDGER)
        return " ".join(announce.plan_text(settled, diagnosis("bf16-hf", CLOSED), None).split())

    assert "completions of at most 1984 tokens;" in told()
    assert "completions of at most 1984 tokens;" in told(context_tokens=2048)
    assert "completions of at most 512 tokens less the longest prompt;" in told(
        context_tokens=512, max_prompt_tokens=256
    )


def test_the_plan_as_text_says_what_why_and_what_was_closed():
    d = diagnosis("bf16-hf", CLOSED)
    settled = settle(RECIPE, d, auto=True, can_run=RUNS, ledger_of=LEDGER)
    text = announce.plan_text(settled, d, "about 12 minutes")
    for words in (
        "bf16-hf",
        "no vLLM",
        "org/model",
        "6.00 of 24.0 GiB",
        "24 GiB are free",
        "FP8-CC-89",
        "pip install vllm",
        "12 minutes",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_wall_that_is_told_below_is_no_reason_above():
    d = diagnosis("bf16-hf", CLOSED)
    plan = replace(d.plan, reasons=(FREE, Reason(About.CLOSED, "fp8-vllm is closed: the card has no FP8", "FP8-CC-89")))
    settled = settle(RECIPE, replace(d, plan=plan), auto=True, can_run=RUNS, ledger_of=LEDGER)
    text = announce.plan_text(settled, d, None)
    assert "24 GiB are free" in text and text.count("the card has no FP8") == 1


def test_every_command_of_a_plan_says_when_it_helps():
    docker = Help("If the host has an NVIDIA GPU, start the container with it", "docker run --gpus all ...")
    cpu = Help("Train a small model on the CPU: the `cpu` path is open wherever torch is installed")
    wall = Wall("GPU-NONE", PATHS[:-1], "This machine has no GPU", help=(docker, cpu, Help("rent one", "rent")))
    d = diagnosis("cpu", PATHS[:-1], walls=(wall,))
    settled = settle(RECIPE, d, auto=True, can_run=RUNS, ledger_of=LEDGER)
    closing = announce.plan_text(settled, d, None).partition("what closed the faster paths\n")[2]
    assert closing.splitlines() == [
        "  GPU-NONE: This machine has no GPU",
        "    help: If the host has an NVIDIA GPU, start the container with it",
        "          $ docker run --gpus all ...",
        "    help: Train a small model on the CPU: the `cpu` path is open wherever torch",
        "          is installed",
    ]


def test_the_largest_model_that_fits_and_can_be_had_is_picked():
    names = ("gsm8k-qwen3-4b", "gsm8k-qwen3-0.6b")
    assert pick(names, lambda r: "too big" if "4B" in r.model else None, lambda m: None).name == "gsm8k-qwen3-0.6b"
    none = pick(names, lambda r: None, lambda m: "the hub does not answer")
    assert none.name == "arithmetic-embedded" and "the hub does not answer" in none.reason
