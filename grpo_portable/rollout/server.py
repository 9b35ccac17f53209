"""A vLLM that runs elsewhere as a rollout engine: `vllm serve`, spoken to over HTTP. vLLM itself is not needed here.

The server keeps the base model; the policy's adapter is handed over at every sync through a folder that both see, under a name
that no cached prefix was made with. Of several processes the first hands over, and all sample under the same name.

Legend: B prompts, G completions a prompt.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from grpo_portable.errors import EngineError, EngineUnsupported, GrpoPortableError, ServerError
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import served, server_request, vllm_adapter
from grpo_portable.rollout.protocol import Completion, Sampling, TokenIds, silent
from grpo_portable.rollout.requests import check, seeded
from grpo_portable.rollout.scratch import Scratch
from grpo_portable.rollout.server_client import KEY, Client, Refused
from grpo_portable.rollout.stops import StopStrings
from grpo_portable.run.folder import usual_modes
from grpo_portable.run.processes import Processes, here

CONNECTIONS = 64  # prompts in flight; the server batches their completions as it can
# of one answer, queue included, or what the whole rollout may take if that is more; the supervisor waits 1800
ANSWER_LIMIT_S = 1500.0
SLOWEST_TOKENS_S = 20.0  # by arithmetic: one row at a time of 7 B weights in 16 bit, read at a T4's 320 GB/s
LOAD_LIMIT_S = 120.0
ASK_EVERY_S = 60.0  # of silence, until the server is asked whether it is well
STALL_LIMIT_S = 600.0  # without a token more by the server's own count: it makes some in seconds
METRICS_BYTES = 16 << 20
HEALTH_LIMIT_S = 30.0
LEAVE_LIMIT_S = 10.0


def make(policy: Any, tokenizer: Any, recipe: Recipe, *, dtype: str, tick: Any = silent) -> ServerRollout:
    """The engine at the recipe's `vllm_server`. ServerError when that server is not set up for this run; nothing was made then.

    EngineUnsupported for a policy whose changes no server can be handed: all weights, DoRA.
    """
    reason = vllm_adapter.refusal(policy, fp8=True)
    if reason is not None:
        raise EngineUnsupported(f"a vLLM server cannot make the rollouts of this policy: {reason}")
    began = time.perf_counter()
    client = Client(recipe.vllm_server, os.environ.get(KEY) or None)
    vocabulary, layout = vllm_adapter.vocabulary(policy), vllm_adapter.layout(policy)
    wanted = min(recipe.max_prompt_tokens + recipe.max_completion_tokens, vllm_adapter.context(policy))
    command = server_request.command(recipe.model, rank=layout.rank if layout else None, context=wanted)
    served.ready(client, tick)
    found = served.base(client)
    served.require_room(found, wanted, command)
    served.require_tokenizer(client, found, tokenizer)
    apart = served.require_same_model(client, found, policy, tokenizer, vocabulary)
    served.require_processed(client, found, recipe, tokenizer, vocabulary)
    folder = Path(recipe.vllm_adapters).expanduser() if recipe.vllm_adapters else None
    engine = ServerRollout(
        client, found, tokenizer, vocabulary=vocabulary, dtype=dtype, command=command, folder=folder, processes=here()
    )
    engine.apart, engine.start_s = apart, time.perf_counter() - began
    return engine


class ServerRollout:
    """One server, one policy. `folder`: where adapters are handed over, None for this machine's shared memory."""

    name = "vllm-server"
    apart: float | None = None
    start_s = 0.0
    ask_every_s, stall_limit_s = ASK_EVERY_S, STALL_LIMIT_S

    def __init__(
        self,
        client: Client,
        base: served.Served,
        tokenizer: Any,
        *,
        vocabulary: int,
        dtype: str,
        command: str = "",
        folder: Path | None = None,
        processes: Processes | None = None,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self.client, self.base, self.tokenizer, self.vocabulary = client, base, tokenizer, vocabulary
        self.dtype, self.command, self.folder = getattr(torch, dtype), command, folder
        self.processes, self.answer_limit_s = processes or Processes(0, 1), answer_limit_s
        self.context, self.tick = base.context or 1 << 30, silent
        self._names = (f"grpo-portable-{secrets.token_hex(4)}-{number}" for number in itertools.count(1))
        self._loaded: str | None = None  # the adapter's name on the server
        self._took_one = False
        self._scratch: Scratch | None = None

    def describe(self) -> dict[str, Any]:
        """What run.json says of the engine. The key is not in it."""
        return {
            "url": self.client.url,
            "served_model": self.base.shown,
            "context_tokens": self.base.context,
            "apart_at_start": None if self.apart is None else round(self.apart, 4),
            "start_s": round(self.start_s, 1),
        }

    def rest(self) -> None:
        """Nothing: the server's memory is not this machine's to give."""

    def sync(self, policy: Any) -> None:
        """Hand over the policy's adapter; a policy without one is the server's own base."""
        name: str | None = None
        if vllm_adapter.layout(policy) is not None:
            given = self._hand_over(policy) if self.processes.is_main else ("", None)
            name, error = self.processes.as_main_says(given)
            if error is not None:
                raise error
        before, self._loaded = self._loaded, name
        if before is not None:
            self._unload(before)

    def generate(self, prompts: Sequence[TokenIds], n: int, sampling: Sampling) -> list[list[Completion]]:
        """`n` completions of each prompt; greedy ones are made once and repeated."""
        check(prompts, n, sampling, self.context, self.vocabulary)
        sampling = seeded(sampling)
        model, drawn = self._loaded or self.base.name, n if sampling.temperature > 0 else 1
        asked = [
            server_request.body(model, ids, drawn, sampling, room=self.context - len(ids), index=index)
            for index, ids in enumerate(prompts)
        ]
        strings = StopStrings(sampling.stop_strings, self.tokenizer) if sampling.stop_strings else None
        limit_s = max(self.answer_limit_s, drawn * len(prompts) * sampling.max_tokens / SLOWEST_TOKENS_S)
        answers = self._answers(asked, limit_s)
        rows = [server_request.completions(a, drawn, vocabulary=self.vocabulary, strings=strings) for a in answers]
        return [list(group) * (n // drawn) for group in rows]

    def close(self) -> None:
        """Take the adapter off the server, if it still answers. Never raises."""
        if self._loaded is not None:
            self._unload(self._loaded)
        self._loaded = None
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _answers(self, asked: Sequence[Mapping[str, Any]], limit_s: float) -> list[Any]:
        """The server's answers in the order of the requests. Whatever ends the wait ends the server's work as well."""
        if not asked:
            return []
        pool = ThreadPoolExecutor(min(len(asked), CONNECTIONS), thread_name_prefix="vllm-server")
        try:
            futures = [pool.submit(self._answer, body, limit_s) for body in asked]
            pending: set[Future[Any]] = set(futures)
            heard = moved = time.monotonic()
            made: float | None = None
            while pending:
                done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                if not done and time.monotonic() - heard <= self.ask_every_s:
                    continue
                before, made = made, made if done else self._made()
                heard = time.monotonic()
                if done or made is None or made != before:
                    moved = heard
                elif heard - moved > self.stall_limit_s:
                    raise EngineError(
                        f"the vLLM server at {self.client.url} hangs",
                        because=f"it answers, and has made no token for {self.stall_limit_s / 60:.0f} minutes",
                    )
                self.tick()
            return [future.result() for future in futures]
        except BaseException:
            self.client.abort()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self.client.resume()

    def _made(self) -> float | None:
        """The tokens the server counts, None where it does not tell. It may take long; EngineError where it is not well."""
        self.client.get("/health", limit_s=HEALTH_LIMIT_S)
        with contextlib.suppress(EngineError):
            told = self.client.text("/metrics", limit_s=HEALTH_LIMIT_S, most_bytes=METRICS_BYTES)
            return server_request.tokens_counted(told)
        return None

    def _answer(self, body: Mapping[str, Any], limit_s: float) -> Any:
        most = server_request.most_bytes(body)
        return self.client.ask("/v1/completions", body, limit_s=limit_s, most_bytes=most)

    def _hand_over(self, policy: Any) -> tuple[str, GrpoPortableError | None]:
        """The adapter's new name there, and why it could not be handed over: every process must hear of it."""
        name = next(self._names)
        try:
            given = vllm_adapter.adapter(policy, self.dtype)
            scratch = self._room(given.nbytes)
        except GrpoPortableError as error:
            return name, error
        try:
            path = vllm_adapter.write(given, scratch.path / name)
            usual_modes(path)  # the server may be another user's
            self.client.change(
                "/v1/load_lora_adapter", server_request.adapter_body(name, str(path)), limit_s=LOAD_LIMIT_S
            )
        except EngineError as error:
            scratch.close()
            return name, self._not_taken(error)
        except BaseException:
            scratch.close()
            raise
        if self._scratch is not None:
            self._scratch.close()
        self._scratch, self._took_one = scratch, True
        return name, None

    def _room(self, size: int) -> Scratch:
        try:
            return Scratch(size, self.folder)
        except OSError as error:
            raise ServerError(
                f"adapters cannot be handed over through `{self.folder}`", because=error.strerror or str(error)
            ) from error

    def _not_taken(self, error: EngineError) -> GrpoPortableError:
        """The first adapter that is not taken is a server set up otherwise; a later one is a server that failed."""
        if self._took_one or not isinstance(error, Refused):
            return error
        fact, because = "the vLLM server did not take the adapter", error.fact
        if "No adapter found" in error.fact:
            return ServerError(
                fact,
                because=f"it sees no such folder: {because}",
                help="name a folder that both see under the same path: --set vllm_adapters=FOLDER",
            )
        return ServerError(fact, because=because, help=f"start it with: {self.command}")

    def _unload(self, name: str) -> None:
        if not self.processes.is_main:
            return
        with contextlib.suppress(EngineError):  # one that stays only takes room there
            self.client.change("/v1/unload_lora_adapter", {"lora_name": name}, limit_s=LEAVE_LIMIT_S)
