"""For tests only: what code costs in processor time, which counts nothing else that the machine does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator


def processor_s() -> float:
    """Processor seconds so far: of this process, and of its children that have ended (those by 1/100 s)."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def by(call: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    began = processor_s()
    call()
    return processor_s() - began


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What stands within takes less processor time than that."""
    began = processor_s()
    yield
    took = processor_s() - began
    assert took < seconds, f"{took:.2f} processor seconds, where less than {seconds} were promised"
