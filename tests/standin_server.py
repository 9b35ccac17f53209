"""A stand-in for `vllm serve`, on a port of this host: the routes the engine uses, with the answers vLLM 0.24 gives.

Behind the routes stands the model of `standin_vllm`. What it cannot show is vLLM's own arithmetic and its scheduling.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import standin_vllm
import torch
from transformers import AutoTokenizer

NAME = "served/tiny"


class Server:
    """`asked`: (route, body) of every request so far. `faults`: route → what is done instead, given the handler."""

    def __init__(self, folder: Path, *, context: int = 128, processed: bool = True, key: str | None = None) -> None:
        arguments = {
            "model": str(folder),
            "dtype": "float32",
            "seed": 0,
            "max_lora_rank": 16,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "max_model_len": context,
            "enable_sleep_mode": False,
        }
        self.llm = standin_vllm.LLM(**arguments)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.context, self.processed, self.key, self.folder = context, processed, key, folder
        self.runtime_adapters = True
        self.adapters: dict[str, standin_vllm.LoRARequest] = {}
        self.asked: list[tuple[str, Any]] = []
        self.faults: dict[str, Callable[[Any], bool]] = {}
        self.left = 0  # requests whose client went away
        self._numbers, self._lock = iter(range(1, 10**6)), threading.Lock()

    def bodies(self, route: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == route]

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        """(status, JSON or text) as vLLM's routes give them."""
        if route == "/health":
            return 200, ""
        if route == "/v1/models":
            card = {"id": NAME, "root": str(self.folder), "parent": None, "max_model_len": self.context}
            loaded = [{"id": name, "root": r.lora_path, "parent": NAME} for name, r in self.adapters.items()]
            return 200, {"object": "list", "data": [card, *loaded]}
        if route == "/tokenize":
            tokens = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return 200, {"count": len(tokens), "max_model_len": self.context, "tokens": tokens}
        if route == "/v1/completions":
            return self._completions(body)
        if self.runtime_adapters and route == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if self.runtime_adapters and route == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return self._error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        if name in self.adapters:
            return self._error(400, f"The lora adapter '{name}' has already been loaded.")
        if not Path(path).is_dir():
            return self._error(404, f"Loading lora {name} failed: No adapter found for {path}")
        rank = json.loads((Path(path) / "adapter_config.json").read_text())["r"]
        if rank > self.llm.arguments["max_lora_rank"]:
            return self._error(500, f"LoRA rank {rank} is greater than max_lora_rank 16.")
        request = standin_vllm.LoRARequest(name, next(self._numbers), path)
        self.llm._add_lora(request)
        self.adapters[name] = request
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        request = self.adapters.get(body["model"])
        if request is None and body["model"] != NAME:
            return self._error(404, f"The model `{body['model']}` does not exist.")
        prompt = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.context:
            return self._error(400, f"This model's maximum context length is {self.context} tokens.")
        assert body["logprobs"] == 0 and body["return_token_ids"] and body["ignore_eos"]
        wanted = standin_vllm.SamplingParams(
            n=body["n"],
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            min_p=body["min_p"],
            repetition_penalty=body["repetition_penalty"],
            seed=(body["seed"] % 2**31) if body.get("seed") is not None else None,
            stop_token_ids=body["stop_token_ids"],
            stop=body["stop"],
        )
        with self._lock:  # the stand-in changes its one model's weights while it answers
            if request is not None and request.lora_int_id not in self.llm.adapters:
                self.llm._add_lora(request)  # driven out, and read again when it is asked for
            (made,) = self.llm.generate([{"prompt_token_ids": prompt}], [wanted], lora_request=request)
            rows = made.outputs
            if not self.processed:
                rows = [replace(row, logprobs=self._raw(prompt, row.token_ids)) for row in rows]
        choices = [
            {
                "index": index,
                "text": self.tokenizer.decode(row.token_ids),
                "finish_reason": row.finish_reason,
                "token_ids": row.token_ids,
                "logprobs": {
                    "token_logprobs": row.logprobs.logprobs,
                    "tokens": [],
                    "top_logprobs": [],
                    "text_offset": [],
                },
            }
            for index, row in enumerate(rows)
        ]
        return 200, {"object": "text_completion", "model": body["model"], "choices": choices, "usage": {}}

    def _raw(self, prompt: list[int], tokens: list[int]) -> standin_vllm.Flat:
        """Log-probabilities of the base before temperature and truncation, as vLLM's default mode gives them."""
        with torch.no_grad():
            logits = self.llm.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return standin_vllm.Flat(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())

    @staticmethod
    def _error(status: int, message: str) -> tuple[int, Any]:
        return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: Any) -> None:
        served: Server = self.server.served
        served.asked.append((self.path, body))
        if served.key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {served.key}":
            self.say(401, {"error": "Unauthorized"})
            return
        fault = served.faults.get(self.path)
        if fault is not None and fault(self):
            return
        self.say(*served.answer(self.path, body))

    def say(self, status: int, told: Any) -> None:
        text = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except OSError:
            self.server.served.left += 1
            self.close_connection = True

    def hang(self, seconds: float = 60.0) -> None:
        """Say nothing until the client goes away."""
        ends = time.monotonic() + seconds
        self.connection.settimeout(0.05)
        while time.monotonic() < ends:
            with contextlib.suppress(TimeoutError):
                if self.connection.recv(1) == b"":
                    self.server.served.left += 1
                    break
        self.close_connection = True

    def cut(self) -> None:
        """Close the connection without a word."""
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """The address at which `server` answers inside."""
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    listening.daemon_threads = True
    listening.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that go away are part of the tests
    listening.served = server  # type: ignore[attr-defined]
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join(10)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[_Handler], bool]:
    """A fault: the true answer to a completion request, changed."""

    def fault(handler: _Handler) -> bool:
        served: Server = handler.server.served
        body = served.asked[-1][1]
        status, told = served.answer(handler.path, body)
        change(told)
        handler.say(status, told)
        return True

    return fault


def times(number: int, do: Callable[[Any], None]) -> Callable[[Any], bool]:
    """A fault the first `number` times, then none."""
    left = [number]

    def fault(handler: Any) -> bool:
        if left[0] <= 0:
            return False
        left[0] -= 1
        do(handler)
        return True

    return fault
