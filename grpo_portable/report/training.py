"""The report's rooms on training: step windows with a word each, and reward against accuracy. Values → markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_portable.report.markdown import table
from grpo_portable.scores import windows
from grpo_portable.scores.verdict import percent, span


def window_table(steps: Sequence[windows.Step]) -> list[str]:
    """Loss, reward, spread, truncation, length, memory and time by window of steps, and what each window shows."""
    found = windows.windows(steps)
    if not found:
        return []
    overall = windows.whole(steps)
    rows = [_row(f"{w.first}-{w.last}", w) for w in found]
    if overall and len(found) > 1:
        rows.append(_row("all", overall))
    head = ["steps", "loss", "reward", "no spread", "cut off", "tokens", "memory", "s/step", "diagnosis"]
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    words = list(dict.fromkeys(w.word for w in [*found, *([overall] if overall else [])]))
    legend = "; ".join(f"*{word}*: {windows.WORDS[word]}" for word in words)
    rows = [[row[i] for i in keep] for row in rows]
    return [*table([head[i] for i in keep], rows, right=range(len(keep) - 1)), "", f"{legend}."]


def agreement(steps: Sequence[windows.Step], scores: Mapping[str, Any]) -> list[str]:
    """One sentence: does training's own correctness say what the evaluation says? [] when it cannot be told."""
    found = windows.agreement(steps, scores)
    if found is None:
        return []
    mark = "" if found.word == "agree" else "**Warning:** "
    return [
        f"{mark}{found.message[0].upper()}{found.message[1:]}. Training: {percent(found.start)} correct in the first "
        f"{found.steps} steps, {percent(found.end)} in the last {found.steps} "
        f"(change {span(found.rise_interval, sign=True)} points); evaluation: {percent(scores['base'])}, then "
        f"{percent(scores['tuned'])} (change {span(scores['interval'], sign=True)}). Training's are sampled answers to other "
        "questions, so the levels need not be equal."
    ]


def _row(name: str, w: windows.Window) -> list[str]:
    return [
        name,
        _number(w.loss, 4),
        _number(w.reward, 3),
        "" if w.zero_spread is None else f"{100 * w.zero_spread:.0f} %",
        "" if w.truncated is None else f"{100 * w.truncated:.0f} %",
        _number(w.completion_tokens, 0),
        "" if w.memory_gib is None else f"{w.memory_gib:.2f} GiB",
        _number(w.step_s, 1 if (w.step_s or 0) >= 10 else 2),
        w.word,
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
