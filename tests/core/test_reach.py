"""A hub that is out of reach is told in seconds, one that is slow is waited for, and local copies are known."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_portable import reach
from grpo_portable.errors import DataError, ModelError

VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine, and an empty cache."""
    for name in (*VARIABLES, *PROXIES, *map(str.upper, PROXIES)):
        monkeypatch.setenv(name, "")  # set, so that what the code sets is undone too
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(reach, "CONNECT_S", 0.4)
    monkeypatch.setattr(reach, "NAME_S", 0.2)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return port(listening)


def say(listening: socket.socket, words: bytes, after: float = 0.0) -> list[bytes]:
    """Answer the next caller with `words`; what it asked stands in the list afterwards."""
    heard: list[bytes] = []

    def answer() -> None:
        line, _ = listening.accept()
        with line:
            heard.append(line.recv(1024))
            time.sleep(after)
            line.sendall(words)

    threading.Thread(target=answer, daemon=True).start()
    return heard


def test_a_hub_that_answers_is_within_reach(monkeypatch: pytest.MonkeyPatch, server: socket.socket) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port(server)}")
    assert reach.hub() == reach.Reach(True, "127.0.0.1 answers")


def test_a_refused_connection_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert reach.hub() == reach.Reach(False, "127.0.0.1 does not answer (Connection refused)")


def test_packets_that_vanish_and_names_that_are_never_found_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(30) or [])
    found = reach.hub()
    assert (found.ok, time.monotonic() - began < 15) == (False, True)
    assert "huggingface.co does not answer (nothing within 1 s)" in found.reason


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_who_works_offline_is_asked_for_no_network(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("the network was tried"))
    monkeypatch.setenv(variable, "1")
    assert reach.hub() == reach.Reach(False, f"{variable} is set")


@pytest.mark.parametrize(
    ("words", "after", "ok", "reason"),
    [
        (b"HTTP/1.1 200 Connection established\r\n\r\n", 0.0, True, "answers through the proxy 127.0.0.1"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", 0.0, True, "answers"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", 0.0, False, "(the proxy says 403 Forbidden)"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", 0.5, True, "answers"),  # slow: whoever is asked later has more patience
    ],
)
def test_a_proxy_is_asked_for_the_hub(
    monkeypatch: pytest.MonkeyPatch, server: socket.socket, words: bytes, after: float, ok: bool, reason: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port(server)}")
    heard = say(server, words, after)
    found = reach.hub()
    assert found.ok == ok and reason in found.reason
    assert heard[0].startswith(b"CONNECT huggingface.co:443 HTTP/1.1\r\n")


def test_a_proxy_that_is_gone_and_one_that_is_not_for_this_host(
    monkeypatch: pytest.MonkeyPatch, server: socket.socket
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{closed_port()}")
    assert not reach.hub().ok
    monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{closed_port()}")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port(server)}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert reach.hub() == reach.Reach(True, "127.0.0.1 answers")


def cached(home: Path, model: str, shards: tuple[str, ...], index: tuple[str, ...] = ()) -> None:
    folder = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for name in ("config.json", *shards):
        (folder / name).write_text("{}")
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {str(i): n for i, n in enumerate(index)}})
        )


def test_a_cached_model_counts_when_it_is_whole(tmp_path: Path) -> None:
    two = ("model-1.safetensors", "model-2.safetensors")
    cached(tmp_path / "hf", "org/one", ("model.safetensors",))
    cached(tmp_path / "hf", "org/two", two, two)
    cached(tmp_path / "hf", "org/cut", two[:1], two)
    cached(tmp_path / "hf", "org/bare", ())
    found = {name: reach.have_model(f"org/{name}").ok for name in ("one", "two", "cut", "bare", "none")}
    assert found == {"one": True, "two": True, "cut": False, "bare": False, "none": False}


def test_what_is_missing_is_named_and_what_is_there_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    (tmp_path / "q.jsonl").touch()
    local = str(tmp_path / "q.jsonl")
    assert reach.require("embedded", ("arithmetic", local)) is None
    with pytest.raises(ModelError, match="model `org/model` is not on this machine") as told:
        reach.require("org/model", (local,))
    assert told.value.because == "127.0.0.1 does not answer (Connection refused)" and "--model FOLDER" in str(
        told.value.help
    )
    cached(tmp_path / "hf", "org/model", ("model.safetensors",))
    with pytest.raises(DataError, match="data set `org/set`"):
        reach.require("org/model", (local, "org/set"))
    (tmp_path / "hf" / "datasets" / "org___set" / "main").mkdir(parents=True)
    assert reach.require("org/model", (local, "org/set")) == "127.0.0.1 does not answer (Connection refused)"
    assert not os.environ.get("HF_HUB_OFFLINE")  # a question changes nothing
    reach.stay_offline()
    assert reach.hub() == reach.Reach(False, "HF_HUB_OFFLINE is set")


def test_a_hub_within_reach_is_trusted_with_the_rest(monkeypatch: pytest.MonkeyPatch, server: socket.socket) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port(server)}")
    assert reach.require("org/model", ("org/set",)) is None
