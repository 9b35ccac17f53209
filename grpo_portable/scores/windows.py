"""metrics.jsonl read as a story: windows of steps, each with a word of diagnosis; and does the reward agree with evaluation?

Pure functions over step records (dicts as in metrics.jsonl); any number may be missing, null or not finite, and then is not
counted. A step written twice, as after a resume, counts as written last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_portable.scores import stats

WORDS = {
    "climbing": "the reward rises beyond its noise over this window and the two before it",
    "flat": "no trend beyond the noise",
    "falling": "the reward falls beyond its noise",
    "collapsing": "most of what had been gained is lost again",
    "no spread": "nearly all groups have equal rewards, so there is nothing to learn from",
    "truncating": "at least half of the completions hit the length limit",
    "skipping": "at least half of the updates were not finite and left out",
    "unknown": "no reward was recorded",
}
MOST_WINDOWS = 8
SIZES = (5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)

Step = Mapping[str, Any]


@dataclass(frozen=True)
class Window:
    """Means over the steps first..last; `memory_gib` is the peak, shares are fractions of 1. None: not recorded."""

    first: int
    last: int
    loss: float | None
    reward: float | None
    zero_spread: float | None
    truncated: float | None
    completion_tokens: float | None
    memory_gib: float | None
    step_s: float | None
    word: str


@dataclass(frozen=True)
class Agreement:
    """Training's mean correctness at its start and end beside the evaluation before and after; shares of 1."""

    steps: int  # steps averaged at each end
    start: float
    end: float
    rise_interval: stats.Interval
    word: str  # agree | training only | evaluation only | opposite
    message: str


def steps_in_order(records: Iterable[Step]) -> list[Step]:
    """One record a step, in order; the last record of a step written twice."""
    last = {int(step): r for r in records if (step := number(r, "step")) is not None}
    return [last[step] for step in sorted(last)]


def number(record: Step, key: str) -> float | None:
    """A finite number, else None."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def series(steps: Sequence[Step], read: str | Callable[[Step], float | None]) -> tuple[list[int], list[float]]:
    """Steps and values of one metric (a key, or a function of the record) where it was recorded."""
    pick = (lambda r: number(r, read)) if isinstance(read, str) else read
    found = [(int(r["step"]), value) for r in steps if (value := pick(r)) is not None]
    return [step for step, _ in found], [value for _, value in found]


def reward_names(steps: Sequence[Step]) -> list[str]:
    """Names of the reward components, in the order they first occur."""
    return list(dict.fromkeys(name for r in steps for name in _rewards(r)))


def _rewards(record: Step) -> Mapping[str, Any]:
    found = record.get("rewards")
    return found if isinstance(found, Mapping) else {}


def component(name: str) -> Callable[[Step], float | None]:
    """Reads one reward component out of a step record."""
    return lambda record: number(_rewards(record), name)


def windows(steps: Sequence[Step]) -> list[Window]:
    """At most eight windows of equal, round size over all steps (at most ten when the size cannot be rounder)."""
    if not steps:
        return []
    size = window_size(len(steps))
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    if len(parts) > 1 and len(parts[-1]) < 3:  # a tail too short to say anything about joins its neighbour
        parts[-2:] = [[*parts[-2], *parts[-1]]]
    return [_window(part, diagnose(parts[: i + 1])) for i, part in enumerate(parts)]


def whole(steps: Sequence[Step]) -> Window | None:
    """All steps as one window, its word from the trend over the run."""
    return _window(steps, diagnose([steps])) if steps else None


def window_size(steps: int) -> int:
    """The smallest round size that needs no more than eight windows."""
    return next((size for size in SIZES if size * MOST_WINDOWS >= steps), math.ceil(steps / MOST_WINDOWS))


def diagnose(parts: Sequence[Sequence[Step]]) -> str:
    """The word for the last of several consecutive windows (see WORDS), the first rule that holds."""
    part = parts[-1]
    if 2 * sum(bool(r.get("skipped")) for r in part) >= len(part):
        return "skipping"
    if (_mean(part, "truncated") or 0) >= 0.5:
        return "truncating"
    if (_mean(part, "zero_spread") or 0) >= 0.9:
        return "no spread"
    means = [mean for p in parts if (mean := _mean(p, "reward")) is not None]
    if _mean(part, "reward") is None:
        return "unknown"
    slope, t, limit = trend(*series([r for p in parts[-3:] for r in p], "reward"))
    word = "flat" if abs(t) < limit else "climbing" if slope > 0 else "falling"
    lost = word != "climbing" and len(means) > 1 and _collapsed(means, parts)
    return "collapsing" if lost else word


def trend(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Least-squares slope, its t, and the |t| above which it is beyond noise at the 5 % level."""
    n = len(xs)
    if n < 3:
        return 0.0, 0.0, math.inf
    mx, my = math.fsum(xs) / n, math.fsum(ys) / n
    sxx = math.fsum((x - mx) ** 2 for x in xs)
    slope = math.fsum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sxx
    residual = math.fsum((y - my - slope * (x - mx)) ** 2 for x, y in zip(xs, ys, strict=True))
    se = math.sqrt(max(residual, 0.0) / (n - 2) / sxx)
    # Student's t at 97.5 %, to within 0.15 from 2 degrees of freedom on
    limit = stats.Z + 2.4 / (n - 2) + 5 / (n - 2) ** 2
    if se < 1e-12 * max(abs(slope), 1e-300):
        return slope, math.copysign(math.inf, slope) if slope else 0.0, limit
    return slope, slope / se, limit


