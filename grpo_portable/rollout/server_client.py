"""JSON over HTTP to a vLLM server, with the standard library alone. Every wait has a limit and every repeat is counted.

A request that only asks may be sent again when the server closed the connection or is overloaded; one that changes something
is sent once. Redirects are not followed and no proxy is used, so the key goes to the named server and nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grpo_portable.errors import EngineError, brief

KEY = "VLLM_API_KEY"  # vLLM's own name of the environment variable
CONNECT_LIMIT_S = 10.0
ATTEMPTS = 4
PAUSE_S = 1.0  # before the second attempt; doubled before each further one
OVERLOADED = (429, 502, 503, 504)
CUT_SHORT = (ConnectionError, http.client.HTTPException)  # the same request may do better in a moment
LEAST_BYTES = 1 << 20  # of an answer, whatever was asked
_T = TypeVar("_T")


class Refused(EngineError):
    """The server answered, and not with 200. `status` is HTTP's; `fact` holds the server's own words."""

    status = 0


def _plain(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _parsed(text: bytes) -> Any:
    """JSON, None where nothing was said."""
    return json.loads(text) if text else None


class Client:
    """One server. Calls may come from several threads; `abort` ends those under way, and the server drops their work."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.url, self.attempts, self.pause_s = url, ATTEMPTS, PAUSE_S
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._path = parts.path.rstrip("/")
        self._key = key
        self._open: set[socket.socket | None] = set()
        self._lock, self._aborted = threading.Lock(), threading.Event()

    def get(self, path: str, *, limit_s: float) -> Any:
        """The JSON at `path`, None for an empty answer. Raises Refused, or EngineError when no answer came."""
        return self._call(lambda: self._once("GET", path, None, limit_s, LEAST_BYTES), self.attempts)

    def text(self, path: str, *, limit_s: float, most_bytes: int) -> str:
        """What stands at `path` where that is no JSON, asked for once. Raises as `get`."""
        return str(self._call(lambda: self._once("GET", path, None, limit_s, most_bytes, _plain), 1))

    def ask(self, path: str, body: Any, *, limit_s: float, most_bytes: int = LEAST_BYTES) -> Any:
        """The answer to a request that changes nothing there, as `get`."""
        return self._call(lambda: self._once("POST", path, body, limit_s, max(LEAST_BYTES, most_bytes)), self.attempts)

    def change(self, path: str, body: Any, *, limit_s: float) -> str:
        """What is said to a request that changes something, as vLLM does in a sentence: sent once."""
        return str(self._call(lambda: self._once("POST", path, body, limit_s, LEAST_BYTES, _plain), 1))

    def abort(self) -> None:
        """End every call under way; those still to come end at once."""
        self._aborted.set()
        with self._lock:
            for wire in self._open:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR) if wire else None

    def resume(self) -> None:
        """Take calls again after `abort`."""
        self._aborted.clear()

    def _call(self, once: Callable[[], _T], attempts: int) -> _T:
        """The answer, after at most `attempts` tries; what the network raises is told as an EngineError."""
        for attempt in itertools.count(1):
            try:
                return once()
            except Refused as refused:
                if attempt >= attempts or refused.status not in OVERLOADED or self._aborted.is_set():
                    raise
            except (OSError, http.client.HTTPException) as error:
                if attempt >= attempts or not isinstance(error, CUT_SHORT) or self._aborted.is_set():
                    raise self._told(error) from error
            self._aborted.wait(self.pause_s * 2 ** (attempt - 1))
        raise AssertionError

    def _told(self, error: Exception) -> EngineError:
        because = getattr(error, "strerror", None) or str(error) or type(error).__name__
        late = isinstance(error, TimeoutError)
        what = "did not answer in time" if late else "cannot be reached"
        return EngineError(f"the vLLM server at {self.url} {what}", because=because)

    def _once(
        self,
        method: str,
        path: str,
        body: Any,
        limit_s: float,
        most_bytes: int,
        read: Callable[[bytes], Any] = _parsed,
    ) -> Any:
        ends = time.monotonic() + limit_s
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(CONNECT_LIMIT_S, limit_s))
        wire: socket.socket | None = None
        try:
            connection.connect()
            wire = connection.sock
            with self._lock:
                self._open.add(wire)
            if self._aborted.is_set():
                raise ConnectionAbortedError("the rollout was stopped")
            wire.settimeout(max(0.01, ends - time.monotonic()))
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, payload, self._headers())
            response = connection.getresponse()
            text, status = self._read(response, wire, ends, most_bytes), response.status
        except TimeoutError as error:
            raise TimeoutError(f"{path} took more than {limit_s:.0f} s") from error
        finally:
            with self._lock:
                self._open.discard(wire)
            connection.close()
        if status != 200:
            raise self._refusal(status, path, text)
        try:
            return read(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"what answers at {self.url} is no vLLM server", because=f"{path} gave no JSON"
            ) from error

    def _headers(self) -> dict[str, str]:
        plain = {"Content-Type": "application/json", "Accept": "application/json"}
        return {**plain, "Authorization": f"Bearer {self._key}"} if self._key else plain

    def _read(self, response: http.client.HTTPResponse, wire: socket.socket, ends: float, most: int) -> bytes:
        pieces, size = [], 0
        while True:
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError
            with contextlib.suppress(OSError):  # closed by the server once its last byte was sent
                wire.settimeout(left)
            piece = response.read1(1 << 16)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise EngineError(f"the vLLM server at {self.url} sent more than {most >> 20} MiB for one request")
        if response.length:
            raise http.client.IncompleteRead(b"".join(pieces), response.length)
        return b"".join(pieces)

    def _refusal(self, status: int, path: str, text: bytes) -> Refused:
        said = _words(text)
        if self._key:
            said = said.replace(self._key, "...")
        refused = Refused(f"the vLLM server refused {path} ({status}): {said}")
        refused.status = status
        return refused


def _words(text: bytes) -> str:
    """The message of an error's body, one line of at most 300 characters."""
    told: Any = text.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        found = json.loads(text)
        error = found.get("error", found.get("detail", told))
        told = error.get("message", error) if isinstance(error, dict) else error
    return brief(str(told), 300) or "nothing said"
