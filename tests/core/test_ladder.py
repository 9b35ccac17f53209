"""How an ending is read, and which rung follows: tables of cases."""

from dataclasses import replace

import pytest

from grpo_portable.supervision.ladder import EXIT, SAME_CODE, Ending, Rung, classify, next_step, rungs_from_answer
from grpo_portable.supervision.phase import Doing, Phase

START, ROLLOUT, UPDATE = Doing(), Doing(Phase.ROLLOUT, "rollout of step 3"), Doing(Phase.UPDATE, "update of step 3")
TOP = Rung("fp8-vllm", 8, 64)
OPEN = ("fp8-vllm", "bf16-vllm", "bf16-hf", "qlora-hf", "cpu")


LAUNCHER = "subprocess.CalledProcessError: Command '['python', '-m', 'worker']' returned non-zero exit status {}."


@pytest.mark.parametrize(
    ("code", "failure", "log", "kind"),
    [
        (0, {}, "", "done"),
        (2, {"fact": "no such file"}, "", "user"),
        (10, {"fact": "CUDA out of memory"}, "", "oom"),
        (11, {}, "", "engine"),
        (130, {}, "", "interrupted"),
        (-9, {}, "", "killed"),
        (137, {}, "", "killed"),
        (-11, {}, "Fatal Python error: Segmentation fault", "killed"),
        (1, {}, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "oom"),
        (1, {}, "ValueError: No available memory for the cache blocks.", "oom"),
        (
            1,
            {},
            "AttributeError: 'LRUCacheWorkerLoRAManager' object has no attribute 'get_dummy_lora_warmup_rank'",
            "engine",
        ),
        (1, {}, "NameError: name 'align_completion_tool_mask' is not defined", "engine"),
        (1, {}, "ImportError: .../vllm/_C.abi3.so: undefined symbol: _ZN3c10", "import"),
        (1, {}, "RuntimeError: CUDA error: no kernel image is available for execution on the device", "engine"),
        (1, {}, "OSError: [Errno 28] No space left on device", "disk"),
        (1, {}, "KeyError: 'x'", "crash"),
        (1, {}, "ModuleNotFoundError: No module named 'httpx2'\n" + LAUNCHER.format("1"), "import"),
        (1, {"kind": "oom", "fact": "CUDA out of memory"}, LAUNCHER.format("10"), "oom"),
        (1, {"kind": "interrupted"}, LAUNCHER.format("130"), "interrupted"),
        (1, {"kind": "crash", "fact": "KeyError: 'x'"}, "KeyError: 'x'", "crash"),
        (1, {}, "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.", "killed"),
        (1, {}, "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", "disk"),
        (1, {}, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "oom"),
        (1, {}, "worker: nonfinite: 3 updates in a row were not finite\n" + LAUNCHER.format("12"), "nonfinite"),
        (1, {}, "worker: disk: [Errno 13] Permission denied: 'run.json'\n" + LAUNCHER.format("14"), "disk"),
        (-9, {}, "worker: disk: as a reward may print", "killed"),
        (1, {}, "worker: import: No module named 'httpx2'", "import"),
        # what the worker says of itself is not overruled by names of folders and by what was printed before
        (1, {"kind": "crash", "traceback_tail": 'File "/home/me/vllm-env/lib/trl.py"'}, "KeyError: 'x'", "crash"),
        (1, {"kind": "crash", "fact": "KeyError: 'x'"}, "warning: CUDA out of memory\nKeyError: 'x'", "crash"),
        (1, {}, "torch.OutOfMemoryError: CUDA out of memory, trying again\nKeyError: 'x'", "crash"),
        (1, {}, "OSError: [Errno 28] No space left on device, passed over\nKeyError: 'x'", "crash"),
        (1, {}, "FileNotFoundError: [Errno 2] No such file: '/home/me/vllm-env/x.json'", "crash"),
        (1, {}, r"FileNotFoundError: no such file: C:\Users\me\unsloth\x.json", "crash"),
        (-9, {}, "torch.OutOfMemoryError: CUDA out of memory, trying again", "killed"),
        (-6, {}, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", "oom"),
        (-6, {}, "terminate called after throwing an instance of 'c10::Error'\n  what():  no kernel", "killed"),
    ],
)
def test_endings(code, failure, log, kind):
    assert classify(code, failure, log, UPDATE).kind == kind


def test_a_worker_that_was_killed_names_the_signal():
    assert classify(-9, {}, "", ROLLOUT).error == "the worker was ended by SIGKILL"
    assert classify(139, {}, "", UPDATE).error == "the worker was ended by SIGSEGV"


def test_the_error_told_is_the_workers_and_not_the_launchers():
    log = "ModuleNotFoundError: No module named 'httpx2'\nTraceback (most recent call last):\n" + LAUNCHER.format("1")
    assert classify(1, {}, log, START).error == "ModuleNotFoundError: No module named 'httpx2'"


def test_a_broken_import_is_not_tried_on_every_rung():
    ending = Ending("import", START, "ModuleNotFoundError: No module named 'httpx2'")
    assert next_step(Rung("bf16-hf", 8, 64), ending, OPEN, 0).rung is None
    assert next_step(TOP, ending, OPEN, 0).rung.path == "bf16-vllm"


def test_a_reward_that_hangs_is_not_run_on_every_rung():
    assert next_step(TOP, Ending("hang", Doing(Phase.REWARDS), "no sign of life"), OPEN, 0).rung is None
    assert next_step(TOP, Ending("hang", ROLLOUT, "no sign of life"), OPEN, 0).rung.path == "bf16-vllm"


def test_a_hang_is_a_hang_whatever_the_exit_code():
    assert classify(-9, {}, "", START, hung=True).kind == "hang"


@pytest.mark.parametrize("kind", ["user", "reward", "disk", "interrupted"])
def test_what_a_lower_path_cannot_cure_is_not_retried(kind):
    assert next_step(TOP, Ending(kind, UPDATE, "x"), OPEN, 0).rung is None


BY_ROWS, BY_MICRO_BATCH = Rung("bf16-hf", 8, 32), Rung("bf16-hf", 4, 64)
LOWER = Rung("qlora-hf", 8, 64)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.STARTING, LOWER),  # fewer rows make no model smaller
        (Phase.ENGINE, BY_ROWS),
        (Phase.EVALUATION, BY_ROWS),
        (Phase.BOOTSTRAP, BY_MICRO_BATCH),
        (Phase.PROBE, BY_ROWS),
        (Phase.TRAINING, BY_MICRO_BATCH),
        (Phase.ROLLOUT, BY_ROWS),
        (Phase.REWARDS, LOWER),
        (Phase.UPDATE, BY_MICRO_BATCH),
    ],
)
@pytest.mark.parametrize("words", ["", "evaluating what an update of a probe rolls out"])
def test_what_is_made_smaller_is_what_ran_out_whatever_it_is_called(phase, expected, words):
    ending = Ending("oom", Doing(phase, words), "CUDA out of memory")
    assert next_step(Rung("bf16-hf", 8, 64), ending, OPEN, 0).rung == expected


