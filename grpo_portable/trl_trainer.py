"""TRL's GRPOTrainer, imported without vLLM.

TRL imports vLLM with its trainer wherever it is installed. It is never asked to use it here, and a vLLM that cannot be
imported, or is newer than TRL knows, would take down the very paths that run without it.
"""

from __future__ import annotations

import importlib
from typing import Any

_imports: Any = importlib.import_module("trl.import_utils")  # `trl` itself hands out its modules' classes only
_told = _imports.is_vllm_available
_imports.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOTrainer
finally:
    _imports.is_vllm_available = _told

__all__ = ["GRPOTrainer"]
