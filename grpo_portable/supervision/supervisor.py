"""The parent of a run: starts the worker, watches it, reads how it ended, and goes on one rung lower if it must.

vLLM, CUDA and the kernel's out-of-memory killer take whole processes down; only a parent survives to choose. The worker is
started through accelerate also when it is one process, so that several GPUs are a matter of a number: one process each, and
whatever is said of the worker here holds for all of them. Every wait has a limit, measured on the monotonic clock, since the
wall clock may jump.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from doctor.privacy import clean
from doctor.spread import most_sharing
from grpo_portable.errors import GrpoPortableError, Interrupted, RecipeError, RunFolderError, UsageError
from grpo_portable.recipe import Recipe, load
from grpo_portable.run import edited, saved, stops
from grpo_portable.run.folder import RunFolder
from grpo_portable.run.progress import Progress
from grpo_portable.supervision import ladder, ranks_command

START_LIMIT_S = 1200.0  # imports, model load and engine start, before the first heartbeat of a stage
SILENCE_LIMIT_S = 1800.0  # between two heartbeats; one step of a big model on a slow card takes minutes
# what counts of the time between two looks: a batch system that suspends a job stops this process as well
LOOK_LIMIT_S = 5.0
STOP_LIMIT_S = 120.0  # from the wish to stop until the worker has saved and gone
AGAIN_S = 1.0  # a second Ctrl-C this soon is the first one's echo: a shell and a launcher hand on the same
KILL_LIMIT_S = 30.0  # from SIGKILL until the process is gone
LOG_TAIL_BYTES = 20_000
LEAST_ROOM_BYTES = 1 << 20  # below this a worker that could not say why it ended is taken to have filled the disk
WORKER_MODULES = (b"grpo_portable.ranks", b"grpo_portable.worker")  # words of the command of a worker
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # a file system that has none, as clusters' may be mounted
_NAMED = re.compile(r"'([/~][^']*)'$")  # the file at the end of an OSError's words
MAX_STARTS = 40  # without a step or an answer in between
# environment variable, for tests: several ranks on a machine without GPUs
CPU_PROCESSES = "GRPO_PORTABLE_CPU_PROCESSES"


class RunFailed(GrpoPortableError):
    """The run stopped and could not go on; what it made so far is kept."""


@dataclass(frozen=True)
class Limits:
    start_s: float = START_LIMIT_S
    silence_s: float = SILENCE_LIMIT_S
    stop_s: float = STOP_LIMIT_S


def supervise(run: RunFolder, *, fallback: bool = True, limits: Limits | None = None) -> None:
    """Bring the run to its end, down the ladder if need be. Raises what the user must know; the run folder stays resumable.

    The GPUs are those of plan.json, or what the ladder left of them.
    """
    with _stops_are_interrupts(run), alone(run):  # in this order: looking for other workers takes a moment
        edited.take_over(run, made=any(saved.made(run)))
        _climb_down(run, fallback, limits or Limits())


def _climb_down(run: RunFolder, fallback: bool, limits: Limits) -> None:
    answer, recipe = run.read_json("plan.json"), run.recipe()
    rung, first = _rung(recipe, answer, run.rung()), _rung(load(run.recipe_file), answer)
    step_size = recipe.prompts_per_step, recipe.group_size
    idle, retries, before = 0, 0, saved.made(run)
    with Progress(run, run.recipe().steps) as progress:
        while idle < MAX_STARTS:
            run.write_json("rung.json", asdict(rung))
            ending = _one_worker(run, rung, rung.processes, limits, progress)
            if ending.kind == "done":
                return
            now = saved.made(run)
            moved = any(more > then for more, then in zip(now, before, strict=True))
            before = now
            idle, retries = (0, 0) if moved else (idle + 1, retries)
            # asked anew: how large the model is, is known once a worker has loaded it
            rungs = ladder.rungs_from_answer(answer, rung.path, run.read_json("run.json").get("total_parameters"))
            step = ladder.next_step(rung, ending, rungs, retries, first, step_size, recipe.fsdp is True)
            if step.rung is None or not fallback:
                raise _failure(run, ending, step.reason if fallback else "fallbacks are switched off (--no-fallback)")
            before_it, after_it = (ladder.shown(r.path, r.backend) for r in (rung, step.rung))
            kind = "retry" if before_it == after_it else "fallback"
            move = {"from": before_it, "to": after_it, **({"passed": dict(step.passed)} if step.passed else {})}
            run.event(kind, step.reason, error=ending.error, step=saved.steps_done(run), **move)
            progress.say(f"{kind}: {step.reason}")
            retries = retries + 1 if step.rung == rung else 0
            rung = step.rung
    raise RunFailed(
        f"the worker was started {MAX_STARTS} times and got no further", help=f"see {run.path / 'worker.log'}"
    )


def _rung(recipe: Recipe, answer: Mapping[str, Any], changed: Mapping[str, Any] | None = None) -> ladder.Rung:
    """The rung of a recipe on the plan's GPUs, or on those an earlier rung was left with: as many as share a step evenly."""
    if open_ := [key for key in ("path", "micro_batch", "rollout_rows") if getattr(recipe, key) == "auto"]:
        raise RecipeError(
            f"recipe.yaml of this run does not say its {' and '.join(open_)}",
            because="it was edited or cut off; a run's own recipe is complete",
            help="put it back, or begin a new run with it",
        )
    gpus = tuple((changed or {}).get("gpus", _gpus(answer))) if recipe.path != "cpu" else ()
    wanted = len(gpus) or (int(os.environ.get(CPU_PROCESSES, 1)) if recipe.path == "cpu" else 1)
    count = most_sharing(min(wanted, (changed or {}).get("processes", wanted)), recipe.prompts_per_step)
    backend = "plain" if recipe.backend == "auto" else recipe.backend
    rung = ladder.Rung(
        str(recipe.path), int(recipe.micro_batch), int(recipe.rollout_rows), backend, gpus[:count], count
    )
    return ladder.shared(rung, (recipe.prompts_per_step, recipe.group_size))


