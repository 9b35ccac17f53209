"""The parent of a run: starts the worker, watches it, reads how it ended, and goes on one rung lower if it must.

vLLM, CUDA and the kernel's out-of-memory killer take whole processes down; only a parent survives to choose. The worker is
started through accelerate also when it is one process, so that several GPUs are a matter of a number. Every wait has a limit,
measured on the monotonic clock, since the wall clock may jump.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_portable import ladder
from grpo_portable.errors import GrpoPortableError, Interrupted, RunFolderError, UsageError
from grpo_portable.progress import Progress
from grpo_portable.run import RunFolder, read_lines

START_LIMIT_S = 1200.0  # imports, model load and engine start, before the first heartbeat of a stage
SILENCE_LIMIT_S = 1800.0  # between two heartbeats; one step of a big model on a slow card takes minutes
STOP_LIMIT_S = 120.0  # from the wish to stop until the worker has saved and gone
LOG_TAIL_BYTES = 20_000
MAX_STARTS = 24


class RunFailed(GrpoPortableError):
    """The run stopped and could not go on; what it made so far is kept."""


@dataclass(frozen=True)
class Limits:
    start_s: float = START_LIMIT_S
    silence_s: float = SILENCE_LIMIT_S
    stop_s: float = STOP_LIMIT_S


def supervise(run: RunFolder, *, fallback: bool = True, processes: int = 1, limits: Limits | None = None) -> None:
    """Bring the run to its end, down the ladder if need be. Raises what the user must know; the run folder stays resumable."""
    with _alone(run), _terminated_is_interrupted():
        _climb_down(run, fallback, processes, limits or Limits())


def _climb_down(run: RunFolder, fallback: bool, processes: int, limits: Limits) -> None:
    recipe, answer = run.recipe(), run.read_json("plan.json")
    rung = ladder.Rung(str(recipe.path), int(recipe.micro_batch), int(recipe.rollout_rows))
    rungs = ladder.rungs_from_answer(answer, rung.path, run.read_json("run.json").get("total_parameters"))
    retries, steps_before = 0, -1
    with Progress(run, recipe.steps) as progress:
        for _ in range(MAX_STARTS):
            run.write_json("rung.json", asdict(rung))
            ending = _one_worker(run, rung, processes, limits, progress)
            if ending.kind == "done":
                return
            steps_done = _steps_done(run)
            retries = 0 if steps_done > steps_before else retries + 1
            steps_before = steps_done
            rungs = rungs or ladder.rungs_from_answer(
                answer, rung.path, run.read_json("run.json").get("total_parameters")
            )
            step = ladder.next_step(rung, ending, rungs, recipe.group_size, retries)
            if step.rung is None or not fallback:
                raise _failure(run, ending, step.reason if fallback else "fallbacks are switched off (--no-fallback)")
            kind = "retry" if step.rung.path == rung.path else "fallback"
            run.event(
                kind, step.reason, error=ending.error, step=steps_done, **{"from": rung.path, "to": step.rung.path}
            )
            progress.say(f"{kind}: {step.reason}")
            rung = step.rung
    raise RunFailed(
        f"the worker was started {MAX_STARTS} times and never finished", help=f"see {run.path / 'worker.log'}"
    )


def _one_worker(run: RunFolder, rung: ladder.Rung, processes: int, limits: Limits, progress: Progress) -> ladder.Ending:
    for leftover in ("failure.json", "heartbeat"):
        (run.path / leftover).unlink(missing_ok=True)
    log = run.path / "worker.log"
    began = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        worker = subprocess.Popen(
            worker_command(run, rung, processes),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=worker_environment(rung),
        )
    try:
        hung = _watch(worker, run, limits, progress)
    except KeyboardInterrupt:
        _stop(worker, run, limits.stop_s)
        run.event("interrupted", "stopped by the user; the run can be resumed", step=_steps_done(run))
        raise Interrupted(
            "the run was interrupted and saved", help=f"go on with: grpo-portable train --resume --out {run.path}"
        ) from None
    finally:
        if worker.poll() is None:
            _stop(worker, run, limits.stop_s)
        _end_group(worker.pid)
    tail = _tail(log, began)
    return ladder.classify(worker.returncode, run.read_json("failure.json"), tail, _doing(run), hung)


def worker_command(run: RunFolder, rung: ladder.Rung, processes: int) -> list[str]:
    """The command of one worker: accelerate's launcher around `grpo_portable.worker`."""
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    if rung.path == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 2) // processes)
        launch += ["--cpu", "--num_cpu_threads_per_process", str(threads)]
    return [*launch, "-m", "grpo_portable.worker", str(run.path)]