@pytest.mark.parametrize(
    ("doing", "rung", "expected"),
    [
        (UPDATE, Rung("bf16-hf", 6, 64), Rung("bf16-hf", 3, 64)),
        (UPDATE, Rung("bf16-hf", 15, 64), Rung("bf16-hf", 5, 64)),
        (UPDATE, Rung("bf16-hf", 1, 64), Rung("qlora-hf", 1, 64)),
        (ROLLOUT, Rung("bf16-hf", 8, 1), Rung("qlora-hf", 8, 1)),
    ],
)
def test_memory_halves_the_part_that_ran_out_and_then_goes_down(doing, rung, expected):
    assert next_step(rung, Ending("oom", doing, "CUDA out of memory"), OPEN, 0).rung == expected


@pytest.mark.parametrize(
    ("record", "doing"),
    [
        ({}, Doing()),
        ({"phase": "update", "doing": "update of step 2", "pid": 7}, Doing(Phase.UPDATE, "update of step 2")),
        ({"phase": "update"}, Doing(Phase.UPDATE)),
        ({"doing": "rollout of step 4"}, Doing(Phase.STARTING, "rollout of step 4")),  # words decide nothing
        ({"phase": "dreaming"}, Doing()),
        ({"phase": ["update"], "doing": None}, Doing()),
    ],
)
def test_what_was_done_is_read_from_a_field(record, doing):
    assert Doing.told(record) == doing == Doing.told(doing.record())


