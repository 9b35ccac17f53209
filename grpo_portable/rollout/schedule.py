"""Which rows a batch holds: waiting requests come in, finished rows go out, live rows move down. Pure; the device is elsewhere.

A request is one completion of one prompt, numbered `prompt * n + sample`. Rows are slots of the KV cache, 0 to capacity - 1;
the device runs the first `bucket` of them, so live rows are kept at the low end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """Requests of one prompt that are admitted together and share its prefill."""

    prompt: int
    requests: tuple[int, ...]


@dataclass
class Schedule:
    """`owner[row]` is the request in a row, or None."""

    capacity: int
    waiting: list[Part]  # last one first
    owner: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.owner = [None] * self.capacity

    @property
    def live(self) -> list[int]:
        return [row for row, request in enumerate(self.owner) if request is not None]

    @property
    def requests(self) -> list[int]:
        """Whose the live rows are, in their order."""
        return [request for request in self.owner if request is not None]

    @property
    def done(self) -> bool:
        return not self.waiting and not any(request is not None for request in self.owner)

    @property
    def due(self) -> bool:
        """Whether `admit` would place any request."""
        free = self.owner.count(None)
        return bool(self.waiting) and (free == self.capacity or free >= self._enough())

    def admit(self) -> list[tuple[Part, tuple[int, ...]]]:
        """Parts and the rows they now own.

        Rows are handed out once a 32nd of them is free: a step's time hardly depends on its rows, so an empty one is lost.
        A group that does not fit whole is split; the rest takes the prompt's keys from a row that still holds them.
        """
        if not self.due:
            return []
        free = [row for row, request in enumerate(self.owner) if request is None]
        admitted = []
        while free and self.waiting:
            part = self.waiting.pop()
            now, later = part.requests[: len(free)], part.requests[len(free) :]
            if later:
                self.waiting.append(Part(part.prompt, later))
            rows, free = tuple(free[: len(now)]), free[len(now) :]
            for row, request in zip(rows, now, strict=True):
                self.owner[row] = request
            admitted.append((Part(part.prompt, now), rows))
        return admitted

    def rows_of(self, requests: Collection[int]) -> list[int]:
        """The rows these requests lie in now."""
        wanted = set(requests)
        return [row for row, request in enumerate(self.owner) if request in wanted]

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.owner[row] = None

    def holders(self, n: int) -> dict[int, int]:
        """The lowest live row of each prompt that has one; `n` requests a prompt."""
        return {request // n: row for row, request in reversed([*enumerate(self.owner)]) if request is not None}

    def leaders(self, n: int) -> list[int]:
        """For each row the lowest live row of the same prompt; itself when it is not live."""
        first = self.holders(n)
        return [row if request is None else first[request // n] for row, request in enumerate(self.owner)]

    def compact(self, buckets: Sequence[int]) -> list[tuple[int, int]]:
        """Moves (from, to) that let the live rows run in the smallest bucket they fit in; none while rows wait to be filled."""
        live = self.live
        if not live or self.due:
            return []
        goal = bucket_of(len(live), buckets)
        if goal >= self.bucket(buckets):
            return []
        high = [row for row in live if row >= goal]
        low = [row for row in range(goal) if self.owner[row] is None]
        moves = list(zip(high, low, strict=False))
        for source, target in moves:
            self.owner[target], self.owner[source] = self.owner[source], None
        return moves

    def bucket(self, buckets: Sequence[int]) -> int:
        """Rows the device must run."""
        return bucket_of(self.live[-1] + 1, buckets)

    def _enough(self) -> int:
        return max(1, self.capacity // 32)


def plan(lengths: Sequence[int], n: int, capacity: int) -> Schedule:
    """A schedule for `n` completions of each prompt: longest prompts first, so that one prefill batch holds like lengths."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts = [Part(i, tuple(range(i * n, i * n + n))) for i in order]
    return Schedule(capacity, parts[::-1])


def row_buckets(capacity: int) -> tuple[int, ...]:
    """Row counts a graph is captured for, up to `capacity`: powers of two to 8, multiples of 8 to 64, then a quarter apart."""
    sizes, size = [], 1
    while size < capacity:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return (*sizes, capacity)


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    return next(size for size in buckets if size >= rows)
