"""TRL's GRPOTrainer, imported without vLLM, and its LM head, which scores nothing in vain on any device.

TRL imports vLLM with its trainer wherever it is installed. It is never asked to use it here, and a vLLM that cannot be
imported, or is newer than TRL knows, would take down the very paths that run without it.

Its fused head leaves prompts and padding out where Triton runs, and multiplies them by the whole vocabulary elsewhere, so that
compilers of accelerators not used here see the same shapes. On a CPU that was a fifth of a bootstrap step of SmolLM2.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

_imports: Any = importlib.import_module("trl.import_utils")  # `trl` itself hands out its modules' classes only
_told = _imports.is_vllm_available
_imports.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOTrainer
finally:
    _imports.is_vllm_available = _told


def score_labels_only() -> None:
    """Let TRL's fused head pick out the positions with a label before its products, whatever the device."""
    head: Any = importlib.import_module("trl.trainer.utils")
    if hasattr(head, "_use_triton"):  # asked there for nothing else; which kernels run is asked in trl.kernels
        head._use_triton = lambda device: True


def leave_checkpointing_alone() -> None:
    """Let TRL score a rollout without switching gradient checkpointing off and on again, two walks through all modules a step.

    It does so for the sake of a warning of `use_reentrant=True`; `arguments.py` asks for False.
    """
    trainer: Any = importlib.import_module("trl.trainer.grpo_trainer")
    if hasattr(trainer, "disable_gradient_checkpointing"):
        trainer.disable_gradient_checkpointing = lambda model, kwargs=None: contextlib.nullcontext()


score_labels_only()
leave_checkpointing_alone()

__all__ = ["GRPOTrainer"]