def test_a_phase_has_words_also_where_nobody_gave_any():
    assert str(Doing()) == "starting" and str(Doing(Phase.ROLLOUT)) == "rollout"


def test_a_lower_path_begins_with_the_sizes_of_the_run():
    """Else a path whose engine needed few rows would hand them on to one that has room for all."""
    first, rung = Rung("bf16-vllm", 8, 64), Rung("bf16-vllm", 2, 64)
    for rows in (32, 16, 8, 4):
        rung = next_step(rung, Ending("oom", ROLLOUT, "oom"), OPEN, 0, first).rung
        assert rung == Rung("bf16-vllm", 2, rows)
    assert next_step(rung, Ending("oom", ROLLOUT, "oom"), OPEN, 0, first).rung == Rung("bf16-hf", 8, 64)


def test_an_engine_that_dies_is_not_asked_twice():
    step = next_step(TOP, Ending("engine", START, "vLLM did not start"), OPEN, 0)
    assert step.rung == Rung("bf16-vllm", 8, 64)
    assert "vLLM did not start" in step.reason


@pytest.mark.parametrize("kind", ["killed", "crash", "hang"])
def test_a_portable_worker_that_was_killed_or_hung_is_started_again_once(kind):
    rung = Rung("bf16-hf", 8, 64)
    assert next_step(rung, Ending(kind, UPDATE, "signal 9"), OPEN, 0).rung == rung
    assert next_step(rung, Ending(kind, UPDATE, "signal 9"), OPEN, 1).rung == Rung("qlora-hf", 8, 64)
    assert next_step(replace(rung, path="bf16-vllm"), Ending(kind, UPDATE, "x"), OPEN, 0).rung.path == "bf16-hf"


def test_the_last_rung_ends_the_run():
    assert next_step(Rung("cpu", 1, 1), Ending("nonfinite", UPDATE, "nan"), ("cpu",), 3).rung is None


def test_every_ladder_ends():
    rung, starts = TOP, 0
    while rung is not None:
        rung = next_step(rung, Ending("oom", ROLLOUT if starts % 2 else UPDATE, "oom"), OPEN, 0).rung
        starts += 1
        assert starts < 60


def test_only_open_paths_are_rungs_and_the_cpu_only_for_small_models():
    paths = {p: {"open": p != "bf16-vllm", "fits": p != "bf16-hf"} for p in OPEN}
    answer = {"paths": paths}
    assert rungs_from_answer(answer, "fp8-vllm", 100_000_000) == ("fp8-vllm", "qlora-hf", "cpu")
    assert rungs_from_answer(answer, "fp8-vllm", 4_000_000_000) == ("fp8-vllm", "qlora-hf")
    assert rungs_from_answer(answer, "cpu", 4_000_000_000) == ("cpu",)


def test_exit_codes_are_one_a_cause():
    assert len(set(EXIT.values())) == len(EXIT)


# --- several GPUs

FOUR = Rung("bf16-hf", 16, 64, gpus=(0, 1, 2, 3), processes=4)
STEP = (8, 8)
GONE = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:4221"
KILLED = "rank 1 died with <Signals.SIGKILL: 9>"


@pytest.mark.parametrize(
    ("failure", "log", "kind", "rank"),
    [
        ({}, KILLED, "killed", 1),
        ({"kind": "collective", "fact": GONE, "rank": 0}, f"{GONE}\n{KILLED}", "killed", 1),
        ({"kind": "interrupted", "fact": "stopped", "rank": 0}, KILLED, "killed", 1),
        ({"kind": "oom", "fact": "CUDA out of memory", "rank": 1}, "rank 0 died with <Signals.SIGKILL: 9>", "oom", 1),
        (
            {"kind": "interrupted", "fact": "stopped", "rank": 0},
            "rank 0 returned non-zero exit status 130",
            "interrupted",
            0,
        ),
        (
            {"kind": "collective", "fact": "NCCL error", "rank": 2},
            "rank 2 returned non-zero exit status 15",
            "collective",
            2,
        ),
        ({}, "rank 3 returned non-zero exit status 10", "oom", 3),
        ({"kind": "crash", "fact": "KeyError: 'x'", "rank": 2}, "rank 2 returned non-zero exit status 1", "crash", 2),
    ],
)
def test_of_several_processes_the_first_to_fail_counts(failure, log, kind, rank):
    ending = classify(1, failure, log, UPDATE, processes=4)
    assert (ending.kind, ending.rank) == (kind, rank)


