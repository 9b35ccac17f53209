"""The supervisor against workers that end in every way: the worker is a small real process, only its command is replaced."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders

from grpo_portable.errors import Interrupted, RecipeError, RunFolderError, UsageError
from grpo_portable.recipe import Recipe
from grpo_portable.run import progress, saved
from grpo_portable.run.folder import create, open_run, read_lines
from grpo_portable.supervision import ladder, supervisor
from grpo_portable.supervision.ladder import SAME_CODE
from grpo_portable.supervision.phase import Doing, Phase

ANSWER = {"paths": {p: {"open": True, "fits": True} for p in ("fp8-vllm", "bf16-hf", "qlora-hf", "cpu")}}
WORKER = """
import json, os, pathlib, signal, sys, time
folder, behaviours = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
rung = json.loads((folder / "rung.json").read_text())
count = folder / "starts"
n = int(count.read_text()) if count.exists() else 0
count.write_text(str(n + 1))
(folder / "heartbeat").write_text(json.dumps({"phase": "update", "pid": os.getpid()}))
kind, _, text = behaviours[min(n, len(behaviours) - 1)].partition(":")
print(text, flush=True)
if kind in ("done", "long", "say"):  # what a run leaves that asks nothing and has an adapter without tensors
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter" / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter" / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "run.json").write_text(json.dumps({"data": {"eval": {"used": 0}}}))
if kind == "done":
    with open(folder / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": 1, "reward": 1.0, "path": rung["path"], "micro_batch": rung["micro_batch"]}) + "\\n")
elif kind == "step":
    with open(folder / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": n + 1, "reward": 1.0}) + "\\n")
    os.kill(os.getpid(), signal.SIGKILL)
elif kind == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif kind == "long":
    for _ in range(5):
        time.sleep(0.5)
        os.utime(folder / "heartbeat")
elif kind == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
elif kind == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(130)))
    time.sleep(60)
elif kind == "quit":
    sys.exit(0)
elif kind == "save":
    def save(*_):
        time.sleep(1)
        (folder / "saved").write_text("whole")
        raise SystemExit(130)
    signal.signal(signal.SIGTERM, save)
    time.sleep(60)
elif kind == "fail":
    code, fact = text.split(" ", 1)
    (folder / "failure.json").write_text(json.dumps({"fact": fact, "phase": "update"}))
    sys.exit(int(code))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    run = create(tmp_path / "run", Recipe(path="fp8-vllm", micro_batch=8, rollout_rows=64, steps=1))
    run.write_json("plan.json", ANSWER)

    def begin(*behaviours, **options):
        command = lambda run, rung, processes: [sys.executable, "-c", WORKER, str(run.path), json.dumps(behaviours)]  # noqa: E731
        monkeypatch.setattr(supervisor, "worker_command", command)
        limits = supervisor.Limits(start_s=20, silence_s=1.0, stop_s=0.5)
        supervisor.supervise(run, limits=limits, **options)
        return run

    begin.run = run
    return begin


def events(run, *kinds):
    return [e for e in read_lines(run.events_file) if e["kind"] in kinds]


def test_a_good_worker_is_started_once(start):
    run = start("done")
    assert (run.path / "starts").read_text() == "1"
    assert not run.events_file.exists()


@pytest.mark.parametrize(
    ("ending", "path"),
    [
        ("fail:11 vLLM did not start", "bf16-hf"),
        ("fail:12 gradient of layer 3 was not finite", "bf16-hf"),
        ("kill:", "bf16-hf"),
        ("hang:", "bf16-hf"),
    ],
)
def test_a_broken_top_rung_is_left_and_the_event_keeps_the_error(start, ending, path):
    run = start(ending, "done")
    assert next(iter(read_lines(run.metrics_file)))["path"] == path
    (event,) = events(run, "fallback")
    assert (event["from"], event["to"]) == ("fp8-vllm", path)
    if "fail" in ending:
        assert ending.split(" ", 1)[1] in event["error"]


def test_the_event_of_a_fallback_keeps_which_open_paths_were_left_out_and_why(start):
    more = {"bf16-vllm": {"open": True, "fits": True}, "fp16-vllm": {"open": False}}
    start.run.write_json("plan.json", {"paths": {**ANSWER["paths"], **more}})
    (event,) = events(start("fail:11 vLLM could not start: ImportError: no Worker", "done"), "fallback")
    assert (event["to"], event["passed"]) == ("bf16-hf", {"bf16-vllm": SAME_CODE})


