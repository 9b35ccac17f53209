"""TRL's GRPOTrainer, imported without vLLM, and the short ways it is made to take while it trains.

TRL imports vLLM with its trainer wherever it is installed. It is never asked to use it here, and a vLLM that cannot be
imported, or is newer than TRL knows, would take down the very paths that run without it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

_imports: Any = importlib.import_module("trl.import_utils")  # `trl` itself hands out its modules' classes only
_told = _imports.is_vllm_available
_imports.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOTrainer
finally:
    _imports.is_vllm_available = _told


SHORT_WAYS: tuple[tuple[str, str, Callable[..., Any]], ...] = (  # module, name there, what it is while training goes on
    # The fused head leaves prompts and padding out where Triton runs, and multiplies them by the whole vocabulary elsewhere, so
    # that compilers of accelerators not used here see the same shapes: on a CPU a fifth of a bootstrap step of SmolLM2. This
    # module asks for nothing else with it; which kernels run is asked in trl.kernels. TRL 1.15 leaves them out everywhere.
    ("trl.trainer.utils", "_use_triton", lambda device: True),
    # Scoring a rollout switches gradient checkpointing off and on again, two walks through all modules a step, for the sake of
    # a warning of `use_reentrant=True`; `arguments.py` asks for False.
    (
        "trl.trainer.grpo_trainer",
        "disable_gradient_checkpointing",
        lambda model, kwargs=None: contextlib.nullcontext(),
    ),
)


@contextlib.contextmanager
def short_ways() -> Iterator[list[str]]:
    """Inside, TRL takes its short ways; gives the names it has here. Without one of them it is slower and nothing else."""
    taken = []
    with contextlib.ExitStack() as stack:
        for module, name, instead in SHORT_WAYS:
            home: Any = importlib.import_module(module)
            if hasattr(home, name):
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, instead)
                taken.append(name)
        yield taken


class Silent:
    """In front of a trainer of TRL's, which reports each run to the hub; this project reports nothing."""

    def _send_telemetry(self) -> None:
        """Nothing."""


__all__ = ["GRPOTrainer", "Silent", "short_ways"]
