"""What scores say in words: the one sentence, the warnings that belong beside it, and how their numbers are written.

Pure functions over the content of scores.json; computes no statistics of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STAGE_NAMES = {"base": "the base model", "bootstrap": "the bootstrapped model", "tuned": "the tuned model"}


def sentence(scores: Mapping[str, Any]) -> str:
    """The verdict of a run in one sentence, also when a stage or the whole evaluation is missing."""
    stages = scores.get("stages") or {}
    if not stages:
        return "Nothing was evaluated yet, so nothing can be said about accuracy."
    if not scores.get("against"):
        stage, found = next(reversed(list(stages.items())))
        strict = found["strict"]
        return (
            f"{STAGE_NAMES[stage].capitalize()} answers {strict['correct']:,} of {found['n']:,} questions rightly, "
            f"{percent(strict['accuracy'])} strict (95 % interval {span(strict['wilson95'])}); "
            "no second model was evaluated, so there is no delta."
        )
    strict = scores["strict"]
    start = " after the bootstrap" if scores["against"] == "bootstrap" else ""
    verb = {"higher": "raised", "lower": "lowered"}.get(strict["verdict"], "moved")
    end = {
        "higher": "the gain is beyond the noise of these questions",
        "lower": "the loss is beyond the noise of these questions",
    }.get(strict["verdict"], "not shown to differ")
    if strict["verdict"] == "higher" and scores["lenient"]["verdict"] != "higher":
        of_format = "it is one of format: " if _is_format(scores) else "small: "
        end = f"the gain is beyond the noise of these questions, but {of_format}{_lenient(scores)}"
    subject = str(scores.get("subject") or "GRPO")
    way = f"{verb} strict accuracy from {percent(strict['base'])}{start} to {percent(strict['tuned'])}"
    if not strict["delta"]:
        way = f"left strict accuracy at {percent(strict['base'])}{start and f', as{start},'}"
    return (
        f"{subject[0].upper()}{subject[1:]} {way} "
        f"on {strict['n']:,} questions ({points(strict['delta'])} points, 95 % interval {span(strict['interval'], sign=True)}, "
        f"exact {p_text(strict['p'])}): {end}."
    )


def warnings(scores: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a reader must know before believing the delta, as {kind, message}; kinds: not_shown, format, sampled."""
    if not scores.get("against"):
        return []
    found = {"not_shown": _not_shown(scores["strict"]), "format": _format(scores), "sampled": _sampled(scores)}
    return [{"kind": kind, "message": message} for kind, message in found.items() if message]


def _not_shown(strict: Mapping[str, Any]) -> str | None:
    if strict["verdict"] != "not shown to differ":
        return None
    interval = f"the 95 % interval {span(strict['interval'], sign=True)}"
    if strict["interval"][0] <= 0 <= strict["interval"][1]:
        why = f"{interval} holds zero"
    else:
        why = f"{interval} leaves zero out, but the exact test does not ({p_text(strict['p'])})"
    least = strict["smallest_detectable"]
    if least is None:
        return f"{why}; {strict['n']} questions are too few to show any delta"
    shown = points(least, sign=False)
    return (
        f"{why}; {strict['n']:,} questions show a delta of {shown} points four times in five, a smaller one less often"
    )


def _format(scores: Mapping[str, Any]) -> str | None:
    strict, lenient, gain = scores["strict"], scores["lenient"], scores["format_gain"]
    moved = f"strict accuracy moved by {points(strict['delta'])} points, lenient by {points(lenient['delta'])}"
    rose, lenient_rose = strict["verdict"] == "higher", lenient["verdict"] == "higher"
    if rose and not lenient_rose and not _is_format(scores):
        return f"{moved} ({p_text(lenient['p'])}): {_lenient(scores)} by itself, though the two do not differ from each other"
    if rose and not lenient_rose:
        return f"{moved}: the gain is in the format of the answers, not in the answers themselves; {_lenient(scores)}"
    if lenient_rose and not rose:
        return f"{moved}: the answers got better, the format in which they are asked for did not"
    if rose and gain["interval"][0] > 0 and gain["delta"] >= 0.01:
        return f"{moved}: about {points(gain['delta'], sign=False)} points of the gain are format, the rest is answers"
    return None


def _is_format(scores: Mapping[str, Any]) -> bool:
    """Whether strict accuracy rose more than lenient did, beyond chance, or lenient accuracy fell."""
    return scores["format_gain"]["interval"][0] > 0 or scores["lenient"]["verdict"] == "lower"


def _lenient(scores: Mapping[str, Any]) -> str:
    fell = scores["lenient"]["verdict"] == "lower"
    return f"lenient accuracy {'fell' if fell else 'is not shown to have risen'}"


def _sampled(scores: Mapping[str, Any]) -> str | None:
    delta = (scores.get("sampled") or {}).get("delta")
    if not delta or scores["strict"]["verdict"] != "higher" or delta["verdict"] == "higher":
        return None
    return (
        f"sampled accuracy moved by {points(delta['delta'])} points, 95 % interval {span(delta['interval'], sign=True)}: "
        "the greedy gain is not shown in sampled answers"
    )


def percent(share: float | None) -> str:
    """`54.0 %`; `-` when nobody knows."""
    return "-" if share is None else f"{100 * share:.1f} %"


def points(share: float, sign: bool = True) -> str:
    """A share in percentage points, one decimal; two when one would hide that it is not zero."""
    value = 100 * share
    digits = 1 if value == 0 or abs(value) >= 0.05 else 2
    return f"{value:{'+' if sign else ''}.{digits}f}"


def span(interval: Sequence[float], sign: bool = False) -> str:
    """`[48.3, 59.5]` in percentage points."""
    return f"[{points(interval[0], sign)}, {points(interval[1], sign)}]"


def p_text(p: float) -> str:
    """`p 0.018`, `p < 0.0001`."""
    return "p < 0.0001" if p < 1e-4 else f"p {p:.4f}" if p < 0.01 else f"p {p:.3f}" if p < 0.1 else f"p {p:.2f}"
