"""grpo-doctor: what can this machine do for GRPO, which walls block the faster paths, and the one command that helps.

In a notebook: `import doctor; doctor.diagnose("Qwen/Qwen3-4B")`. In a shell: `grpo-doctor` or `python -m doctor`.
Importing this package loads nothing but the names below; torch, vLLM and their kin are only ever touched in child
processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doctor.notebook import ShownDiagnosis

__version__ = "0.1.0"
__all__ = ["__version__", "diagnose"]


def diagnose(model: str | None = None, **options: Any) -> ShownDiagnosis:
    """The diagnosis of this machine, for `model` if one is named; shows itself when it ends a notebook cell.

    `options` are those of `doctor.notebook.diagnose` (children, timeout_s) and of the plan (group_size, prompt_tokens,
    completion_tokens, lora_rank).
    """
    from doctor.notebook import diagnose as diagnose_here

    return diagnose_here(model, **options)
