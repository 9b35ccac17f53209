"""Is a model hub, a local copy of a model, or a file within reach? Sockets and folders only; nothing is downloaded."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 3.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Reach:
    ok: bool
    reason: str


def hub() -> Reach:
    """Whether the model hub answers, and the sentence that says why not."""
    for variable in OFFLINE_VARIABLES:
        if os.environ.get(variable, "").lower() not in ("", "0", "false", "no"):
            return Reach(False, f"{variable} is set")
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = address.hostname or "huggingface.co"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return Reach(True, "a proxy is configured")
    try:
        with socket.create_connection((host, address.port or 443), TIMEOUT_S):
            return Reach(True, f"{host} answers")
    except OSError as error:
        return Reach(False, f"{host} does not answer ({error.strerror or error})")


def have_model(model: str) -> Reach:
    """Whether a model can be loaded without the hub: a folder, a file, the built-in one, or a complete cached copy."""
    if model == "embedded":
        return Reach(True, "built in")
    if is_there(model):
        return Reach(True, "a local path")
    cached = _cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    if any(cached.glob("*/config.json")) and any(cached.glob("*/*.safetensors")):
        return Reach(True, "in the local cache")
    return Reach(False, "not on this machine")


def names_a_file(source: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name can only be a local file or folder: it starts like a path, or ends like a file (`.gz` aside)."""
    return source.startswith((".", "/", "~")) or source.lower().removesuffix(".gz").endswith(suffixes)


def is_there(source: str) -> bool:
    return Path(source).expanduser().exists()


def _cache() -> Path:
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
