"""Rewards that fail: the sample is left out and counted, and a step with too many of them ends the run.

A fault is a reward that raises, or returns None, NaN, an infinity, no number, or not one entry a completion.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

from grpo_portable.errors import GrpoPortableError, RewardError, brief
from grpo_portable.rewards.setting import Reward

OnFault = Callable[[str, int, str], None]  # reward's name, index of the sample, what happened
FLOAT32_MAX = 3.4028234663852886e38  # rewards are float32 in the trainer: beyond this they are infinite there


def guarded(fn: Callable[..., Any], on_fault: OnFault) -> Reward:
    """The reward with every fault turned into None for its sample and reported to `on_fault`; it never raises.

    A batch that raises or has the wrong length is scored again one sample at a time, so that only those at fault are
    lost; a reward that must see the whole batch says so with the attribute `whole_batch = True` and loses all of it.
    Columns that the function does not name are not passed to it, and lists as copies: what it does to them no other
    reward sees. Coroutine functions are awaited.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    call = _caller(fn)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        batch = {"prompts": prompts, "completions": completions, **columns}
        values, problem = _attempt(call, batch, len(completions))
        if values is None and len(completions) > 1 and not getattr(fn, "whole_batch", False):
            singles = [_attempt(call, _row(batch, index, len(completions)), 1) for index in range(len(completions))]
            checked = [_number(single[0]) if single else (None, why) for single, why in singles]
        elif values is None:
            checked = [(None, problem)] * len(completions)
        else:
            checked = [_number(value) for value in values]
        for index, (_, why) in enumerate(checked):
            if why:
                on_fault(name, index, why)
        return [value for value, _ in checked]

    reward.__name__ = reward.__qualname__ = name
    return reward


class FaultCounter:
    """Counts the samples of a step that could not be scored, and over the run.

    Give `record` to `guarded` as its `on_fault` and call `end_step` once a step.
    """

    def __init__(self, limit: float = 0.05) -> None:
        self.limit = limit
        self.total = 0
        self._step: dict[int, list[str]] = {}

    def record(self, name: str, index: int, reason: str) -> None:
        self._step.setdefault(index, []).append(f"`{name}` {reason}")

    def end_step(self, samples: int, gather: Callable[[Any], list[Any]] = lambda mine: [mine]) -> list[str]:
        """What went wrong in this step, most frequent first; RewardError when it hit more than `limit` of its samples.

        `gather`: what it is given in each process of the run, where the samples are spread over several.
        """
        mine = len(self._step), samples, Counter(reason for found in self._step.values() for reason in found)
        self._step = {}
        parts = gather(mine)
        lost, samples = sum(part[0] for part in parts), sum(part[1] for part in parts)
        reasons: Counter[str] = sum((part[2] for part in parts), Counter())
        self.total += lost
        told = [f"{reason} ({count} x)" for reason, count in reasons.most_common()]
        if lost > self.limit * samples:
            raise RewardError(
                f"{lost} of {samples} completions of a step could not be scored",
                because="; ".join(told[:3]),
                help=f"a reward must return one finite number a completion; up to {self.limit:.0%} of a step may fail",
            )
        return told


def _caller(fn: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature takes what it is given
        return lambda batch: fn(**batch)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004

    def call(batch: dict[str, Any]) -> Any:
        given = {key: value for key, value in batch.items() if takes_all or key in named}
        result = fn(**{key: list(value) if isinstance(value, list) else value for key, value in given.items()})
        return asyncio.run(result) if is_async else result

    return call


def _attempt(call: Callable[[dict[str, Any]], Any], batch: dict[str, Any], n: int) -> tuple[list[Any] | None, str]:
    try:
        returned = call(batch)
        values = list(returned)
    except (GrpoPortableError, KeyboardInterrupt):  # the second is a wish to stop
        raise
    except BaseException as error:  # a reward is somebody else's code: it may call sys.exit, or cancel itself
        return None, f"raised {type(error).__name__}: {_text(error)}"
    if len(values) != n:
        return None, f"returned {len(values)} rewards for {n} completions"
    return values, ""


def _text(error: BaseException) -> str:
    try:
        return brief(str(error), 120)
    except Exception:  # the error is somebody else's code too
        return "(an error that cannot be told)"


def _row(batch: dict[str, Any], index: int, n: int) -> dict[str, Any]:
    return {k: [v[index]] if isinstance(v, list | tuple) and len(v) == n else v for k, v in batch.items()}


def _number(value: Any) -> tuple[float | None, str]:
    if value is None:
        return None, "returned None"
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return None, f"returned {type(value).__name__}, no number"
    try:
        number = float(value)
    except Exception as error:  # a tensor of many elements, an int beyond float; the value is somebody else's code too
        return None, f"returned {type(value).__name__}, no number ({type(error).__name__})"
    if not abs(number) <= FLOAT32_MAX:
        return None, f"returned {number}"
    return number, ""
