"""Shows a run while it goes on, from its files alone: a live display on a terminal, plain lines elsewhere.

Reads metrics.jsonl, events.jsonl, the heartbeat that the worker writes, and the answers of a stage once it is over; knows
nothing of processes.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from grpo_portable.errors import RunFolderError, wrapped
from grpo_portable.run.folder import RunFolder, read_lines, records
from grpo_portable.scores.verdict import percent
from grpo_portable.supervision.phase import OF_A_STEP, Doing

QUIET_S = 10.0  # between two plain lines that differ in numbers alone


def summary(metrics: dict[str, Any], steps: int) -> str:
    """One line about one step: `step 12/150  reward 0.81  840 tok/s  1.2 GiB  3m 05s left`."""
    step = int(metrics.get("step") or 0)
    parts = [f"step {step}/{steps}"]
    if metrics.get("reward") is not None:
        parts.append(f"reward {metrics['reward']:.3f}")
    if metrics.get("tokens_per_s") is not None:
        parts.append(f"{metrics['tokens_per_s']:.0f} tok/s")
    if metrics.get("memory_gib") is not None:
        parts.append(f"{metrics['memory_gib']:.1f} GiB")
    if step and metrics.get("seconds") is not None and step < steps:
        parts.append(f"{duration(metrics['seconds'] / step * (steps - step))} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`45s`, `3m 05s`, `2h 10m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


class Progress:
    """Follows one run folder; call `look` as often as you like, it reads only what is new."""

    def __init__(self, run: RunFolder, steps: int, out: TextIO | None = None) -> None:
        self.run, self.steps, self.out = run, steps, out or sys.stderr
        self._metrics, self._events = _Tail(run.metrics_file), _Tail(run.events_file)
        made = list(read_lines(run.metrics_file))
        self._kept = 0  # the step of the checkpoint that was gone on from
        self._beat: dict[str, Any] = {}
        self._last = made[-1] if made else {}
        self._began, self._line, self._told = time.monotonic(), "", 0.0
        self._live: Any = None
        self._mute = False

    def __enter__(self) -> Progress:
        if self.out.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(self._panel(), console=Console(file=self.out), refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.look()
        self._tell_score({})
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.__exit__(kind, error, trace)

    def look(self) -> None:
        """Show what is new: rows that were left out, where it goes on, steps that were made, and what the worker does now."""
        beat = self._heartbeat()  # first: what was made before the beat is among the new
        for event in self._events.new():
            if event.get("kind") == "data":  # of other kinds the supervisor or the report tells
                self.say("\n".join(wrapped(f"note: {event.get('message')}", "  ")))
            if event.get("kind") == "resume" and event.get("step"):
                self.say(f"{event.get('message')}")
                self._kept = event["step"]
        for metrics in self._metrics.new():
            self._last = metrics
            if not (self._metrics.again and metrics["step"] <= self._kept):
                self._say(summary(metrics, self.steps))
        now = Doing.told(beat)
        if now.words and now.words != Doing.told(self._beat).words:
            self._tell_score(beat)
            self._beat = beat
            if self._is_news(now):
                self._say(now.words)
        if self._live is not None:
            self._show(lambda: self._live.update(self._panel()))

    def _tell_score(self, now: dict[str, Any]) -> None:
        """Say what the evaluation before `now` found, once it is over: `base: 148 of 300 answers are right (49.3 %)`."""
        stage, total = self._beat.get("stage"), self._beat.get("total")
        if stage is None or now.get("stage") == stage:
            return
        right = [bool(answer.get("correct")) for answer in read_lines(self.run.generations(stage))]
        if len(right) >= max(1, total or 0):  # else the worker was stopped in it
            share = percent(sum(right) / len(right))
            self.say(f"{stage}: {sum(right):,} of {len(right):,} answers are right ({share})")

    def _is_news(self, now: Doing) -> bool:
        """Steps have their own lines; of what only counts up, a line every few seconds is enough."""
        line, counts = re.sub(r"\d+", "", now.words), bool(re.search(r"\d", now.words))
        old = line == self._line and counts and time.monotonic() - self._told < QUIET_S
        if now.phase in OF_A_STEP or old:
            return False
        self._line, self._told = line, time.monotonic()
        return True

    def say(self, line: str) -> None:
        """A line that stays on the screen, also on a terminal."""
        if self._live is not None:
            self._show(lambda: self._live.console.print(line, markup=False, highlight=False))
        else:
            self._say(line)

    def _say(self, line: str) -> None:
        if self._live is None:
            self._show(lambda: print(line, file=self.out, flush=True))

    def _show(self, draw: Callable[[], None]) -> None:
        """Draw; a terminal or a pipe that was closed ends the display and not the run."""
        try:
            if not self._mute:
                draw()
        except (OSError, ValueError):  # ValueError: the stream object itself was closed
            self._mute = True

    def _heartbeat(self) -> dict[str, Any]:
        with contextlib.suppress(RunFolderError):
            return self.run.read_json(self.run.heartbeat_file.name)
        return {}

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        step = int(self._last.get("step") or 0)
        return Group(
            Text(f"{Doing.told(self._beat)}  ({duration(time.monotonic() - self._began)})"),
            Text(summary(self._last, self.steps) if self._last else ""),
            ProgressBar(total=self.steps, completed=step, width=60),  # last: rich ends no line after a bar
        )


class _Tail:
    """A file of JSON lines; `new` returns the records that were added since it was last asked, whole lines only.

    `again`: the file was cut back since, and these are all of it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read_bytes = file.stat().st_size if file.exists() else 0
        self.again = False

    def new(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(0, 2)
            self.again = file.tell() < self._read_bytes  # cut back by a resume
            if self.again:
                self._read_bytes = 0
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        return list(records(whole.splitlines(), self.file))
