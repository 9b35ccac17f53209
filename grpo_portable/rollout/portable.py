"""The portable rollout engine: continuous batching over a static KV cache in plain torch, no vLLM, no nvcc, no Triton needed.

`make(model, tokenizer, rows=...)` gives a Rollout: this engine for the families it knows, the reference engine for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from doctor.probes_host import available_gib
from grpo_portable.errors import DataError, EngineError, EngineUnsupported
from grpo_portable.rollout import delta, fp8, kv, trial
from grpo_portable.rollout.decoder import STEPS_AHEAD, STEPS_ALONE, Decoder, Read, capacity_for
from grpo_portable.rollout.family import read
from grpo_portable.rollout.protocol import Completion, Rollout, Sampling, TokenIds, silent
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.rollout.requests import check, noises, seeded
from grpo_portable.rollout.sampler import Drawing, drawing_of, uniform
from grpo_portable.rollout.schedule import Schedule, plan, row_buckets
from grpo_portable.rollout.stops import StopStrings
from grpo_portable.rollout.weights import PRODUCTS, Keeper, copy_bytes

COPIES = ("auto", "none", "bf16", "fp8")
HOST_SHARE = 1 / 16  # of a CPU's free memory may go to a copy: less than what the plan leaves free


def make(model: Any, tokenizer: Any, *, rows: int, copy: str = "auto", dtype: torch.dtype | None = None) -> Rollout:
    """The fastest engine that runs this policy: PortableRollout, or ReferenceRollout with the reason in its `because`.

    `rows` completions are generated at once. `copy`: `bf16` a rollout copy in the type products run in, `fp8` an FP8 copy,
    `none` the policy's own weights, `auto` a copy if memory allows. `fp8` raises EngineUnsupported where it does not work.
    """
    try:
        return PortableRollout(model, tokenizer, rows=rows, copy=copy, dtype=dtype)
    except EngineUnsupported as unsupported:
        if copy == "fp8":
            raise
        return ReferenceRollout(model, tokenizer, rows=rows, because=str(unsupported))


class PortableRollout:
    """An engine bound to one policy. `rows` completions run at once; `max_context` caps prompt plus completion."""

    name = "portable"

    def __init__(
        self,
        policy: Any,
        tokenizer: Any,
        *,
        rows: int,
        copy: str = "auto",
        dtype: torch.dtype | None = None,
        max_context: int | None = None,
        fuse: bool | None = None,
    ) -> None:
        if rows < 1 or copy not in COPIES:
            raise EngineError(
                f"an engine with rows={rows} and copy={copy!r} makes no sense", help=f"rows from 1, copy of {COPIES}"
            )
        self.tokenizer, self.rows, self.copy, self.dtype, self.fuse = tokenizer, rows, copy, dtype, fuse
        self.max_context = max_context
        self.tick = silent
        self._bind(policy)
        self._decoder: Decoder | None = None
        self._kv_bytes = 0
        self.ahead = self.keeper.device.type == "cuda"  # whether the next steps are launched before the last are read
        self._flying: deque[_Flight] = deque()  # steps that were launched and not read, oldest first
        self.row_steps = 0  # rows run, summed over the steps of the last rollout: its cost, beside the tokens it made

    def sync(self, policy: Any) -> None:
        """Take over the policy's current weights; no keys or values outlive a rollout, so the next one uses only these."""
        if "policy" not in self.__dict__:
            raise EngineError("this engine was closed")
        if "keeper" not in self.__dict__ or read(policy) != self.family or self._addresses() != self._bound:
            # an adapter has come or gone, or the policy is another: what the old copy and cache take is free for the new ones,
            # and where there is no room for these, no old weights are left to sample from
            self._decoder = None
            self.__dict__.pop("keeper", None)
            self._bind(policy)
        else:
            self.keeper.refresh()

    def holds(self) -> dict[str, float | None]:
        """GiB of its own weights, none where it reads the policy's, and of the largest KV cache it has had."""
        return {"weights": self.keeper.own_bytes() / 2**30, "kv_cache": self._kv_bytes / 2**30}

    def rest(self) -> None:
        """Free the cache and the graphs until the next rollout, which makes them anew in about a second."""
        self._decoder = None

    def close(self) -> None:
        """Free the copy, the cache and the graphs. The policy's weights are untouched."""
        self._decoder = None
        self.__dict__.pop("keeper", None)
        self.__dict__.pop("policy", None)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[TokenIds], n: int, sampling: Sampling, *, limits: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """`n` completions of each prompt. `limits`, from 1 and one a completion in prompt order, may end some before
        `max_tokens`."""
        if "keeper" not in self.__dict__:
            raise EngineError("this engine was closed, or could not take over its last policy")
        check(prompts, n, sampling, self.context, self.family.shape.vocab)
        if not prompts:
            return []
        room = [min(sampling.max_tokens, self.context - len(p)) for p in prompts for _ in range(n)]
        if limits is not None:
            if len(limits) != len(room) or min(limits) < 1:
                raise DataError(
                    f"{len(limits)} limits, the least of {min(limits, default=0)}, for {len(room)} completions",
                    help="limit each completion to at least one token",
                )
            room = [min(a, b) for a, b in zip(room, limits, strict=True)]
        run = _Run(prompts, n, room, sampling, self.tokenizer)
        decoder = self._decoder_for(
            max(len(p) + t for p, t in zip((p for p in prompts for _ in range(n)), room, strict=True))
        )
        self.row_steps = 0
        try:
            self._serve(decoder, plan([len(p) for p in prompts], n, self.rows), run)
            return run.completions()
        except BaseException:
            # a diverged policy's keys are not numbers, and no mask hides those from the next rollout
            self._decoder = None
            raise
        finally:
            self._flying.clear()

    def _serve(self, decoder: Decoder, schedule: Schedule, run: _Run) -> None:
        with _quietly(self.keeper.device), self.keeper.in_use() as weights:
            decoder.begin(run.stops, run.drawing)
            while not schedule.done:
                self._turn(decoder, weights, schedule, run)
                self.tick()

    def _turn(self, decoder: Decoder, weights: Any, schedule: Schedule, run: _Run) -> None:
        """Admit, launch a few steps, take the finished out, close the gaps.

        On a card the finished are those of the steps before, so that it computes while the host books and admits; what is
        known of a row is then a launch old, and an ended one stands still for as long.
        """
        self._admit(decoder, weights, schedule, run)
        under_way = 1 if self._launch(decoder, weights, schedule, run) and self.ahead else 0
        while len(self._flying) > under_way:
            self._land(decoder, schedule, run, self._flying.popleft())

    def _land(self, decoder: Decoder, schedule: Schedule, run: _Run, flight: _Flight) -> None:
        finished, cut = run.take(flight)
        if cut:
            decoder.stop(schedule.rows_of(cut))
        schedule.release(schedule.rows_of(finished))
        if moves := schedule.compact(self.buckets):
            decoder.move(moves, int(run.keys(schedule.requests).max()))

    def _admit(self, decoder: Decoder, weights: Any, schedule: Schedule, run: _Run) -> None:
        holder = schedule.holders(run.n)
        if admitted := schedule.admit():
            wanted = [request for part, _ in admitted for request in part.requests]
            decoder.admit(
                weights,
                [run.prompts[part.prompt] for part, _ in admitted],
                [rows for _, rows in admitted],
                [holder.get(part.prompt) for part, _ in admitted],
                run.room[wanted],
                uniform([run.noises[request] for request in wanted], int(run.room[wanted].max())),
            )

    def _launch(self, decoder: Decoder, weights: Any, schedule: Schedule, run: _Run) -> bool:
        """Send the next steps on their way; False where those on their way already end every row."""
        live, requests = schedule.live, schedule.requests
        steps = min(self._steps_a_launch, int(run.left(requests).max()))
        if steps < 1:
            return False
        decoder.share(schedule.leaders(run.n), [0 if r is None else int(run.prefilled[r]) for r in schedule.owner])
        rows = schedule.bucket(self.buckets)
        self.row_steps += rows * steps
        read = decoder.advance(weights, rows, steps, int(run.keys(requests).max()), run.drawing)
        run.coming[requests] += steps
        self._flying.append(_Flight(live, requests, steps, read))
        return True

    def _buckets(self) -> tuple[int, ...]:
        """Row counts a step may run with: any on the CPU, few where each is a captured graph, multiples of 16 for the library's
        FP8 products."""
        if self.keeper.device.type != "cuda":
            return tuple(range(1, self.rows + 1))
        step = fp8.ROWS if self.keeper.kind == "fp8" else 1
        return tuple(b for b in row_buckets(self.rows) if b % step == 0 or b <= self.run.free_rows)

    @property
    def _steps_a_launch(self) -> int:
        """One where the host works meanwhile, since an ended row stands still for a launch."""
        return STEPS_AHEAD if self.ahead else STEPS_ALONE

    def _bind(self, policy: Any) -> None:
        self.policy, self.family = policy, read(policy)
        modules = [m for block in self.family.blocks for m in (*block.qkv, block.out, *block.gate_up, block.down)]
        dtype = self.dtype or delta.compute_dtype(modules)
        kind = self._kind(dtype, modules)
        self.keeper = Keeper(self.family, kind, dtype if kind != "live" else delta.compute_dtype(modules))
        with _quietly(self.keeper.device):
            layer = self.keeper.weights.layers[0]
            self.run = trial.choose(self.family.shape, layer, self.keeper.device, self.keeper.dtype, self.fuse)
        self._bound = self._addresses()
        self.context = min(self.family.shape.context, self.max_context or self.family.shape.context)
        if self.keeper.kind == "fp8" and self.rows > self.run.free_rows:
            self.rows = -(-self.rows // fp8.ROWS) * fp8.ROWS
        self.buckets = self._buckets()

    def _kind(self, dtype: torch.dtype, modules: list) -> str:
        device = delta.base_of(modules[0]).weight.device
        if self.copy == "fp8":
            for sizes in {(delta.base_of(m).in_features, delta.base_of(m).out_features) for m in modules}:
                if (reason := fp8.why_not(device, *sizes)) is not None:
                    raise EngineUnsupported("an FP8 rollout copy does not work here", because=reason)
            return "fp8"
        if self.copy != "auto":
            return "copy" if self.copy == "bf16" else "live"
        need = copy_bytes(self.family, "copy", dtype)
        if device.type != "cuda":
            room = available_gib()
            spare = room is None or need <= HOST_SHARE * room * 2**30 or any(delta.is_quantised(m) for m in modules)
            return "copy" if spare else "live"
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
        if any(delta.is_quantised(m) for m in modules):  # the other way is transformers' generate, many times slower
            return "copy" if need < 0.75 * free else "live"
        return "copy" if need + kv.bytes_of(self.family.shape, self.rows, 512, dtype) < 0.75 * free else "live"

    def _addresses(self) -> tuple[int, ...]:
        """Where the tensors lie that are read from the policy itself; a move makes captured graphs stale."""
        family = self.family
        modules = [family.embed, family.head, family.norm, *(b.norm_in for b in family.blocks)]
        if self.keeper.kind == "live":
            modules += [m for b in family.blocks for name in PRODUCTS for m in _tuple(getattr(b, name))]
        return tuple(delta.base_of(m).weight.data_ptr() for m in modules)

    def _decoder_for(self, longest: int) -> Decoder:
        capacity = capacity_for(longest)
        if self._decoder is None or self._decoder.capacity < capacity:
            self._decoder = None  # free the old cache before the new one is made
            self._decoder = Decoder(self.family, self.rows, capacity, self.keeper.device, self.keeper.dtype, self.run)
            self._kv_bytes = max(self._kv_bytes, self._decoder.cache.all.nbytes)
        return self._decoder


class _Flight(NamedTuple):
    """Steps that were launched: rows live then, whose they were, and what waits for their tokens."""

    live: list[int]
    requests: list[int]
    steps: int
    read: Read


class _Run:
    """The host's side of one `generate`: tokens as they come, request by request."""

    def __init__(
        self, prompts: Sequence[TokenIds], n: int, room: list[int], sampling: Sampling, tokenizer: Any
    ) -> None:
        self.prompts, self.n, self.room = [list(map(int, p)) for p in prompts], n, np.array(room)
        self.prefilled = np.repeat([len(p) - 1 for p in prompts], n)
        self.drawing: Drawing = drawing_of(sampling)
        self.stops = frozenset(sampling.stop_ids)
        self.strings = StopStrings(sampling.stop_strings, tokenizer) if sampling.stop_strings else None
        self.noises = noises(seeded(sampling), len(prompts), n)
        longest = max(room)
        self.tokens = np.zeros((len(room), longest), dtype=np.int64)
        self.logprobs = np.zeros((len(room), longest), dtype=np.float32)
        self.count = np.zeros(len(room), dtype=np.int64)
        self.coming = np.zeros(len(room), dtype=np.int64)  # steps launched and not read yet
        self.stopped = np.zeros(len(room), dtype=bool)
        self._stop_array = np.array(sorted(self.stops), dtype=np.int64)

    def left(self, requests: list[int]) -> np.ndarray:
        """Tokens each request may still draw, beside those on their way."""
        return self.room[requests] - self.count[requests] - self.coming[requests]

    def keys(self, requests: list[int]) -> np.ndarray:
        """Keys each request's row holds at most, once what was launched is made."""
        return self.prefilled[requests] + self.count[requests] + self.coming[requests]

    def take(self, flight: _Flight) -> tuple[list[int], list[int]]:
        """Book what a flight drew. Requests that are finished by it, and those of them only the host knows of."""
        tokens, logprobs = flight.read()
        self.coming[flight.requests] -= flight.steps
        at = np.array(flight.requests)
        # others had ended before, which was unknown when the flight was launched
        going = ~self.stopped[at] & (self.count[at] < self.room[at])
        at, live = at[going], np.array(flight.live)[going]
        tokens, logprobs, before = tokens[:, live], logprobs[:, live], self.count[at]
        is_stop = np.isin(tokens, self._stop_array)
        first = np.where(is_stop.any(0), is_stop.argmax(0) + 1, len(tokens) + 1)
        new = np.minimum(np.minimum(first, len(tokens)), self.room[at] - before)
        self.stopped[at] |= first <= new
        step, row = np.nonzero(np.arange(len(tokens))[:, None] < new)
        self.tokens[at[row], before[row] + step] = tokens[step, row]
        self.logprobs[at[row], before[row] + step] = logprobs[step, row]
        self.count[at] = before + new
        cut = [] if self.strings is None else self._cut(at, before)
        ended = self.stopped[at] | (self.count[at] == self.room[at])
        return at[ended].tolist(), cut

    def _cut(self, requests: np.ndarray, before: np.ndarray) -> list[int]:
        """End requests whose text holds a stop string, at the token that completes it."""
        cut = []
        for request, known in zip(requests.tolist(), before.tolist(), strict=True):
            assert self.strings is not None
            end = self.strings.end(self.tokens[request, : self.count[request]].tolist(), known)
            if end is not None:
                self.count[request], self.stopped[request] = end, True
                cut.append(request)
        return cut

    def completions(self) -> list[list[Completion]]:
        if not np.isfinite(self.logprobs).all():
            raise EngineError(
                "the model gave logits that are not numbers", help="check the weights: a diverged policy does this"
            )
        rows = [
            Completion(
                tuple(self.tokens[i, : self.count[i]].tolist()),
                tuple(self.logprobs[i, : self.count[i]].tolist()),
                "stop" if self.stopped[i] else "length",
            )
            for i in range(len(self.room))
        ]
        return [rows[i : i + self.n] for i in range(0, len(rows), self.n)]


@contextmanager
def _quietly(device: torch.device) -> Iterator[None]:
    """On the policy's device, and in the types the weights have whatever autocast the caller is in.

    On the CPU also without the records torch keeps for gradients, which cost small calls there a twentieth of their time.
    """
    # inference_mode(False) would not do for the others: it turns gradients on
    lean: Any = torch.inference_mode() if device.type == "cpu" else nullcontext()
    with torch.autocast(device.type, enabled=False), lean:
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield


def _tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)
