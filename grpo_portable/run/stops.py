"""A command that is asked to end clears up behind itself, as at Ctrl-C: its children end, its temporary folders go."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

ENDS = ("SIGTERM", "SIGHUP")  # a batch system's wish, and a closed terminal's
STOPS = ("SIGINT", *ENDS)


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal are KeyboardInterrupt; the first alone, since they often come together."""
    came: list[int] = []

    def interrupt(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    with handled(ENDS, interrupt):
        yield


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside, no stop is heard, as while a child starts that would be left alone; one that came is heard at the end."""
    came: list[int] = []
    with handled(STOPS, lambda number, _: came.append(number)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def handled(names: tuple[str, ...], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Inside, `handler` is told of these signals. One that is ignored, as under nohup, stays so; off the main thread, where
    Python has no handlers, nothing changes.
    """
    numbers = [n for name in names if (n := getattr(signal, name, None)) is not None]
    here = threading.current_thread() is threading.main_thread()
    heard = [n for n in numbers if here and signal.getsignal(n) not in (signal.SIG_IGN, None)]  # None: not Python's
    before = {n: signal.signal(n, handler) for n in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
