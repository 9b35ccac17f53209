"""Importing unsloth: it checks and rewrites half the stack on import, so the import itself is the trial."""

from __future__ import annotations

from doctor.trials import stage, tell


def unsloth_import() -> None:
    """Tells unsloth_import; whatever stops the import is raised."""
    stage("import unsloth")
    import unsloth  # noqa: F401

    tell("unsloth_import", {"ok": True, "error": None})