def test_a_rollout_takes_as_long_as_it_gives_signs_of_life(start):
    run = start("long", "done")  # 2.5 s, where 1 s of silence is the limit
    assert (run.path / "starts").read_text() == "1" and not run.events_file.exists()


def test_out_of_memory_halves_the_micro_batch_first(start):
    run = start("fail:10 CUDA out of memory", "fail:10 CUDA out of memory", "done")
    assert next(iter(read_lines(run.metrics_file)))["micro_batch"] == 2
    assert len(events(run, "retry")) == 2


def test_a_users_mistake_is_told_and_not_retried(start):
    with pytest.raises(UsageError) as caught:
        start("fail:2 `q.jsonl` has no answer column", "done")
    assert "`q.jsonl` has no answer column" in caught.value.lines()[0]
    assert (start.run.path / "starts").read_text() == "1"


def test_no_fallback_stops_and_says_so(start):
    with pytest.raises(supervisor.RunFailed) as caught:
        start("fail:11 vLLM did not start", "done", fallback=False)
    assert "--no-fallback" in "\n".join(caught.value.lines())


def test_an_endless_failure_ends(start):
    with pytest.raises(supervisor.RunFailed):
        start("fail:11 broken")
    assert int((start.run.path / "starts").read_text()) <= 5


def test_a_worker_that_is_killed_again_and_again_goes_on_as_long_as_it_makes_steps(start):
    run = start("step:", "step:", "step:", "step:", "step:", "done")
    assert [e["to"] for e in events(run, "fallback")] == ["bf16-hf"]  # vLLM is not tried twice
    assert [e["to"] for e in events(run, "retry")] == ["bf16-hf"] * 4


def test_a_run_that_gets_no_further_goes_down_and_ends(start):
    with pytest.raises(supervisor.RunFailed):
        start("kill:")
    assert [e["to"] for e in events(start.run, "retry", "fallback")] == [
        "bf16-hf",
        "bf16-hf",
        "qlora-hf",
        "qlora-hf",
        "cpu",
        "cpu",
    ]


def test_a_worker_that_could_not_say_why_on_a_full_disk_is_no_crash(start, monkeypatch):
    monkeypatch.setattr(supervisor, "_room", lambda run: 0)
    with pytest.raises(supervisor.RunFailed) as caught:
        start("kill:", "done")
    text = "\n".join(caught.value.lines())
    assert "--resume" in text and "is kept" in text
    assert (start.run.path / "starts").read_text() == "1"


SERIALIZING = "SafetensorError: Error while serializing: I/O error: "


@pytest.mark.parametrize(
    ("said", "fact", "help"),
    [
        (SERIALIZING + "No space left on device (os error 28)", "the disk of `{run}` is full", "free space"),
        (SERIALIZING + "Disk quota exceeded (os error 122)", "the disk quota of `{run}` is used up", "free space"),
        (SERIALIZING + "File too large (os error 27)", "a file in `{run}` may not be as large", "ulimit -f"),
        ("OSError: [Errno 28] No space left on device: '/cache/x'", "the disk of `/cache` is full", "free space"),
        ("PermissionError: [Errno 13] Permission denied", "`{run}` cannot be written", "make it writable"),
    ],
)
def test_what_a_disk_does_not_take_is_the_fact_and_the_library_the_reason(start, said, fact, help):
    stopped = supervisor._failure(start.run, ladder.Ending("disk", Doing(), said), "")
    assert stopped.fact.startswith(fact.format(run=start.run.path)) and stopped.because == said
    assert stopped.help.startswith(f"{help} (") or f"({help})" in stopped.help
    assert "(what was made up to step 0 is kept), then go on with: grpo-portable train --resume" in stopped.help


def test_what_the_supervisor_cannot_write_is_told_in_words(start, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(start.run), "event", full)
    with pytest.raises(RunFolderError) as caught:
        start("fail:11 vLLM did not start", "done")
    assert "no space left on device" in str(caught.value) and "--resume" in str(caught.value.help)