def _gpus(answer: Mapping[str, Any]) -> tuple[int, ...]:
    """The plan's GPUs; () on a machine with one, and with MIG slices: there is nothing to choose by number."""
    cards = (answer.get("facts") or {}).get("gpus") or []
    if len(cards) < 2 or any(card.get("mig") for card in cards):
        return ()
    return tuple((answer.get("plan") or {}).get("gpus") or ())


def _one_worker(run: RunFolder, rung: ladder.Rung, processes: int, limits: Limits, progress: Progress) -> ladder.Ending:
    torn = (f for f in run.path.glob(".*.part") if f.is_file())  # of processes that were killed while they wrote
    for leftover in (run.path / "failure.json", *run.path.glob("heartbeat*"), *torn):
        leftover.unlink(missing_ok=True)
    log = run.path / "worker.log"
    began = log.stat().st_size if log.exists() else 0
    worker: subprocess.Popen[bytes] | None = None
    try:
        with stops.waiting():  # else one that comes in the moment of the start would leave a worker that nobody knows
            worker = _start(run, rung, processes, log)
        silent = _watch(worker, run, limits, progress)
    except KeyboardInterrupt:
        progress.say(f"stopping: saving takes at most {limits.stop_s:.0f} s; Ctrl-C once more ends the run at once")
        if worker is not None:
            _stop(worker, run, limits.stop_s)
        raise
    finally:
        if worker is not None:
            if worker.poll() is None:
                _stop(worker, run, limits.stop_s)
            _end_groups(worker.pid, *_beating(run))
    _clean_log(log, began)
    failure, tail = run.read_json("failure.json"), _tail(log, began)
    hung, rank = silent is not None, silent or 0
    ending = ladder.classify(
        worker.returncode, failure, tail, replace(run, rank=rank).doing(), hung, processes=processes, silent=rank
    )
    if ending.kind == "done" and (left := saved.missing(run)):
        told = f"the worker ended by itself, without an error, before it was done: {', '.join(left)}"
        ending = replace(ending, kind="crash", error=told)
    if ending.kind not in ("done", "interrupted") and not failure and _room(run) < LEAST_ROOM_BYTES:
        return ladder.Ending("disk", ending.doing, "No space left on device")
    return ending


def _start(run: RunFolder, rung: ladder.Rung, processes: int, log: Path) -> subprocess.Popen[bytes]:
    """A worker in a process group of its own, so that nothing of it outlives it."""
    with log.open("ab") as out:
        return subprocess.Popen(
            worker_command(run, rung, processes),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=ranks_command.environment(rung),
        )


def worker_command(run: RunFolder, rung: ladder.Rung, processes: int) -> list[str]:
    """The command of one worker: accelerate's launch (`ranks.py`) around `grpo_portable.worker`."""
    threads = _threads(run, processes) if rung.path == "cpu" else None
    # whole, since a reward or an engine may change the directory, and `beating` finds the run by it
    return ranks_command.of(rung, ["grpo_portable.worker", str(run.path.resolve())], threads=threads)


def _threads(run: RunFolder, processes: int) -> int:
    """Threads of one process on a CPU: its share of the cores, or what the user set."""
    # the built-in model is too small to share: a second thread only waits for the first
    cores = 1 if run.recipe().model == "embedded" else (os.cpu_count() or 2)
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // processes))


