"""The device's side of a rollout: rows of state, one step over the first rows, as a CUDA graph where there is CUDA.

Each row holds its next input token, how many keys it has, where it must end, whether it is still live, and its noise. A step
feeds every row's token, draws the next and advances the live rows; rows that ended stand still until the host, which looks
once every few steps, takes them out. The host reads back the drawn tokens only, and finds the ends by the same rule.
Legend: N rows run, R rows held, L positions a row can hold, V vocabulary, C steps whose tokens are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from grpo_portable.rollout import forward
from grpo_portable.rollout.booking import State
from grpo_portable.rollout.family import Family
from grpo_portable.rollout.graphs import Graphs, free_to_repeat
from grpo_portable.rollout.kv import Cache
from grpo_portable.rollout.sampler import Drawing
from grpo_portable.rollout.upload import upload, upload_all
from grpo_portable.rollout.weights import Weights

STEPS_AHEAD, STEPS_ALONE = 1, 4  # of a launch, where others are under way when it is read, and where none is
LAUNCHES = 2  # that may be under way
STEPS = max(LAUNCHES * STEPS_AHEAD, STEPS_ALONE)  # C
Read = Callable[[], tuple[np.ndarray, np.ndarray]]  # waits for steps that were launched: what `advance` returns
SPAN = 128  # without the flash kernel a step looks at a multiple of this many positions
PREFILL_TOKENS = {"cuda": 16384, "cpu": 4096}
# A small prefill's kernels take the host longer to launch than the card to run, so sizes that come again are captured, padded
# to a multiple of WIDTH tokens so that few differ. A capture takes as long as several launches: UNCAPTURED uses come before it.
CAPTURED_TOKENS, CAPTURED_SIZES, UNCAPTURED, WIDTH = 2048, 16, 3, 64


class Landing:
    """Pinned memory for what steps drew: the copy is made beside the stream of the steps, and waited for by who reads it."""

    def __init__(self, drawn: torch.Tensor, logprobs: torch.Tensor) -> None:
        self.sources = (drawn, logprobs)
        self.held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self.sources]
        self.landed = torch.cuda.Event()

    def begin(self, beside: torch.cuda.Stream, places: np.ndarray, rows: int) -> Read:
        beside.wait_stream(torch.cuda.current_stream(self.sources[0].device))
        with torch.cuda.stream(beside):
            for into, source in zip(self.held, self.sources, strict=True):
                into.copy_(source, non_blocking=True)
            self.landed.record()

        def read() -> tuple[np.ndarray, np.ndarray]:
            self.landed.synchronize()
            tokens, logprobs = (held.numpy()[places, :rows] for held in self.held)
            return tokens, logprobs

        return read


class Decoder:
    def __init__(
        self, family: Family, rows: int, capacity: int, device: torch.device, dtype: torch.dtype, run: forward.Plain
    ) -> None:
        self.shape, self.rows, self.capacity, self.device, self.run = family.shape, rows, capacity, device, run
        self.cache = Cache(family.shape, rows, capacity, device, dtype)
        self.tables = family.rotary_tables(capacity, device, dtype)
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.limits = torch.zeros(rows, dtype=torch.long, device=device)
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self.leaders = torch.arange(rows, dtype=torch.int32, device=device)
        self.shared = torch.zeros(rows, dtype=torch.int32, device=device)
        self._sharing: tuple[list[int], list[int]] = ([], [])
        self.noise = torch.zeros(rows, capacity, dtype=torch.float64, device=device)
        self.seen: torch.Tensor | None = None
        self.stops = torch.full((1,), -1, dtype=torch.long, device=device)
        self.drawn = torch.zeros(STEPS, rows, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(STEPS, rows, dtype=torch.float32, device=device)
        self.tick = torch.zeros(1, dtype=torch.long, device=device)
        self._made = 0  # steps, of this rollout
        on_card = device.type == "cuda"
        self._landings = [Landing(self.drawn, self.logprobs) for _ in range(LAUNCHES)] if on_card else []
        self._beside = torch.cuda.Stream(device) if on_card else None
        self.graphs = Graphs(device)
        self.captures = self.graphs.enabled  # whether prefills are
        self._prompts: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._joining: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # prompts of the next step
        self._due: list[tuple[list[int], list[int], int]] = []  # copies of their keys, made after it
        self._met: Counter[tuple[int, int]] = Counter()

    def begin(self, stops: Collection[int], drawing: Drawing) -> None:
        """Prepare a rollout: its stop ids, and the marks of seen tokens where a repetition penalty reads them."""
        self.alive.zero_()
        self.tick.zero_()
        self._made = 0
        wanted = torch.tensor(sorted(stops) or [-1], device=self.device)
        if self.stops.shape != wanted.shape:
            self.stops = wanted
            self.graphs.clear()
        else:
            self.stops.copy_(wanted)
        if drawing.penalty != 1 and self.seen is None:
            self.seen = torch.zeros(self.rows, self.shape.vocab, dtype=torch.bool, device=self.device)

    def admit(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[Sequence[int]],
        holders: Sequence[int | None],
        limits: np.ndarray,
        noise: np.ndarray,
    ) -> None:
        """Give prompt b to the rows in `copies[b]`; `limits` and `noise` [rows in all, completion tokens] follow that order.

        All but a prompt's last token are prefilled, unless row `holders[b]` holds them already; the last is the row's first
        input, so that every completion token, the first too, is drawn in `advance`.
        """
        fresh = [b for b, holder in enumerate(holders) if holder is None]
        batches = self._batches([prompts[b] for b in fresh])
        for first, last in batches:
            chosen = fresh[first:last]
            self._prefill(
                weights, [prompts[b] for b in chosen], [copies[b][0] for b in chosen], joins=len(batches) == 1
            )
        for prompt, group, holder in zip(prompts, copies, holders, strict=True):
            others = list(group[1:] if holder is None else group)
            copy = [group[0] if holder is None else holder] * len(others), others, len(prompt) - 1
            if holder is None and self._joining is not None:
                self._due.append(copy)
            else:
                self.cache.copy(*copy)
        start = np.array([len(p) - 1 for p, group in zip(prompts, copies, strict=True) for _ in group])
        inputs = [p[-1] for p, group in zip(prompts, copies, strict=True) for _ in group]
        state = np.stack([[row for group in copies for row in group], inputs, start, start + limits])
        (rows, tokens, lengths, ends), numbers = upload_all([state, noise], self.device)
        self.tokens[rows], self.lengths[rows], self.limits[rows] = tokens, lengths, ends
        self.alive[rows] = True
        at = lengths[:, None] + torch.arange(noise.shape[1], device=self.device)
        self.noise[rows[:, None], at.clamp_(max=self.capacity - 1)] = numbers
        if self.seen is not None:
            for prompt, group in zip(prompts, copies, strict=True):
                marks = torch.zeros(self.shape.vocab, dtype=torch.bool, device=self.device)
                marks[upload(prompt, self.device)] = True
                self.seen[upload(group, self.device)] = marks

    def share(self, leaders: list[int], lengths: list[int]) -> None:
        """Row r's first `lengths[r]` keys are those of row `leaders[r]` too, which may be read in their place; in a step that
        prompts join they must be, since copies are made after it."""
        if (leaders, lengths) != self._sharing:
            self._sharing = (leaders, lengths)
            both = upload(np.array(self._sharing, dtype=np.int32), self.device)
            self.leaders.copy_(both[0])
            self.shared.copy_(both[1])

    def advance(self, weights: Weights, rows: int, steps: int, longest: int, drawing: Drawing) -> Read:
        """Launch `steps` steps over the first `rows` rows, none of which holds more than `longest` keys at the start.

        What is returned reads, once they are made, drawn tokens and their log-probabilities, both [steps, rows]; what stands
        behind a row's end is noise. It is to be called before the second `advance` from here, and so early that no
        more than STEPS are under way.
        """
        for done in range(steps):
            span = self._span(longest + done + 1)
            joining = self._join(weights, rows) if done == 0 else None
            step = partial(self._step, weights, rows, span, drawing, joining)
            shape = () if joining is None else joining[0].shape
            self.graphs.run((rows, span, drawing, *shape), step, self._still)
            if done == 0:
                for copy in self._due:
                    self.cache.copy(*copy)
                self._due = []
        places = (self._made + np.arange(steps)) % STEPS
        self._made += steps
        if self._beside is None:
            return lambda: (self.drawn.numpy()[places, :rows], self.logprobs.numpy()[places, :rows])
        self._landings.append(self._landings.pop(0))
        return self._landings[-1].begin(self._beside, places, rows)

    def move(self, moves: Sequence[tuple[int, int]], longest: int) -> None:
        """Copy rows (from, to) with all they hold."""
        sources, targets = zip(*moves, strict=True)
        self.cache.copy(sources, targets, min(self.capacity, longest))
        into, source = upload(targets, self.device), upload(sources, self.device)
        held = [self.tokens, self.lengths, self.limits, self.alive, self.noise] + (
            [] if self.seen is None else [self.seen]
        )
        for tensor in held:
            tensor[into] = tensor[source]

    def stop(self, rows: Sequence[int]) -> None:
        """End rows from outside: their stop string has come."""
        self.alive[upload(rows, self.device)] = False

    def _join(self, weights: Weights, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The prompts that wait for a step of `rows` rows. Only steps of all rows take them, so that few sizes are captured;
        before others they are prefilled here."""
        joining, self._joining = self._joining, None
        if joining is None or rows == self.rows:
            return joining
        prefill = partial(forward.prefill, weights, self.tables, self.cache, joining[0], joining[1], self.run)
        self.graphs.run(("prompts", *joining[0].shape), prefill, free_to_repeat)
        return None

    def _step(self, weights: Weights, rows: int, span: int, drawing: Drawing, joining: Any = None) -> None:
        tokens, lengths = self.tokens[:rows], self.lengths[:rows]
        held = forward.Rows(lengths, self.leaders[:rows], self.shared[:rows], span)
        if joining is None:
            logits = forward.step(weights, self.tables, self.cache, tokens, held, self.run)
        else:
            prompts, places, counts = joining
            logits = forward.step_with_prompts(
                weights, self.tables, self.cache, tokens, held, prompts, places, counts, self.run
            )
        seen = None if self.seen is None or drawing.penalty == 1 else self.seen[:rows]
        noise = self.noise[:rows].gather(1, lengths[:, None])[:, 0]
        drawn, logprobs = self.run.draw(logits, noise, drawing, seen)
        if seen is not None:
            seen.scatter_(1, drawn[:, None], True)
        self.run.book(self._state(), drawn, logprobs)

    def _state(self) -> State:
        return State(
            self.tokens, self.lengths, self.limits, self.alive, self.stops, self.tick, self.drawn, self.logprobs
        )

    def _still(self):
        """While a graph is warmed up and captured no row may advance: returns how to let them go on."""
        kept, tick, seen = self.alive.clone(), self.tick.clone(), None if self.seen is None else self.seen.clone()
        self.alive.zero_()

        def go_on() -> None:
            self.alive.copy_(kept)
            self.tick.copy_(tick)
            if seen is not None and self.seen is not None:
                self.seen.copy_(seen)

        return go_on

    def _span(self, needed: int) -> int:
        if self.cache.kind == "flash" or self.run.name == "fused":
            return self.capacity
        if self.device.type == "cpu":
            return min(needed, self.capacity)
        return min(-(-needed // SPAN) * SPAN, self.capacity)

    def _prefill(
        self, weights: Weights, prompts: Sequence[Sequence[int]], rows: Sequence[int], *, joins: bool = False
    ) -> None:
        """Keys and values of prompts, longest first, but for their last tokens, into `rows`; now, or if it `joins`, with the
        next step where that can be."""
        longest = len(prompts[0]) - 1
        if longest < 1:
            return
        held = self._held(len(prompts), -(-longest // WIDTH) * WIDTH) if self.captures else None
        width = -(-longest // self.run.multiple) * self.run.multiple if held is None else held[0].shape[1]
        padded = [list(p[:-1]) + [p[0]] * (width - len(p) + 1) for p in prompts]
        counts = [len(p) - 1 for p in prompts]
        given = upload_all([np.array(v, dtype=np.int64) for v in (padded, rows, counts)], self.device)
        if held is None:
            forward.prefill(weights, self.tables, self.cache, given[0], given[1], self.run)
            return
        for tensor, content in zip(held, given, strict=True):
            tensor.copy_(content)
        if joins and self.run.joins:
            self._joining = held
            return
        prefill = partial(forward.prefill, weights, self.tables, self.cache, *held[:2], self.run)
        self.graphs.run(("prompts", *held[0].shape), prefill, free_to_repeat)

    def _held(self, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Tokens [count, width], rows [count] and lengths [count] that a captured prefill reads; None for a size that is not
        worth capturing: a large one, one met a few times only, or one more than there is room for."""
        size = (count, width)
        if size not in self._prompts:
            self._met[size] += 1
            few = self._met[size] <= UNCAPTURED
            if few or count * width > CAPTURED_TOKENS or len(self._prompts) == CAPTURED_SIZES:
                return None
            tokens = torch.zeros(size, dtype=torch.long, device=self.device)
            rows, lengths = (torch.zeros(count, dtype=torch.long, device=self.device) for _ in range(2))
            self._prompts[size] = tokens, rows, lengths
        return self._prompts[size]

    def _batches(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Ranges of prompts (longest first) to prefill together: within the token budget, and little padding in each."""
        budget, ranges, first = PREFILL_TOKENS.get(self.device.type, 4096), [], 0
        for i in range(1, len(prompts) + 1):
            width = len(prompts[first])
            if i == len(prompts) or (i - first + 1) * width > budget or len(prompts[i]) < 0.75 * width - 16:
                ranges.append((first, i))
                first = i
        return ranges


def capacity_for(longest: int) -> int:
    """Positions a row is given so that rows of `longest` tokens fit: a multiple of 64, so that near sizes share one cache."""
    return -(-(longest + 1) // 64) * 64
