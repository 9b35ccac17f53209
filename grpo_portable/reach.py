"""Is a model hub, a local copy of a model or data set, or a file within reach? Sockets and folders only; nothing is downloaded.

The hub's own client retries a dead network for half a minute and more before it says so. A connection that is not made within
CONNECT_S says it at once; a network that is slow, but answers, has all the time it needs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from doctor.shape_files import no_model
from grpo_portable.errors import DataError, ModelError

CONNECT_S = 5.0  # a lost first packet is sent again after 1 s and after 3
NAME_S = 1.0  # on top: looking a name up has no time limit of its own
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Reach:
    ok: bool
    reason: str


def hub() -> Reach:
    """Whether the model hub answers, and the sentence that says why not. At most CONNECT_S + NAME_S seconds."""
    for variable in OFFLINE_VARIABLES:
        if os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off"):
            return Reach(False, f"{variable} is set")
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    host = address.hostname or str(urlsplit(HUB).hostname)
    proxy = _proxy(address.scheme, host)
    said: list[str | None] = []
    asking = threading.Thread(target=lambda: said.append(_no_answer(address, host, proxy)), daemon=True)
    asking.start()
    asking.join(CONNECT_S + NAME_S)
    why_not = said[0] if said else f"nothing within {CONNECT_S + NAME_S:.0f} s"
    by = f" through the proxy {proxy.hostname}" if proxy else ""
    return (
        Reach(True, f"{host} answers{by}")
        if why_not is None
        else Reach(False, f"{host} does not answer{by} ({why_not})")
    )


def require(model: str, sources: tuple[str, ...] = (), ask: Callable[[], Reach] = hub) -> str | None:
    """Raise ModelError or DataError for what is neither on this machine nor to be had from the hub.

    Returns None when the hub answers or is not needed, else why it does not: then everything comes from local copies, and who
    loads it should `stay_offline`. `ask` is only called where something is of the hub.
    """
    missing = [what for what, have in [(model, have_model), *((s, have_data) for s in sources)] if not have(what).ok]
    of_hub = [what for what in (model, *sources) if not (what in BUILT_IN or is_there(what))]
    if not of_hub:
        return None
    found = ask()
    if found.ok:
        return None
    if model in missing:
        raise ModelError(
            f"model `{model}` is not on this machine, and the hub is out of reach",
            because=found.reason,
            help="without a network give a local one: --model FOLDER (config.json and *.safetensors) or --model FILE.gguf",
        )
    if missing:
        raise DataError(
            f"data set `{missing[0]}` is not on this machine, and the hub is out of reach",
            because=found.reason,
            help="without a network give local files: --data questions.jsonl, one "
            '{"question": …, "answer": …} a line, or a folder with train.jsonl and test.jsonl',
        )
    return found.reason


def located(model: str) -> tuple[str, str | None]:
    """(what a loader is given, GGUF file name or None). ModelError for a path that is not there or holds no model."""
    if fault := no_model(model):
        raise ModelError(fault.fact, because=fault.because, help=fault.help)
    path = Path(model).expanduser()
    return (str(path.parent), path.name) if path.is_file() else (str(path) if path.is_dir() else model, None)


def stay_offline() -> None:
    """Tell the libraries of this process and its workers not to ask the hub: they would again, each for half a minute."""
    os.environ["HF_HUB_OFFLINE"] = "1"


BUILT_IN = ("embedded", "arithmetic")


def have_model(model: str) -> Reach:
    """Whether a model can be loaded without the hub: a folder, a file, the built-in one, or a complete cached copy."""
    if model in BUILT_IN:
        return Reach(True, "built in")
    if is_there(model):
        return Reach(True, "a local path")
    snapshots = (_cache() / f"models--{model.replace('/', '--')}" / "snapshots").glob("*")
    if any(_is_whole(folder) for folder in snapshots):
        return Reach(True, "in the local cache")
    return Reach(False, "not on this machine")


def have_data(source: str) -> Reach:
    """Whether a data set may be loaded without the hub: built in, a file or folder, or something of it in the caches."""
    if source in BUILT_IN:
        return Reach(True, "built in")
    if is_there(source):
        return Reach(True, "a local path")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets").expanduser()
    copies = (_cache() / f"datasets--{source.replace('/', '--')}" / "snapshots", prepared / source.replace("/", "___"))
    if any(folder.is_dir() and any(folder.iterdir()) for folder in copies):
        return Reach(True, "in the local cache")
    return Reach(False, "not on this machine")


def names_a_file(source: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name can only be a local file or folder: it starts like a path, or ends like a file (`.gz` aside)."""
    return source.startswith((".", "/", "~")) or source.lower().removesuffix(".gz").endswith(suffixes)


def is_there(source: str) -> bool:
    return Path(source).expanduser().exists()


def _is_whole(snapshot: Path) -> bool:
    """Whether a cached model has its configuration and every file of its weights: a download may have been cut."""
    if not (snapshot / "config.json").exists():
        return False
    index = snapshot / "model.safetensors.index.json"
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((snapshot / name).exists() for name in named) and any(snapshot.glob("*.safetensors"))


def _no_answer(address: SplitResult, host: str, proxy: SplitResult | None) -> str | None:
    """Why no connection is made to the hub, or to the proxy that leads there; None when there is one."""
    to = proxy or address
    port = to.port or (443 if to.scheme == "https" else 1080 if to.scheme.startswith("socks") else 80)
    try:
        with socket.create_connection((to.hostname or host, port), CONNECT_S) as line:
            tunnels = proxy is not None and proxy.scheme == "http" and address.scheme == "https"
            return _refused(line, host, address.port or 443) if tunnels else None
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _refused(line: socket.socket, host: str, port: int) -> str | None:
    """The proxy's refusal of a tunnel to the hub; None when it makes one, wants a password, or takes its time."""
    line.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    try:
        first = line.recv(256).split(b"\r\n")[0].decode("latin-1").split(" ", 2)
    except TimeoutError:
        return None
    status = int(first[1]) if len(first) > 1 and first[1].isdecimal() else 0
    return None if status < 400 or status == 407 else f"the proxy says {' '.join(first[1:])}"


def _proxy(scheme: str, host: str) -> SplitResult | None:
    """The proxy that the environment sets for this host, None when there is none."""
    proxies = getproxies()
    named = proxies.get(scheme) or proxies.get("all")
    if not named or proxy_bypass(host):
        return None
    return urlsplit(named if "//" in named else f"http://{named}")


def _home() -> Path:
    general = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or general).expanduser()


def _cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub").expanduser()