def _watch(worker: subprocess.Popen[bytes], run: RunFolder, limits: Limits, progress: Progress) -> int | None:
    """Wait for the worker; the rank that was silent for too long, None when all ended by themselves."""
    quiet: list[tuple[float, int | None, float]] = [(0.0, None, limits.start_s)] * processes_of(run)
    looked = time.monotonic()
    while worker.poll() is None:
        progress.look()
        now = time.monotonic()
        passed, looked = min(now - looked, LOOK_LIMIT_S), now
        for rank, (silent, before, limit) in enumerate(quiet):
            beat = _mtime(replace(run, rank=rank).heartbeat_file)
            if beat != before:
                quiet[rank] = (0.0, beat, limits.silence_s)
            elif silent + passed > limit:
                return rank
            else:
                quiet[rank] = (silent + passed, before, limit)
        time.sleep(0.1)
    return None


def processes_of(run: RunFolder) -> int:
    """How many processes the current rung has."""
    return run.rung().get("processes", 1)


def _stop(worker: subprocess.Popen[bytes], run: RunFolder, limit_s: float) -> None:
    """Ask the worker to save and go, then end whatever is left.

    The worker itself is asked, every rank of it, not its launcher: that would die at once, and the worker with it in the
    middle of its save.
    """
    ranks = _beating(run)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    if not ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGTERM)
    try:
        worker.wait(limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _end_groups(worker.pid, *ranks)
        try:
            worker.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"process {worker.pid} does not end, even when killed",
                because="it waits inside the kernel, for a driver or a file system that does not answer",
                help=f"put that right, for a GPU by a restart of the machine, then go on with: {_resume(run)}",
            ) from None


def _beating(run: RunFolder) -> list[int]:
    """The processes that wrote the last heartbeats, by rank, without those that are gone."""
    return [pid for rank in run.ranks() if (pid := beating(replace(run, rank=rank))) is not None]


def beating(run: RunFolder) -> int | None:
    """The process that wrote this rank's last heartbeat, None when it is gone or was never there."""
    try:
        pid = run.read_json(run.heartbeat_file.name).get("pid", 0)
        os.kill(pid, 0) if pid > 1 else None
    except (RunFolderError, OverflowError, OSError):
        return None
    return pid if pid > 1 and _works_on(run, pid) else None


def _workers(run: RunFolder) -> list[int]:
    """The run's worker processes: those that beat or, where the machine tells what runs on it, those that have yet to."""
    started = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    # of ranks that beat the launcher is left out: it would not wait for them to save
    return _beating(run) or sorted(pid for pid in started if _starts_worker(run, pid))


def _starts_worker(run: RunFolder, pid: int) -> bool:
    words = _command(pid) or []
    return os.fsencode(run.path.resolve()) in words and any(word in words for word in WORKER_MODULES)


def _works_on(run: RunFolder, pid: int) -> bool:
    """Whether a process is a worker of this run: its number may have gone to another since. True where nothing tells it."""
    words = _command(pid)
    return words is None or os.fsencode(run.path.resolve()) in words


def _command(pid: int) -> list[bytes] | None:
    """The words a process was started with; none when it is gone or may not be asked, None where no machine tells them."""
    if not Path("/proc/self/cmdline").exists():
        return None
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


@contextlib.contextmanager
def alone(run: RunFolder) -> Iterator[None]:
    """Hold the run for this process: whoever writes into its folder beside a worker would mix their files.

    RunFolderError when it is held already, or cannot be read or written.
    """
    with folder_errors(run), _locked(run):
        yield