def test_a_worker_that_the_kernel_does_not_let_go_is_told(start, monkeypatch):
    monkeypatch.setattr(supervisor, "KILL_LIMIT_S", 0.2)
    end_group = supervisor._end_group
    monkeypatch.setattr(supervisor, "_end_group", lambda pid: None)
    try:
        with pytest.raises(supervisor.RunFailed, match="does not end, even when killed"):
            start("hang:", "done")
    finally:
        end_group(json.loads((start.run.path / "heartbeat").read_text())["pid"])


def test_what_a_worker_printed_is_kept_without_what_is_private(start, monkeypatch):
    home = os.path.expanduser("~")
    (start.run.path / "worker.log").write_text("from the run before\n")
    run = start(f"say:{home}/models with hf_abcdefghijklmnop", "done")
    log = (run.path / "worker.log").read_text()
    assert log.startswith("from the run before\n~/models with hf_...\n")


def test_what_killed_processes_left_is_swept(start):
    (start.run.path / ".run.json.123.part").write_text("{")
    (start.run.path / ".adapter.part").mkdir()
    run = start("done")
    assert [f.name for f in run.path.glob(".*.part")] == [".adapter.part"]  # whoever saves an adapter removes it


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
def test_a_closed_terminal_ends_the_display_and_not_the_run(start, error):
    class Closed:
        def isatty(self):
            return False

        def write(self, text):
            raise error

        def flush(self):
            raise error

    run = start.run
    run.heartbeat(Phase.ENGINE, "rollout engine starting")
    with progress.Progress(run, 3, Closed()) as display:
        display.look()
        display.say("fallback: one rung lower")


PARENT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from pathlib import Path
from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import create, open_run
from grpo_portable.supervision import supervisor
WORKER, folder, behaviour = sys.argv[1:4]
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"
folder = Path(folder)
run = create(folder, Recipe(path="cpu", micro_batch=8, rollout_rows=64))
supervisor.worker_command = lambda run, rung, n: [
    sys.executable, "-c", LAUNCHER, WORKER, str(run.path), json.dumps([behaviour]), "grpo_portable.worker"
]
supervisor.supervise(run)
"""


def parent(folder, behaviour):
    """A real supervisor process with a worker under a launcher, as accelerate's; returns once the worker is at work."""
    command = [sys.executable, "-c", PARENT, WORKER, str(folder), behaviour]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for _ in range(200):
        if (folder / "heartbeat").exists() and (folder / "heartbeat").read_text():
            break
        time.sleep(0.05)
    time.sleep(0.3)
    return process


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_lets_the_worker_save_and_says_how_to_go_on(tmp_path, sent):
    process = parent(tmp_path / "run", "save:")
    process.send_signal(sent)
    _, text = process.communicate(timeout=30)
    assert "Interrupted" in text and "saved" in text
    assert (tmp_path / "run" / "saved").read_text() == "whole"
    assert [e["kind"] for e in read_lines(tmp_path / "run" / "events.jsonl")] == ["interrupted"]
    assert Interrupted.exit_code == 130


def test_two_supervisors_never_share_a_folder(tmp_path):
    first = parent(tmp_path / "run", "save:")
    try:
        with pytest.raises(RunFolderError) as caught:
            supervisor.supervise(open_run(tmp_path / "run"))
        assert f"at work already (process {first.pid})" in str(caught.value)
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=30)