def agreement(steps: Sequence[Step], scores: Mapping[str, Any], name: str = "correctness") -> Agreement | None:
    """Did training's own correctness move as the evaluation did? None without that reward, 10 steps, or a scored delta.

    Training sees other questions, sampled, so levels may differ; directions should not.
    """
    _, values = series(steps, component(name))
    if len(values) < 10 or not scores.get("against") or not all(0 <= v <= 1 for v in values):
        return None
    ends = max(5, len(values) // 10)
    first, last = values[:ends], values[-ends:]
    start, end = math.fsum(first) / ends, math.fsum(last) / ends
    se = math.sqrt(math.fsum((_spread(part) ** 2) / ends for part in (first, last)))
    rise = (end - start - stats.Z * se, end - start + stats.Z * se)
    trained = 0 if rise[0] <= 0 <= rise[1] else 1 if end > start else -1
    evaluated = {"higher": 1, "lower": -1}.get(scores["verdict"], 0)
    word, message = _agreement_words(trained, evaluated)
    return Agreement(ends, start, end, rise, word, message)


def _agreement_words(trained: int, evaluated: int) -> tuple[str, str]:
    moved = {1: "rose", -1: "fell", 0: "is not shown to have moved"}
    both = f"training's correctness {moved[trained]}, the held-out accuracy {moved[evaluated]}"
    if trained == evaluated:
        return "agree", f"{both}: they agree"
    if evaluated == 0:
        return "training only", f"{both}: what was learnt is not shown to carry over to questions it did not train on"
    if trained == 0:
        return "evaluation only", f"{both}: look whether prompts and length limits of the two are the same"
    return "opposite", f"{both}: the reward does not measure what the evaluation does"


def _window(part: Sequence[Step], word: str) -> Window:
    memory = series(part, "memory_gib")[1]
    return Window(
        first=int(part[0]["step"]),
        last=int(part[-1]["step"]),
        loss=_mean(part, "loss"),
        reward=_mean(part, "reward"),
        zero_spread=_mean(part, "zero_spread"),
        truncated=_mean(part, "truncated"),
        completion_tokens=_mean(part, "completion_tokens"),
        memory_gib=max(memory) if memory else None,
        step_s=_mean(part, "step_s"),
        word=word,
    )


def _collapsed(means: Sequence[float], parts: Sequence[Sequence[Step]]) -> bool:
    """The last mean is far below the best one before it, by noise and by more than half of what had been gained."""
    best, fallen = max(means[:-1]), max(means[:-1]) - means[-1]
    noise = math.sqrt(math.fsum(_spread(series(p, "reward")[1]) ** 2 for p in parts) / len(parts))
    error = noise * math.sqrt(2 / len(parts[-1]))
    return fallen > 3 * error and fallen > 0.5 * (best - means[0]) and fallen > 0.05 * max(abs(best), 1e-12)


def _mean(part: Sequence[Step], key: str) -> float | None:
    values = series(part, key)[1]
    return math.fsum(values) / len(values) if values else None


def _spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
