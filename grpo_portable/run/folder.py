"""The run folder: the one place where the stages of a run meet. Every stage reads files and writes files.

    recipe.yaml   complete, no `auto` left        run.json    what ran: model, data, versions, seeds, stages, seconds
    facts.json    the machine                     plan.json   the doctor's answer, and the rungs left below it
    metrics.jsonl one line an optimizer step      events.jsonl  faults, retries, fallbacks, skipped rows
    generations/  base.jsonl, bootstrap.jsonl, tuned.jsonl (+ base-sampled.jsonl, tuned-sampled.jsonl)
    scores.json   report.md   charts/             adapter/    checkpoints/step-000010/
    rung.json     what the ladder changed (path, micro_batch, rollout_rows, backend, gpus)
    failure.json  how the last worker failed        worker.log  what it printed
    heartbeat     the time of the worker's last sign of life, and what it does; heartbeat-1, ... of further ranks

JSON files are replaced atomically; JSONL files are appended line by line, and a torn line is passed over when read. What is
read is held to its form (`forms.py`).
Torch-free. Nothing private is written: no host or user name, no environment values.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shlex
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from doctor.privacy import clean
from grpo_portable.errors import RunFolderError
from grpo_portable.recipe import Recipe, load, to_yaml
from grpo_portable.run.forms import FILES, RECIPE_VALUES, form_of, read
from grpo_portable.supervision.phase import Doing, Phase

SCHEMA = 1
RUNS = Path("runs")  # where a run is made that was given no folder
REMADE = ("run.json", "rung.json", "plan.json", "facts.json", "failure.json", "heartbeat")  # no result depends on them
PLACES = ("model", "data", "eval_data", "bootstrap_data", "vllm_adapters")  # fields of a recipe that may be paths


@dataclass(frozen=True)
class RunFolder:
    """`rank`: of the process that uses it, where a run has several. Only the first tells and writes, beside signs of life
    and its own failure.
    """

    path: Path
    rank: int = 0

    @property
    def word(self) -> str:
        """The folder as one word of a command that a reader can paste."""
        return shlex.quote(str(self.path))

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def bootstrap_checkpoints(self) -> Path:
        """There only until the bootstrap is done."""
        return self.path / "bootstrap-checkpoints"

    @property
    def bootstrapped(self) -> Path:
        """The adapter as the bootstrap left it."""
        return self.path / "bootstrap"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def heartbeat_file(self) -> Path:
        return self.path / ("heartbeat" if self.rank == 0 else f"heartbeat-{self.rank}")

    def ranks(self) -> list[int]:
        """The ranks of the processes that have given a sign of life."""
        names = (file.name.removeprefix("heartbeat") for file in self.path.glob("heartbeat*"))
        return sorted(int(number or 0) for name in names if (number := name.removeprefix("-")).isdecimal() or not name)

    def generations(self, stage: str) -> Path:
        """File of the answers of one stage: base, bootstrap, tuned, base-sampled, tuned-sampled."""
        return self.path / "generations" / f"{stage}.jsonl"

    def recipe(self) -> Recipe:
        """What runs now: the settled recipe, with what the current rung of the ladder changed."""
        of_recipe = {k: v for k, v in self.rung().items() if k not in ("gpus", "processes")}
        return replace(load(self.recipe_file), **of_recipe)

    def rung(self) -> dict[str, Any]:
        """What rung.json holds, {} when the run has not begun."""
        return {key: value for key, value in self.read_json("rung.json").items() if key in FILES["rung.json"]}

    def trains(self) -> bool:
        """Whether it is a training; else it only evaluates."""
        return self.read_json("task.json").get("only") != "evaluate"

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file of the run, {} when it is not there yet. RunFolderError when it cannot be read, or is
        not of its form.
        """
        file = self.path / name
        try:
            return read(file.read_bytes(), form_of(file)) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise self.unreadable(name, str(error)) from error

    def unreadable(self, name: str, because: str) -> RunFolderError:
        """This program replaces its files whole, so what cannot be read was damaged by something else."""
        go_on = "put it back, or remove it and use --resume: answers, steps and adapter do not depend on it"
        return RunFolderError(
            f"`{name}` in run `{self.path}` cannot be read",
            because=because,
            help=go_on if name in REMADE else "put it back as it was",
        )

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def update_json(self, name: str, **values: Any) -> None:
        self.write_json(name, {**self.read_json(name), **values})

    def settle(self, **values: Any) -> None:
        """Write values that the data settled into the run's recipe, so that it is complete; its header stays."""
        lines = self.recipe_file.read_text(encoding="utf-8").splitlines()
        header = "\n".join(
            line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)
        )
        write_atomically(self.recipe_file, to_yaml(replace(load(self.recipe_file), **values), header))
        if known := self.read_json("run.json").get(RECIPE_VALUES):
            self.update_json("run.json", **{RECIPE_VALUES: {**known, **values}})

    def event(self, kind: str, message: str, **more: Any) -> None:
        """Append an event: kind (fallback, retry, nonfinite, reward, data, engine, resume, saved ...), a sentence, details."""
        if self.rank != 0:
            return
        told = {"message": message, **more}
        told = {key: clean(value) if isinstance(value, str) else value for key, value in told.items()}
        append_line(self.events_file, {"time": round(time.time(), 3), "kind": kind, **told})

    def heartbeat(self, phase: Phase, doing: str, **more: Any) -> None:
        """Tell the supervisor that the worker is alive and what it is doing; of an evaluation its `stage` and the `total` of
        its answers as well.
        """
        beat = {"time": time.time(), **Doing(phase, clean(doing)).record(), "pid": os.getpid(), **more}
        write_atomically(self.heartbeat_file, json.dumps(beat), sync=False)

    def doing(self) -> Doing:
        """What this rank's last heartbeat says; nothing known when it cannot be read."""
        with contextlib.suppress(RunFolderError, OSError):
            return Doing.told(self.read_json(self.heartbeat_file.name))
        return Doing()

    def beat(self) -> None:
        """Renew the last heartbeat: the worker still does what it said."""
        with contextlib.suppress(OSError):
            os.utime(self.heartbeat_file)


