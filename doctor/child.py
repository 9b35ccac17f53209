"""How a trial in a child interpreter ended. A crash, a hang or an ABI error there is a fact, never a crash of the doctor.

A trial (`doctor.trials`) tells what it sees as lines of JSON in a file of its own, so what it told before it died is
kept, and whatever libraries print goes elsewhere. The child gets its own process group (killed whole when its time is
up), an empty working folder (nothing there can shadow a package; nothing a library writes stays) and no network wishes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doctor.privacy import scrub

_ROOT = str(Path(__file__).resolve().parent.parent)
# -P keeps the working folder off the path. The doctor's own root leaves the path again at once: a trial must see
# exactly the packages its user sees.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); import doctor.trials as t; del sys.path[0]; "
    "sys.exit(t.main(sys.argv[2:]))"
)
_QUIET = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "NO_COLOR": "1",
}
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as NVML counts, and as a run's workers are told; a user's own is kept
_TAIL = 64 * 1024
_live: set[subprocess.Popen[bytes]] = set()
_GRACE_S = 2.0  # a process stuck in the driver ignores even SIGKILL; after this long it is left behind


@dataclass(frozen=True)
class Outcome:
    """What a child told and how it ended: `ok`, `error` (it raised), `crash` (signal or exit), `timeout`, `unstarted`."""

    end: str
    stage: str | None = None  # the last stage it began, None before the first
    told: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None  # one scrubbed line; None when ok
    seconds: float = 0.0


def run(
    trial: str,
    *args: str,
    timeout_s: float,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs one trial by name and returns its outcome; never raises.

    `timeout_s` bounds one stage, not the whole: a slow machine that gets on is no hang. An import may take twice as
    long (a cold network disk), everything together three times.
    """
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="grpo-doctor-", ignore_cleanup_errors=True) as folder:
            return _run_in(Path(folder), trial, args, timeout_s, python or sys.executable, dict(env or {}), started)
    except OSError as e:  # no temporary folder, no process: the doctor goes on without this fact
        return Outcome("unstarted", error=scrub(f"no child process could be started: {e}"), seconds=_since(started))


def run_all(trials: Mapping[str, Sequence[str]], *, timeout_s: float) -> dict[str, Outcome]:
    """Outcomes of several trials run side by side, by name."""
    outcomes: dict[str, Outcome] = {}

    def one(name: str, args: Sequence[str]) -> None:
        outcomes[name] = run(name, *args, timeout_s=timeout_s)

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in trials.items()]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join(4 * timeout_s + _GRACE_S)  # a child has at most three times its limit
    except BaseException:  # Ctrl-C reaches only this thread; the children have a session of their own
        for process in list(_live):
            _kill_group(process)
        raise
    return {name: outcomes[name] for name in trials if name in outcomes}


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def _run_in(
    folder: Path, trial: str, args: Sequence[str], timeout_s: float, python: str, env: dict[str, str], started: float
) -> Outcome:
    told_file, output_file, work = folder / "told.jsonl", folder / "output.txt", folder / "work"
    work.mkdir()
    command = [python, "-P", "-c", _BOOT, _ROOT, trial, str(told_file), *args]
    with open(output_file, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={**_ORDER, **os.environ, **_QUIET, **env},
            start_new_session=os.name == "posix",
        )
        _live.add(process)
        try:
            code, waited_s = _watch(process, told_file, timeout_s, started)
        finally:
            _live.discard(process)
            _kill_group(process)  # also after a normal end: a trial leaves nothing running
    told, stage = _read_told(told_file)
    return _judge(code, told, stage, _read_tail(output_file), waited_s, _since(started))


def _watch(
    process: subprocess.Popen[bytes], told_file: Path, timeout_s: float, started: float
) -> tuple[int | None, float]:
    """The exit code, or None when no progress came in time; and how many seconds the last stage took."""
    size, last_news, stage = -1, time.monotonic(), None
    while True:
        try:
            return process.wait(timeout=0.1), time.monotonic() - last_news
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        told_bytes = told_file.stat().st_size if told_file.exists() else 0
        if told_bytes != size:
            size, last_news, stage = told_bytes, now, _read_told(told_file)[1]
        allowed = 2 * timeout_s if is_import(stage) else timeout_s
        if now - last_news > allowed or now - started > 3 * timeout_s:
            return None, now - last_news


def is_import(stage: str | None) -> bool:
    """Whether a stage only loads code (or the interpreter itself): being slow there says nothing of the machine."""
    return stage is None or stage.startswith("import")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        command = ["taskkill", "/T", "/F", "/PID", str(process.pid)]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, check=False, timeout=_GRACE_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE_S)


def _read_told(path: Path) -> tuple[dict[str, Any], str | None]:
    told: dict[str, Any] = {}
    stage: str | None = None
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return told, stage
    for line in lines:
        try:
            key, value = json.loads(line)
        except ValueError:  # the line being written when it died
            continue
        if key == "stage":
            stage = value
        else:
            told[key] = value
    return told, stage


def _read_tail(path: Path) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, path.stat().st_size - _TAIL))
            return f.read().decode("utf-8", "replace")
    except OSError:
        return ""


def last_line(output: str) -> str:
    """The last line that says something, scrubbed; empty when there is none."""
    for line in reversed(output.splitlines()):
        text = scrub(line)
        if any(c.isalnum() for c in text):
            return text
    return ""


_ROOT_CAUSE = re.compile(r"see root cause above|failed core proc", re.IGNORECASE)
_EXCEPTION = re.compile(r"\b(?:[A-Za-z_][\w.]*)?(?:Error|Exception): \S")


def _root_cause(error: str, output: str) -> str:
    """vLLM's parent process only says "see root cause above": the last real exception among the printed lines."""
    if not _ROOT_CAUSE.search(error):
        return error
    for line in reversed(output.splitlines()):
        found = _EXCEPTION.search(line)
        if found and not _ROOT_CAUSE.search(line):
            return scrub(line[found.start() :])
    return error


def _judge(
    code: int | None, told: dict[str, Any], stage: str | None, output: str, waited_s: float, seconds: float
) -> Outcome:
    raised = told.pop("raised", None)
    if code is None:
        doing = f" in stage {stage!r}" if stage else ""
        return Outcome("timeout", stage, told, f"no answer within {waited_s:.0f} s{doing}", seconds)
    if raised is not None:
        return Outcome("error", stage, told, _root_cause(scrub(str(raised)), output), seconds)
    if code == 0:
        return Outcome("ok", stage, told, None, seconds)
    said = last_line(output)
    # Windows ends a crashed process with an NTSTATUS, which everybody knows by its hexadecimal form
    how = _signal_name(-code) if code < 0 else f"exit code {code}" if code < 256 else f"exit code 0x{code:08X}"
    return Outcome("crash", stage, told, f"{said} ({how})" if said else how, seconds)


def _signal_name(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
