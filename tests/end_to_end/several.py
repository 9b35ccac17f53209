"""For tests only: the ranks of a run as forks of this process, which has torch in memory already, joined by gloo.

What ends them here is what the launcher's agent does: when one fails, the others are asked to go and then killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 20.0

Work = Callable[[int], Any]  # rank → exit code


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def forked(count: int, work: Work, log: Path) -> list[int]:
    """The exit codes by rank (negative: a signal's number) of `count` processes that each do `work(rank)`."""
    port = free_port()
    pids = [_fork(rank, count, port, work, log) for rank in range(count)]
    codes: dict[int, int] = {}
    failed_at: float | None = None
    while len(codes) < count:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if failed_at is None and any(codes.values()):
            failed_at = time.monotonic()
            _send(signal.SIGTERM, pids, codes)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            _send(signal.SIGKILL, pids, codes)
        time.sleep(0.02)
    return [codes[rank] for rank in range(count)]


def _send(number: int, pids: Sequence[int], ended: Mapping[int, int]) -> None:
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, number)


def _fork(rank: int, count: int, port: int, work: Work, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: Any = 99
    try:
        sys.stdout = sys.stderr = log.open("a", buffering=1)
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "ACCELERATE_USE_CPU": "true",
            }
        )
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # this process may have been one alone
        code = work(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(int(code or 0))
