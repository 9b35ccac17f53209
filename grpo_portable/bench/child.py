"""A measuring process: run to its end, its words kept in a file beside its figures."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_portable.run import stops

# from the wish to end until it is killed: a step is finished first, and accelerate gives its processes 30 s
GRACE_S = 60.0
LATE = "it did not end within"
LAST_LINES = 60
Tell = Callable[[Mapping[str, Any]], None]  # hears of figures when they are there


def run(
    command: Sequence[str], folder: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """{} when the command ended well, else {error}: its last line, or how long it was waited for; more lines go to stderr.

    At its limit it is asked to end, so that it can write what it has seen and takes its own processes with it.
    """
    log = folder / "side.log"
    env = {**os.environ, **environment} if environment is not None else None
    with log.open("w", encoding="utf-8") as out:
        child = None
        try:
            with stops.waiting():
                child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child is not None:
                _end(child)
    if code == 0:
        return {}
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    print("\n".join(said[-LAST_LINES:]), file=sys.stderr, flush=True)
    if code is None:
        return {"error": f"{LATE} {limit_s:.0f} s"}
    return {"error": f"exit code {code}: {said[-1][:500] if said else 'nothing was said'}"}


def with_figures(failed: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """What a process wrote, and why it ended early: its limit, else its own error, else its last line."""
    late = str(failed.get("error")).startswith(LATE)
    return {**seen, **failed} if late else {**failed, **seen}


def tell(figures: Mapping[str, Any]) -> None:
    """One line on stderr: what is measured stays known, however the command ends."""
    print(json.dumps(figures), file=sys.stderr, flush=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it in the kernel: it is left there
            child.wait(GRACE_S)
