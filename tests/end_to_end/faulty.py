"""For tests only: the real supervisor over real workers, with a fault put into a worker before it begins.

A worker is forked from the test's process, which has torch in memory already, so that one starts in no time; between it and
the supervisor stands what accelerate's launcher is in a real run, a process that exits with 1 whatever happened below it. A
card is stood in for by the CPU: every path computes in float32, and vLLM is the stand-in of `standin_vllm`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import standin_vllm
import tiny

from grpo_portable import engines, session, worker
from grpo_portable.errors import GrpoPortableError
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import vllm
from grpo_portable.run import folder as run
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.supervision import ladder, ranks_command, supervisor

HERE = Path(__file__).parent
CLOCK = ("seconds", "step_s", "rollout_s", "update_s", "tokens_per_s", "memory_gib")
NO_FAULT = "-"
RUNGS = ("bf16-vllm", "bf16-hf", "cpu")
LIMITS = supervisor.Limits(start_s=60, silence_s=60, stop_s=20)

PutIn = Callable[[Path], None]


def recipe(inputs: Path, **changes: Any) -> Recipe:
    small: dict[str, Any] = {
        "model": str(inputs / "model"),
        "data": str(inputs / "sums"),
        "eval_data": str(inputs / "sums"),
        "path": "cpu",
        "prompt_template": "{question}\n",
        "steps": 4,
        "prompts_per_step": 2,
        "group_size": 4,
        "micro_batch": 4,
        "rollout_rows": 8,
        "max_completion_tokens": 8,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "lora_rank": 4,
        "optimizer": "adamw",
        "gradient_checkpointing": False,
        "save_every": 2,
        "rewards": ("tiny:digits",),
        "seed": 11,
    }
    return replace(Recipe(), **{**small, **changes})


def new_run(folder: Path, made: Recipe) -> RunFolder:
    """A run folder as the command line leaves it, on a machine where the three paths of RUNGS are open."""
    created = run.create(folder, made)
    created.write_json("plan.json", {"paths": {path: {"open": True, "fits": True} for path in RUNGS}})
    return created


def on_the_cpu() -> None:
    """In a worker: no card is needed for any path."""
    import torch

    def settings(path: str, *, bfloat16: bool, backend: str = "plain") -> engines.PathSettings:
        own = engines.path_settings(path, bfloat16=bfloat16, backend=backend)
        return replace(own, dtype="float32", quantization=None)

    session._device = lambda recipe: torch.device("cpu")
    session.path_settings = settings
    standin_vllm.install(pytest.MonkeyPatch())
    vllm._card = lambda: (60.0, 80.0)


class Forked:
    """What the supervisor sees of a worker: the launcher's process."""

    def __init__(self, folder: Path, rung: ladder.Rung, log: Path, put_in: PutIn) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _launcher(folder, rung, log, put_in)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.01)
        return int(self.returncode or 0)


def _launcher(folder: Path, rung: ladder.Rung, log: Path, put_in: PutIn) -> None:
    os.setsid()
    faulthandler.disable()  # pytest's, which would print every thread of a worker that is ended by SIGSEGV
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            os.environ.update(ranks_command.environment(rung))
            on_the_cpu()
            put_in(folder)
            code = worker.main([str(folder)])
        except BaseException:
            traceback.print_exc()  # the fault itself is faulty
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:  # as subprocess.CalledProcessError puts it
        how = f"died with {signal.Signals(-code)!r}" if code < 0 else f"returned non-zero exit status {code}"
        with contextlib.suppress(OSError):
            os.write(2, f"subprocess.CalledProcessError: Command '['python', '-m', 'worker']' {how}.\n".encode())
    os._exit(1 if code else 0)


@dataclass
class Watched:
    """What happened in a run: how each of its workers ended, and what the user was told in the end (None: it was done)."""

    run: RunFolder
    endings: list[ladder.Ending] = field(default_factory=list)
    told: GrpoPortableError | None = None

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.run.events_file) if e["kind"] in kinds]

    def events_of_all(self) -> list[dict[str, Any]]:
        return list(read_lines(self.run.events_file))

    @property
    def log(self) -> str:
        return (self.run.path / "worker.log").read_text(encoding="utf-8", errors="replace")

    @property
    def steps_made_again(self) -> int:
        """Counted in what the workers printed: every finished step has its line there."""
        steps = Counter(int(step) for step in re.findall(r"^step (\d+)/", self.log, re.M))
        return sum(count - 1 for count in steps.values())


def supervised(
    made: RunFolder,
    put_in: PutIn | None = None,
    *,
    every_time: bool = False,
    limits: supervisor.Limits = LIMITS,
    watched: Watched | None = None,
    launched: str | None = None,
    **options: Any,
) -> Watched:
    """Bring a run to its end under the real supervisor; the fault is in its first worker only, or in every one.

    `launched`: the fault's name, for workers that accelerate launches instead of ones that are forked.
    """
    seen = watched or Watched(made)
    one_worker, start_it, command, starts = supervisor._one_worker, supervisor._start, supervisor.worker_command, [0]
    seen.told = None

    def start(made: RunFolder, rung: ladder.Rung, processes: int, log: Path) -> Any:
        starts[0] += 1
        faulty = put_in is not None and (every_time or starts[0] == 1)
        if launched is not None:
            *launch, _, folder = command(made, rung, processes)
            words = [*launch, "faulty_worker", folder, launched if faulty else NO_FAULT]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(supervisor, "worker_command", lambda *_: words)
                patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1]))))
                return start_it(made, rung, processes, log)
        return Forked(made.path, rung, log, put_in if faulty and put_in else lambda folder: None)

    def noted(*arguments: Any) -> ladder.Ending:
        seen.endings.append(one_worker(*arguments))
        return seen.endings[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "_start", start)
        patch.setattr(supervisor, "beating", beating)
        patch.setattr(supervisor, "_one_worker", noted)
        try:
            supervisor.supervise(made, limits=limits, **options)
        except GrpoPortableError as error:
            seen.told = error
    return seen


