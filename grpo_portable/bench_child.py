"""A measuring process: run to its end, its words kept in a file beside its figures."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run(
    command: Sequence[str], folder: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """{} when the command ended well, else {error}: its last line, or how long it was waited for."""
    log = folder / "side.log"
    env = {**os.environ, **environment} if environment is not None else None
    with log.open("w", encoding="utf-8") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False, env=env)
        except subprocess.TimeoutExpired:
            return {"error": f"it did not end within {limit_s:.0f} s"}
    if done.returncode == 0:
        return {}
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return {"error": f"exit code {done.returncode}: {said[-1][:500] if said else 'nothing was said'}"}