def worker_environment(rung: ladder.Rung) -> dict[str, str]:
    """This process's environment with what a worker needs; settings the user made are kept."""
    wanted = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true" if rung.path == "cpu" else "false",
        "PYTORCH_CUDA_ALLOC_CONF": "" if rung.path.endswith("-vllm") else "expandable_segments:True",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    return {**{k: v for k, v in wanted.items() if v}, **os.environ}


def _watch(worker: subprocess.Popen[bytes], run: RunFolder, limits: Limits, progress: Progress) -> bool:
    """Wait for the worker; True when it was silent for too long."""
    last_sign, last_beat, limit = time.monotonic(), None, limits.start_s
    while worker.poll() is None:
        beat = _mtime(run.heartbeat_file)
        if beat != last_beat:
            last_beat, last_sign, limit = beat, time.monotonic(), limits.silence_s
        progress.look()
        if time.monotonic() - last_sign > limit:
            return True
        time.sleep(0.1)
    return False


def _stop(worker: subprocess.Popen[bytes], run: RunFolder, limit_s: float) -> None:
    """Ask the worker to save and go, then end whatever is left.

    The worker itself is asked, not its launcher: that would die at once, and the worker with it in the middle of its save.
    """
    pid = _beating(run)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(worker.pid, signal.SIGTERM)
    try:
        worker.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end_group(worker.pid)
        worker.wait()


def _beating(run: RunFolder) -> int | None:
    """The process that wrote the last heartbeat, None when it is gone or was never there."""
    try:
        pid = int(run.read_json("heartbeat").get("pid") or 0)
        os.kill(pid, 0) if pid > 1 else None
    except (GrpoPortableError, ValueError, OSError):
        return None
    command = Path(f"/proc/{pid}/cmdline")
    try:  # a number may have gone to another process since
        ours = b"worker" in command.read_bytes() if command.exists() else True
    except OSError:
        return None
    return pid if pid > 1 and ours else None


@contextlib.contextmanager
def _alone(run: RunFolder) -> Iterator[None]:
    """Hold the run for this process: two workers in one folder would mix their files."""
    lock = (run.path / "lock").open("w")
    try:
        with contextlib.suppress(ImportError):  # Windows has no flock
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pid = _beating(run)
        if pid is not None:  # its supervisor was killed; it works on and saves
            raise BlockingIOError(f"process {pid}")
    except BlockingIOError as error:
        lock.close()
        raise RunFolderError(
            f"`{run.path}` is at work already" + (f" ({error})" if "process" in str(error) else ""),
            help="wait for it or end it, then use --resume",
        ) from None
    try:
        yield
    finally:
        lock.close()


@contextlib.contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """A SIGTERM, as a batch system sends it, is treated as Ctrl-C: save, say how to go on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_group(pid: int) -> None:
    """No orphan may keep the card: whatever is left of the worker's process group is killed."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _failure(run: RunFolder, ending: ladder.Ending, why: str) -> GrpoPortableError:
    written = run.read_json("failure.json")
    help_ = written.get("help") or f"the worker's log: {run.path / 'worker.log'}; go on with --resume --out {run.path}"
    run.event("stopped", why, error=ending.error, step=_steps_done(run))
    if ending.kind == "user":
        return UsageError(ending.error, because=written.get("because"), help=written.get("help"))
    if ending.kind == "interrupted":
        return Interrupted(
            "the run was interrupted and saved", help=f"go on with: grpo-portable train --resume --out {run.path}"
        )
    return RunFailed(ending.error, because=written.get("because") or why, help=help_)


def _steps_done(run: RunFolder) -> int:
    return max((int(m.get("step") or 0) for m in read_lines(run.metrics_file)), default=0)


def _doing(run: RunFolder) -> str:
    try:
        return str(run.read_json("heartbeat").get("doing") or "")
    except GrpoPortableError:
        return ""


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
