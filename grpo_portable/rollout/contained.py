"""What an engine of others does to its process, contained: errors of any kind, and generators it seeds anew."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch

from grpo_portable.errors import EngineError, GrpoPortableError, brief


@contextlib.contextmanager
def engine_errors(fact: str, help: str | None = None) -> Iterator[None]:
    """Whatever an engine raises becomes an EngineError with its last line, so that the run can go on without it."""
    try:
        yield
    except GrpoPortableError:
        raise
    except (Exception, SystemExit) as error:  # its parts raise anything, and no kind of it may end the run
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {brief(lines[-1])}" if lines else type(error).__name__
        raise EngineError(f"{fact}: {told}", help=help) from error


@contextlib.contextmanager
def undisturbed(seed: int | None = None) -> Iterator[None]:
    """Inside, random generators may be reseeded (with `seed`, torch's are); afterwards they and torch are as before."""
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_float32_matmul_precision(precision)