def create(path: Path, recipe: Recipe, header: str = "") -> RunFolder:
    """A new run folder with its recipe; RunFolderError if the folder holds a run or cannot be written.

    Places below the home folder are written with `~`: a run's files name no user.
    """
    places: dict[str, Any] = {key: shortened(str(getattr(recipe, key))) for key in PLACES}
    recipe = replace(recipe, **places)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_new(path / "recipe.yaml", to_yaml(recipe, header))
        (path / "generations").mkdir(exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and (path / "recipe.yaml").exists():
            raise _taken(path) from None
        raise _unwritable(path, error.strerror or str(error)) from error
    return RunFolder(path)


def may_create(path: Path) -> None:
    """Raise what `create` would be refused for, as far as names and permissions tell; writes nothing."""
    try:
        if (path / "recipe.yaml").exists():
            raise _taken(path)
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:  # below a folder that may not be entered
        raise _unwritable(path, error.strerror or str(error)) from error
    if not there.is_dir():
        raise _unwritable(path, os.strerror(errno.EEXIST if there == path else errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(path, os.strerror(errno.EROFS if _read_only(there) else errno.EACCES))


def _read_only(folder: Path) -> bool:
    return hasattr(os, "statvfs") and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _taken(path: Path) -> RunFolderError:
    return RunFolderError(f"`{path}` already holds a run", help="continue it with --resume, or choose another --out")


def _unwritable(path: Path, because: str) -> RunFolderError:
    return RunFolderError(f"`{path}` cannot be written", because=because, help="choose another --out")


def shortened(place: str) -> str:
    """A path below the home folder with `~` in its place; any other text as it is."""
    home = os.path.expanduser("~")
    return "~" + place[len(home) :] if len(home) > 1 and place.startswith(home + os.sep) else place


def open_run(path: Path, rank: int = 0) -> RunFolder:
    """An existing run folder; RunFolderError if there is none."""
    if not (path / "recipe.yaml").is_file():
        raise RunFolderError(
            f"`{path}` holds no run",
            because="there is no recipe.yaml in it" if path.exists() else "there is no such folder",
            help="name a run's own folder; runs lie in runs/ unless --out put them elsewhere",
        )
    return RunFolder(path, rank)


def write_atomically(file: Path, text: str, *, sync: bool = True) -> None:
    """Replace `file` in one step: a reader or a crash sees the old text or the new one, never a part."""
    with replacing(file) as part, part.open("w", encoding="utf-8", errors="backslashreplace") as out:
        out.write(text)
        out.flush()
        if sync:
            os.fsync(out.fileno())


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Inside, a hidden file to be written, which takes the place of `file` afterwards. An OSError names `file`: no user knows
    the other.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)  # on a full disk it would keep the room that is missing
        if error.filename is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def usual_modes(folder: Path) -> None:
    """Give the files of `folder` the mode that any file written there has: safetensors keeps its own for their owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    with contextlib.suppress(OSError):  # a file system without modes
        for file in folder.iterdir():
            if file.is_file():
                file.chmod(mode)


def _write_new(file: Path, text: str) -> None:
    """Write a file that must not be there yet, of several processes at once by one alone. FileExistsError to the others."""
    with file.open("x", encoding="utf-8", errors="backslashreplace") as out:
        try:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        except OSError:
            file.unlink(missing_ok=True)  # on a full disk: a part of it would pass for a run
            raise


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line; it is whole on disk before this returns. A torn line left by a crash is closed first."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with file.open("ab+") as out:
        if out.tell() > 0:
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                line = "\n" + line
        out.write(line.encode("utf-8", "backslashreplace"))  # half a surrogate pair becomes its JSON escape
        out.flush()


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file, in order; nothing when the file is not there. Torn lines, and records that are not of
    their form, are passed over.

    A published run keeps its answers compressed: where there is no `file`, `file`.gz is read. RunFolderError for a torn one,
    of which no crash of a run is the cause.
    """
    packed = file.with_name(file.name + ".gz")
    if not file.exists() and not packed.exists():
        return
    try:
        with file.open("rb") if file.exists() else gzip.open(packed, "rb") as lines:
            yield from records(lines, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RunFolderError(f"`{packed}` cannot be read", because=str(error), help="put it back as it was") from error


def records(lines: Iterable[bytes], file: Path) -> Iterator[dict[str, Any]]:
    """Those of the lines of `file` that are whole records of their form."""
    form = form_of(file)
    for line in lines:
        with contextlib.suppress(ValueError):
            yield read(line, form)
