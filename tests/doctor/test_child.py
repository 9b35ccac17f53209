"""However a child ends, the parent gets an outcome with a place and a line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from doctor import child


@pytest.fixture(autouse=True)
def _trials_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def run(name: str, *args: str, timeout_s: float = 20, **more: object) -> child.Outcome:
    return child.run(f"broken_trials:{name}", *args, timeout_s=timeout_s, **more)  # type: ignore[arg-type]


def test_good_trial_tells_and_prints_nothing_into_the_answer() -> None:
    outcome = run("good", "bye")
    assert (outcome.end, outcome.told, outcome.stage, outcome.error) == ("ok", {"word": "bye"}, "only", None)


@pytest.mark.parametrize(
    ("name", "end", "stage", "words"),
    [
        ("raises", "error", None, ["RuntimeError: could not import module 'X' for a reason", "libcudart.so.13"]),
        ("raises_after_swallowing", "error", None, ["ValueError: no backend"]),
        ("points_above", "error", None, ["RuntimeError: the real cause"]),
        ("segfault", "crash", "native code", ["about to touch ~/secret", "SIGSEGV"]),
        ("leaves", "crash", None, ["undefined symbol: _ZN3c10", "exit code 7"]),
        ("nothing_of_that_name", "error", None, ["AttributeError"]),
    ],
)
def test_bad_ends(name: str, end: str, stage: str | None, words: list[str]) -> None:
    outcome = run(name)
    assert (outcome.end, outcome.stage) == (end, stage)
    assert outcome.error and all(word in outcome.error for word in words), outcome.error


def test_what_was_told_before_the_end_is_kept() -> None:
    assert run("raises").told == {"before": 1}


def test_hang_is_cut_off_and_named() -> None:
    started = time.monotonic()
    outcome = run("hangs", timeout_s=1)
    assert outcome.end == "timeout" and outcome.stage == "CUDA start" and outcome.told == {"before": 1}
    assert "no answer" in (outcome.error or "") and "CUDA start" in (outcome.error or "")
    assert time.monotonic() - started < 60


def test_an_import_may_take_twice_as_long() -> None:
    outcome = run("slow_import", timeout_s=1)
    assert outcome.end == "timeout" and outcome.seconds > 1.9


def test_slow_but_moving_is_no_hang() -> None:
    outcome = run("gets_on", timeout_s=1)  # two seconds in all, no stage over 0.35
    assert outcome.end == "ok" and outcome.told["done"]


def test_moving_for_ever_ends_at_three_times_the_limit() -> None:
    assert run("gets_on", timeout_s=0.5).end == "timeout"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_grandchildren_die_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    assert run("leaves_a_child", str(pid_file)).end == "ok"
    assert gone(int(pid_file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_the_doctor(tmp_path: Path, how: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a shell's background job
    code += f"from doctor import child; child.run_all({{'broken_trials:hangs_in_sight': ({str(pid_file)!r},)}}, timeout_s=60)"
    doctor = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(child.__file__).parents[1], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    doctor.send_signal(how)
    doctor.wait(timeout=20)
    assert gone(int(pid_file.read_text()))


def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds; a zombie has ended."""
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 5
    while time.monotonic() < deadline:
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_child_sees_an_empty_folder_and_no_network_wish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    told = run("where", env={"EXTRA": "yes"}).told
    assert told["cwd"] == [] and told["offline"] == "1" and told["extra"] == "yes"
    assert "" not in told["path"] and str(tmp_path) not in told["path"]


def test_no_interpreter_is_an_outcome() -> None:
    outcome = run("good", python="/no/such/python")
    assert outcome.end == "unstarted" and "no child process" in (outcome.error or "")


def test_trials_run_side_by_side() -> None:
    started = time.monotonic()
    outcomes = child.run_all({"broken_trials:gets_on": (), "broken_trials:hangs": ()}, timeout_s=2)
    took = time.monotonic() - started
    assert {name: outcome.end for name, outcome in outcomes.items()} == {
        "broken_trials:gets_on": "ok",
        "broken_trials:hangs": "timeout",
    }
    assert list(outcomes) == ["broken_trials:gets_on", "broken_trials:hangs"]
    assert took < 0.8 * sum(outcome.seconds for outcome in outcomes.values())  # two seconds each


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("one\ntwo\n\n  \n====\n", "two"),
        ("", ""),
        ("\x1b[31mred Error: x\x1b[0m\n", "red Error: x"),
        ("bytes \x00\x07 kept", "bytes kept"),
    ],
)
def test_last_line(output: str, line: str) -> None:
    assert child.last_line(output) == line