def test_the_rank_that_hung_is_named():
    ending = classify(-9, {}, "", ROLLOUT, True, processes=2, silent=1)
    assert (ending.kind, ending.rank, ending.error) == ("hang", 1, "no sign of life while rollout of step 3")


def test_a_gpu_whose_process_is_killed_twice_is_left_out():
    ending = Ending("killed", UPDATE, "the process of rank 1 was ended by SIGKILL", 1)
    assert next_step(FOUR, ending, OPEN, 0, FOUR, STEP).rung == FOUR
    step = next_step(FOUR, ending, OPEN, 1, FOUR, STEP)
    assert step.rung == Rung("bf16-hf", 16, 64, gpus=(0, 2), processes=2), (
        "eight questions are not to be shared by three"
    )
    assert "GPUs 4 → 2 (0, 2)" in step.reason and "groups stay whole" in step.reason


def test_processes_that_lose_each_other_leave_one_gpu():
    ending = Ending("collective", UPDATE, "NCCL error: unhandled system error", 2)
    assert next_step(FOUR, ending, OPEN, 0, FOUR, STEP).rung == Rung("bf16-hf", 16, 64, gpus=(0,), processes=1)


def test_out_of_memory_on_one_of_several_makes_all_smaller():
    step = next_step(FOUR, Ending("oom", UPDATE, "CUDA out of memory", 3), OPEN, 0, FOUR, STEP)
    assert step.rung == replace(FOUR, micro_batch=8)


def test_gpus_that_were_left_out_stay_out_on_lower_paths_and_the_cpu_takes_none():
    two = replace(FOUR, gpus=(0, 2), processes=2)
    lower = next_step(two, Ending("engine", ROLLOUT, "CUDA error"), OPEN, 0, FOUR, STEP).rung
    assert lower == Rung("qlora-hf", 16, 64, gpus=(0, 2), processes=2)
    last = next_step(lower, Ending("engine", ROLLOUT, "CUDA error"), OPEN, 0, FOUR, STEP).rung
    assert last == Rung("cpu", 16, 64, gpus=(), processes=1)


def test_a_micro_batch_divides_what_one_process_has():
    """12 questions of 2: 24 completions, 8 on each of three and 12 on each of two; 8 does not divide 12."""
    three = Rung("bf16-hf", 8, 64, gpus=(0, 1, 2), processes=3)
    ending = Ending("hang", UPDATE, "no sign of life", 0)
    assert next_step(three, ending, OPEN, 1, three, (12, 2)).rung == Rung("bf16-hf", 4, 64, gpus=(1, 2), processes=2)


@pytest.mark.parametrize(
    ("error", "path", "passed"),
    [
        ("vLLM could not start: ImportError: cannot import name 'Worker'", "bf16-hf", {"bf16-vllm": SAME_CODE}),
        (
            "vLLM could not start: ImportError: vllm/_C.abi3.so: undefined symbol: _ZN3c10",
            "bf16-hf",
            {"bf16-vllm": SAME_CODE},
        ),
        ("vLLM could not start: RuntimeError: no FP8 kernel for this shape", "bf16-vllm", {}),
        ("vLLM failed in a rollout: AttributeError: 'NoneType' object has no attribute 'x'", "bf16-vllm", {}),
    ],
)
def test_a_vllm_whose_own_code_is_broken_is_not_tried_in_another_format(error, path, passed):
    step = next_step(TOP, Ending("engine", Doing(Phase.ENGINE), error), OPEN, 0)
    assert step.rung.path == path and step.passed == passed


@pytest.mark.parametrize("kind", ["oom", "engine", "nonfinite", "killed", "crash", "hang"])
@pytest.mark.parametrize("path", ["bf16-vllm", "bf16-hf"])
def test_every_way_on_names_the_phase_that_ended(kind, path):
    step = next_step(Rung(path, 8, 64), Ending(kind, ROLLOUT, "told so"), OPEN, 0)
    assert step.rung is not None and "rollout of step 3" in step.reason
