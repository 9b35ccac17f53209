"""Size and SHA-256 of files, kept beside them: what a crash or a bad disk did shows before they are read. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_portable.run.forms import read

NAME = "manifest.json"
CONFIGURATION = "adapter_config.json"  # of an adapter, as peft names it


def write(folder: Path, files: Iterable[Path]) -> None:
    """Write down what these files of `folder` hold."""
    (folder / NAME).write_text(json.dumps({f.name: fingerprint(f) for f in files}), encoding="utf-8")


def known(folder: Path) -> dict[str, Any]:
    """File name → fingerprint of what was written down; empty where there is no manifest, or none of this form."""
    try:
        return read((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return {}


def fingerprint(file: Path) -> dict[str, Any]:
    """What a file holds, in two words. OSError when it cannot be read, ValueError for an adapter's configuration that is none.

    Of such a configuration all counts but the base's name: who moves a base writes its new place there.
    """
    if file.name == CONFIGURATION:
        given = {**read(file.read_bytes()), "base_model_name_or_path": None}
        text = json.dumps(given, sort_keys=True).encode()
        return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}