def beating(made: RunFolder) -> int | None:
    """The worker that is at work: a forked one has the test's command line, by which the supervisor would not know it."""
    with contextlib.suppress(OSError):
        pid = int(made.read_json("heartbeat").get("pid") or 0)
        return pid if pid and Path(f"/proc/{pid}/cmdline").read_bytes() else None  # empty: dead, and not yet waited for
    return None


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what the clock and the machine say."""
    return [{k: v for k, v in m.items() if k not in CLOCK} for m in read_lines(folder / "metrics.jsonl")]


def adapter_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def outcome(made: RunFolder) -> dict[str, Any]:
    """What must not depend on what happened on the way, when the path stayed the same."""
    files = sorted((made.path / "generations").glob("*.jsonl"))
    return {
        "adapter": adapter_hash(made.path),
        "metrics": metrics(made.path),
        "generations": {f.name: list(read_lines(f)) for f in files},
    }


def lost(made: RunFolder) -> list[str]:
    """What of a finished run is not there, or there twice, or no number: [] when nothing was lost."""
    from safetensors.torch import load_file

    recipe, found = made.recipe(), []
    steps = [m["step"] for m in read_lines(made.metrics_file)]
    if steps != list(range(1, recipe.steps + 1)):
        found.append(f"steps {steps}")
    stages = ["base", *(["bootstrap"] if recipe.bootstrap_epochs else []), "tuned"]
    for stage in stages:
        ids = [g["id"] for g in read_lines(made.generations(stage))]
        if ids != [f"test-{i}" for i in range(1, 9)]:
            found.append(f"answers of {stage}: {ids}")
    adapter = load_file(made.adapter / "adapter_model.safetensors")
    found += [f"{name} is not finite" for name, w in adapter.items() if not bool(w.isfinite().all())]
    if (made.path / "failure.json").exists():
        found.append("a failure is left")
    found += [f.name for f in made.path.glob(".*.part")]
    for file in ("run.json", "rung.json", "recipe.yaml"):
        if not (made.path / file).stat().st_size:
            found.append(f"{file} is empty")
    json.loads((made.path / "run.json").read_text())
    return found


# --- ways to put a fault in


def at_call(owner: Any, name: str, number: int, do: Callable[..., None], every: bool = False) -> None:
    """`do(*arguments)` as the `number`-th call of a function begins (with `every`, and at each one after it)."""
    original, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number or (every and calls[0] > number):
            do(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, counted)


def throw(error: BaseException) -> Callable[..., None]:
    def thrown(*_: Any, **__: Any) -> None:
        raise error

    return thrown


def kill(number: int = signal.SIGKILL) -> Callable[..., None]:
    return lambda *_, **__: os.kill(os.getpid(), number)


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """The function's result goes through `change`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **o: change(original(*a, **o)))


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[None]:
    """A file system of its own on `folder`; skips where mounting is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, timeout=20
    )
    if mounted.returncode:
        pytest.skip("a file system may not be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=20)


def obey_permissions() -> None:
    """In a worker: permissions count for root as well (the kernel lets root write anywhere by a capability)."""
    import ctypes

    if os.geteuid() != 0:
        return
    override, search = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for index in (0, 1):  # effective and permitted
        data[index] &= ~((1 << override) | (1 << search))
    assert libc.capset(header, data) == 0


@contextlib.contextmanager
def supervising(made: RunFolder, put_in: PutIn | None = None, *, steps: int = 2, **options: Any) -> Iterator[int]:
    """A supervisor in a process of its own; its number, once the run has made `steps` steps. It is waited for at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            supervised(made, put_in, **options)
        finally:
            os._exit(0)
    try:
        end = time.monotonic() + 60
        while sum(1 for _ in read_lines(made.metrics_file)) < steps and time.monotonic() < end:
            time.sleep(0.005)
        yield pid
    finally:
        os.waitpid(pid, 0)


def until_free(made: RunFolder) -> None:
    """Wait until no process holds the run folder."""
    import fcntl

    with (made.path / "lock").open("a") as lock:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if beating(made) is None:
                    return
            assert time.monotonic() < end, "the run folder is held for ever"
            time.sleep(0.02)


class Hub:
    """A model hub on this machine that serves one folder as every model; `GET /quit` ends it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(b"")

            def do_GET(self) -> None:
                self.answer(None)

            def answer(self, body: bytes | None) -> None:
                place = self.path.partition("?")[0]
                file = folder / place.rpartition("/")[2]
                found = "/resolve/" in place and file.is_file()
                content = file.read_bytes() if found else b""
                headers = {"X-Repo-Commit": "0" * 40, "Content-Length": str(len(content))}
                headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'} if found else {}
                headers |= {} if found else {"X-Error-Code": "EntryNotFound"}
                self.send_response(200 if found else 404)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content if body is None else body)
                if place == "/quit":
                    hub.close()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.socket.close()
        threading.Thread(target=self.server.shutdown, daemon=True).start()


def ask_hub(address: str, cache: Path) -> None:
    """In a worker: models come from the hub at this address; a hub that is gone is asked again without waiting."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = address, str(cache), False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
    _http.time = types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)  # type: ignore[assignment]
    huggingface_hub.close_session()


# --- rewards


def same(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def one_is_nan(completions: list[str], **_: Any) -> list[float]:
    return [float("nan"), *tiny.digits(completions)[1:]]