@contextlib.contextmanager
def _locked(run: RunFolder) -> Iterator[None]:
    with (run.path / "lock").open("ab+", buffering=0) as lock:
        working = _workers(run)
        if holder := _held_by(lock):
            raise RunFolderError(
                f"`{run.path}` is at work already ({holder})", help="wait for it or end it, then use --resume"
            )
        if working:
            raise _works_alone(run, working)
        lock.seek(0)
        if (killed := lock.read(200).decode("utf-8", "replace").strip()).startswith("process "):
            run.event("resume", f"its command ({killed}) was killed: what its worker made and saved after that is kept")
        with contextlib.suppress(OSError):  # who it is helps a reader; the lock is held without it
            lock.truncate(0)
            lock.write(f"process {os.getpid()}\n".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.truncate(0)  # what a killed process leaves tells of it


def _works_alone(run: RunFolder, workers: list[int]) -> RunFolderError:
    """Of a run whose supervisor was killed, while its worker lives on."""
    pids = " ".join(map(str, workers))
    return RunFolderError(
        f"`{run.path}` is at work already (process {pids.replace(' ', ', process ')})",
        because="its command was killed, and its worker goes on by itself and saves",
        help=f"wait for it, or end it with `kill {pids}` (it saves first), then go on with: {_resume(run)}",
    )


def _held_by(lock: BinaryIO) -> str:
    """Who holds a lock, by its own words in the file: a process, or a job of Slurm; "" once it is ours or can be nobody's."""
    try:
        import fcntl
    except ImportError:  # Windows has no flock
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read(200).decode("utf-8", "replace").strip() or "another process"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return ""


@contextlib.contextmanager
def _stops_are_interrupts(run: RunFolder) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM as a batch system sends it, and a closed terminal end the run as Interrupted, saved.

    They often come more than once (a shell and the kernel both tell of a closed terminal), and only the first counts; but a
    user who presses Ctrl-C again is not kept waiting. Under nohup a closed terminal changes nothing.
    """
    came: list[float] = []

    def interrupt(number: int, _: object) -> None:
        came.append(time.monotonic())
        if len(came) == 1 or (number == signal.SIGINT and came[-1] - came[0] > AGAIN_S):
            raise KeyboardInterrupt

    with stops.handled(stops.STOPS, interrupt):
        try:
            yield
        except KeyboardInterrupt:
            _tell(run, "interrupted", "stopped by the user; the run can be resumed")
            raise Interrupted("the run was interrupted and saved", help=f"go on with: {_resume(run)}") from None


@contextlib.contextmanager
def folder_errors(run: RunFolder) -> Iterator[None]:
    """Inside, what cannot be read or written of the run becomes a RunFolderError with the way on."""
    try:
        yield
    except OSError as error:
        if not run.path.is_dir():
            raise RunFolderError(
                f"run folder `{run.path}` is gone",
                because="it was removed or renamed while the run was at work",
                help="where it was renamed, go on with: grpo-portable train --resume --out NEW; else begin the run again",
            ) from error
        raise RunFolderError(
            f"run folder `{run.path}` cannot be used",
            because=error.strerror or str(error),
            help=f"nothing is lost; make it writable and free space, then go on with: {_resume(run)}",
        ) from error


def _end_groups(*pids: int) -> None:
    """No orphan may keep a card: whatever is left of the worker's process group is killed, and of its ranks' own groups."""
    for pid in pids:
        _end_group(pid)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _failure(run: RunFolder, ending: ladder.Ending, why: str) -> GrpoPortableError:
    written, go_on = run.read_json("failure.json"), f"go on with: {_resume(run)}"
    _tell(run, "stopped", why, error=ending.error)
    if ending.kind == "user":
        return UsageError(ending.error, because=written.get("because"), help=written.get("help"))
    if ending.kind == "interrupted":
        return Interrupted("the run was interrupted and saved", help=go_on)
    if ending.kind == "disk":
        fact, remedy = _of_disk(run, ending.error)
        kept = f"what was made up to step {saved.steps_done(run)} is kept"
        return RunFailed(fact, because=ending.error, help=f"{remedy} ({kept}), then {go_on}")
    help_ = written.get("help") or f"the worker's log: {run.path / 'worker.log'}; {go_on}"
    return RunFailed(ending.error, because=written.get("because") or why, help=help_)


def _of_disk(run: RunFolder, error: str) -> tuple[str, str]:
    """What could not be written where, by a library's words for it, and what to do."""
    named = _NAMED.search(error)
    place = Path(named[1]).parent if named else run.path
    if re.search(r"quota|Errno 122\b", error, re.I):
        return f"the disk quota of `{place}` is used up", "free space"
    if re.search(r"too large|Errno 27\b", error, re.I):
        return f"a file in `{place}` may not be as large as it has to be", "raise the limit on it (ulimit -f)"
    if ladder.DISK.search(error):
        return f"the disk of `{place}` is full", "free space"
    return f"`{place}` cannot be written", "make it writable"


def _tell(run: RunFolder, kind: str, message: str, **more: str) -> None:
    """An event, unless it cannot be written: the disk may be what failed."""
    with contextlib.suppress(OSError):
        run.event(kind, message, step=saved.steps_done(run), **more)


def _resume(run: RunFolder) -> str:
    with contextlib.suppress(GrpoPortableError):
        if not run.trains():
            return f"grpo-portable eval --resume --out {run.word}"
    return f"grpo-portable train --resume --out {run.word}"


def _room(run: RunFolder) -> int:
    """Bytes that may still be written into the run folder."""
    return shutil.disk_usage(run.path).free


def _clean_log(log: Path, began: int) -> None:
    """Take what is private (home folder, tokens) out of what a worker printed; nobody writes there any more."""
    with contextlib.suppress(OSError), log.open("r+b") as file:
        file.seek(began)
        printed = file.read()
        cleaned = clean(printed.decode("utf-8", "replace")).encode("utf-8")
        if cleaned != printed:
            file.seek(began)
            file.write(cleaned)
            file.truncate()


def _mtime(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _tail(log: Path, began: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(began, size - LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