@pytest.mark.parametrize("number", supervisor.NO_LOCKS)
def test_a_file_system_without_locks_ends_no_run(start, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert (start("done").path / "starts").read_text() == "1"


def test_a_worker_whose_supervisor_was_killed_is_not_doubled(tmp_path):
    first = parent(tmp_path / "run", "save:")
    first.kill()
    first.wait()
    worker = json.loads((tmp_path / "run" / "heartbeat").read_text())["pid"]
    try:
        with pytest.raises(RunFolderError) as caught:
            supervisor.supervise(open_run(tmp_path / "run"))
        assert f"process {worker}" in str(caught.value)
    finally:
        os.kill(worker, signal.SIGTERM)


def test_a_worker_that_ends_without_an_error_and_without_a_result_is_not_done(start):
    run = start("quit", "done")  # as a library does that calls os._exit(0)
    (event,) = events(run, "fallback")
    assert "before it was done: it has no adapter yet, it does not say how many questions it asks" in event["error"]


def test_a_part_that_a_killed_worker_left_does_not_stay(start):
    left = start.run.path / ".heartbeat.77.part"
    left.write_text("{")
    start("done")
    assert not left.exists()


@pytest.fixture
def heard():
    """Ctrl-C as a command in a terminal has it: one that a script starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stop_in_the_moment_of_a_start_leaves_no_worker_behind(start, heard, monkeypatch):
    """The process is there already, and who starts it does not know its number yet."""
    real, made = subprocess.Popen, []

    def popen(*given, **options):
        made.append(real(*given, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return made[-1]

    monkeypatch.setattr(supervisor.subprocess, "Popen", popen)
    try:
        with pytest.raises(Interrupted):
            start("hang:")
    finally:
        for worker in made:
            left = worker.poll() is None
            worker.kill()
            worker.wait()
    assert len(made) == 1 and not left
    assert [e["kind"] for e in read_lines(start.run.events_file)] == ["interrupted"]


def test_ctrl_c_before_a_worker_is_begun_says_how_to_go_on(start, heard, monkeypatch):
    """Looking for workers that others left in the folder takes a moment."""

    def look(run):
        os.kill(os.getpid(), signal.SIGINT)
        return []

    monkeypatch.setattr(supervisor, "_workers", look)
    with pytest.raises(Interrupted) as told:
        start("done:")
    assert f"--resume --out {start.run.path}" in told.value.help


def stopped(process):
    """(seconds until it was gone, what it said)."""
    began = time.monotonic()
    _, text = process.communicate(timeout=60)
    return time.monotonic() - began, text


@pytest.mark.parametrize(
    "sent",
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGHUP), (signal.SIGINT, signal.SIGINT, signal.SIGTERM)],
    ids=["twice by a batch system", "by the kernel and by the shell", "handed on by a launcher"],
)
def test_a_stop_that_is_told_more_than_once_is_one_stop(tmp_path, sent):
    process = parent(tmp_path / "run", "save:")
    for number in sent:
        process.send_signal(number)
        time.sleep(0.1)
    _, text = stopped(process)
    assert "Interrupted" in text and "saving takes at most 120 s" in text
    assert (tmp_path / "run" / "saved").read_text() == "whole"
    assert [e["kind"] for e in read_lines(tmp_path / "run" / "events.jsonl")] == ["interrupted"]


def test_who_presses_ctrl_c_again_is_not_kept_waiting(tmp_path):
    process = parent(tmp_path / "run", "hang:")
    process.send_signal(signal.SIGINT)
    time.sleep(supervisor.AGAIN_S + 0.3)
    process.send_signal(signal.SIGINT)
    seconds, text = stopped(process)
    assert seconds < 20 and "Interrupted" in text
    assert supervisor.beating(open_run(tmp_path / "run")) is None
    assert [e["kind"] for e in read_lines(tmp_path / "run" / "events.jsonl")] == ["interrupted"]


def test_a_process_of_another_run_that_has_the_number_now_is_no_worker_of_this_one(tmp_path):
    other = run_folders.asleep("grpo_portable.worker", "elsewhere")
    try:
        run = create(tmp_path / "run", Recipe(path="cpu"))
        run.write_json("heartbeat", {"doing": "update", "pid": other.pid})
        assert supervisor.beating(run) is None
        mine = run_folders.asleep(run.path.resolve())
        run.write_json("heartbeat", {"doing": "update", "pid": mine.pid})
        assert supervisor.beating(run) == mine.pid
        mine.kill()
        mine.wait()
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("pid", [None, 0, -1, 10**30, float("inf"), "x", [1], {"a": 1}], ids=str)
def test_a_heartbeat_with_no_processs_number_names_no_worker(tmp_path, pid):
    run = create(tmp_path / "run", Recipe(path="cpu"))
    run.heartbeat_file.write_text(json.dumps({"pid": pid}))
    assert supervisor.beating(run) is None


@pytest.mark.parametrize(
    ("pauses", "silent"), [([0.1, 4000.0, 0.1], None), ([1.0] * 30, 0)], ids=["one pause", "many looks"]
)
def test_the_time_in_which_the_supervisor_was_stopped_itself_is_no_silence(tmp_path, monkeypatch, pauses, silent):
    run = create(tmp_path / "run", Recipe(path="cpu", steps=1))
    run.heartbeat(Phase.UPDATE, "update of step 1")
    clock, left = [0.0], list(pauses)
    ended = SimpleNamespace(poll=lambda: None if left else 0)
    monkeypatch.setattr(
        supervisor,
        "time",
        SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: clock.append(clock.pop() + left.pop())),
    )
    seen = SimpleNamespace(look=lambda: None)
    assert supervisor._watch(ended, run, supervisor.Limits(start_s=20, silence_s=20), seen) == silent


def test_a_worker_that_has_given_no_sign_of_life_yet_holds_the_run_when_its_supervisor_is_gone(tmp_path):
    run, other = (create(tmp_path / name, Recipe(path="cpu")) for name in ("run", "other"))
    worker = run_folders.asleep("-m", "grpo_portable.worker", run.path.resolve())
    reader = run_folders.asleep("report", other.path.resolve())
    try:
        with pytest.raises(RunFolderError, match=rf"at work already \(process {worker.pid}\)"), supervisor.alone(run):
            pass
        with supervisor.alone(other):  # who reads its folder is no worker
            pass
    finally:
        for process in (worker, reader):
            process.kill()
            process.wait()
    with supervisor.alone(run):
        pass


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        ((), []),
        (("heartbeat",), [0]),
        (("heartbeat-2", "heartbeat"), [0, 2]),  # the one between has not begun, or its file could not be written
        (("heartbeat-10", "heartbeat-9"), [9, 10]),
        (("heartbeat-3.txt", ".heartbeat-1.77.part", "heartbeats"), []),
    ],
)
def test_a_rank_is_read_from_the_name_of_its_heartbeat(tmp_path, names, ranks):
    run = create(tmp_path / "run", Recipe(path="cpu"))
    for name in names:
        (run.path / name).touch()
    assert run.ranks() == ranks


def test_a_stop_reaches_every_rank_that_has_begun(tmp_path):
    run = create(tmp_path / "run", Recipe(path="cpu"))
    workers = [run_folders.asleep(run.path.resolve()) for _ in range(2)]
    try:
        for name, worker in zip(("heartbeat", "heartbeat-2"), workers, strict=True):
            run.write_json(name, {"doing": "loading", "pid": worker.pid})
        assert supervisor._beating(run) == [worker.pid for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_the_worker_finds_its_run_wherever_a_reward_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create(Path("run"), Recipe(path="cpu"))
    command = supervisor.worker_command(run, supervisor.ladder.Rung("cpu", 4, 8), 1)
    assert command[-1] == str(tmp_path / "run")


def test_lines_of_metrics_that_are_of_no_step_disturb_nobody(start):
    start.run.metrics_file.write_text('{"step": "x"}\n[1]\n{"reward": "high"}\n')
    run = start("done")
    assert saved.steps_done(run) == 1


def test_a_recipe_of_a_run_that_was_cut_off_is_told(start):
    lines = start.run.recipe_file.read_text().splitlines()
    start.run.recipe_file.write_text("\n".join(line for line in lines if not line.startswith("micro_batch")))
    with pytest.raises(RecipeError) as caught:
        start("done")
    assert "does not say its micro_batch" in str(caught.value) and caught.value.help


@pytest.mark.parametrize("moved", [True, False])
def test_a_run_folder_that_goes_away_is_told_and_nothing_promised(start, monkeypatch, moved):
    def goes(run):
        run.path.rename(run.path.with_name("renamed")) if moved else shutil.rmtree(run.path)
        return supervisor.LEAST_ROOM_BYTES

    monkeypatch.setattr(supervisor, "_room", goes)
    with pytest.raises(RunFolderError, match="is gone, because it was removed or renamed") as caught:
        start("kill:", "done")
    assert "nothing is lost" not in "\n".join(caught.value.lines())


def test_the_way_on_is_that_of_the_run(start):
    start.run.write_json("task.json", {"only": "evaluate"})
    with pytest.raises(supervisor.RunFailed) as caught:
        start("kill:", fallback=False)
    assert f"grpo-portable eval --resume --out {start.run.path}" in str(caught.value.help)
