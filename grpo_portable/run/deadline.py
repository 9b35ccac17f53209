"""A time limit for a call that may hang in code of others, where no exception can reach it.

A watching thread tells that the process is alive, and past the limit writes every thread's stack to the log and hands over
to the caller, who ends the process. Should even the watcher be kept from running, the interpreter's own timer ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

BEAT_S = 5.0
GRACE_S = 60.0  # what the watcher has to end the process before the interpreter's timer does


@contextlib.contextmanager
def deadline(
    seconds: float, *, beat: Callable[[float], None], expired: Callable[[str], None], every: float = BEAT_S
) -> Iterator[None]:
    """Inside, `beat(seconds so far)` is called every few seconds; past `seconds`, `expired(where)` once, from another thread.

    `where` is the function that the calling thread was in. `expired` is expected to end the process.
    """
    done, caller, began = threading.Event(), threading.get_ident(), time.monotonic()

    def watch() -> None:
        while not done.wait(every):
            gone = time.monotonic() - began
            if gone > seconds:
                where = _where(caller)
                with contextlib.suppress(OSError, ValueError):  # no stderr to write to
                    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                expired(where)
                return
            beat(gone)

    watcher = threading.Thread(target=watch, name="deadline", daemon=True)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # as above
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=sys.__stderr__ or 2)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        faulthandler.cancel_dump_traceback_later()
        watcher.join(GRACE_S)


def _where(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "code that has ended"
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}, line {frame.f_lineno}"
