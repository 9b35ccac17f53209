"""The comparison as a page: counts, what each tool would report, every difference by cause. Values → markdown."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import causes  # beside this file

from grpo_portable.report.markdown import code, table
from grpo_portable.scores import stats
from grpo_portable.scores.verdict import p_text, points, span

if TYPE_CHECKING:
    from compare import Arm, Mark

OURS = {"strict-match": "strict", "flexible-extract": "lenient"}
GOLDS = "worked golds"
_DELTAS = (("base", "tuned"), ("bootstrap", "tuned"))
_EXAMPLES = 3


def render(arms: Sequence[Arm], run: str, notes: str = "") -> str:
    """The whole page. `notes` is markdown that goes in before the lists."""
    marks = [mark for arm in arms for mark in arm.marks]
    verdicts = [mark for mark in marks if mark.differs == "verdict"]
    readings = [mark for mark in marks if mark.differs == "reading"]
    lines = [
        f"# lm-evaluation-harness and this project on the same answers: {run}",
        "",
        f"**{_sentence(arms)}**",
        "",
        *_method(run, any(arm.stage == GOLDS for arm in arms)),
        "",
        "## Right and wrong",
        "",
        *counts(arms),
        "",
        "*Only ours*, *only lm-eval's*: right for one of the two. *Read alike*: the same number, or none in both.",
        "",
        "## What each tool reports",
        "",
        *_levels([arm for arm in arms if arm.stage != GOLDS]),
        "",
        *_deltas(arms),
        "",
        "lm-eval's own comparison of two models (`scripts/model_comparator.py` in its repository) takes the unpaired z of the",
        "two standard errors; its p and that interval are shown. Ours pairs the questions: paired interval, exact McNemar p.",
        "",
        *([notes.strip(), ""] if notes.strip() else []),
        f"## All {len(verdicts)} answers that are right for one only",
        "",
        *_verdicts(verdicts),
        f"## All {len(readings)} other differences: another number, wrong for both",
        "",
        "They move no accuracy. Each is in `disagreements.jsonl` with both readings, the gold and the text.",
        "",
        *_readings(readings),
        "## What agreement does not show",
        "",
        *_limits(arms),
        "",
    ]
    return "\n".join(lines)


def counts(arms: Sequence[Arm]) -> list[str]:
    """The table of agreement, a row per stage and filter."""
    rows = []
    for arm, filter_, marks in _cells(arms):
        pairs = [(mark.ours_right, mark.theirs_right) for mark in marks]
        alike = sum(mark.differs is None or mark.cause == "spelling" for mark in marks)
        same = sum(ours == theirs for ours, theirs in pairs)
        numbers = (
            len(marks),
            same,
            *(pairs.count(pair) for pair in ((True, True), (True, False), (False, True))),
            alike,
        )
        rows.append((arm.stage, f"{OURS[filter_]} / {filter_}", *(f"{number:,}" for number in numbers)))
    head = (
        "answers",
        "ours / lm-eval's",
        "n",
        "same verdict",
        "right for both",
        "only ours",
        "only lm-eval's",
        "read alike",
    )
    return table(head, rows, right=range(2, 8))


def _sentence(arms: Sequence[Arm]) -> str:
    parts = []
    for filter_, ours in OURS.items():
        marks = [mark for arm in arms for mark in arm.marks if mark.filter == filter_ and arm.stage != GOLDS]
        other = [mark for mark in marks if mark.differs == "verdict"]
        part = f"{ours}, {len(marks) - len(other):,} of {len(marks):,} verdicts are the same"
        if other:
            better = sum(mark.ours_right for mark in other)
            part += f" ({len(other) - better} are right for lm-eval only, {better} for ours only)"
        parts.append(part)
    golds = [mark for arm in arms for mark in arm.marks if arm.stage == GOLDS]
    if golds:
        right = sum(mark.ours_right and mark.theirs_right for mark in golds)
        parts.append(f"{right:,} of {len(golds):,} readings of GSM8K's own worked answers are right for both")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _method(run: str, golds: bool) -> list[str]:
    version = importlib.metadata.version("lm_eval")
    read_golds = "*Worked golds* are GSM8K's published solutions of the same questions, read as if they were answers."
    return [
        f"lm-eval {version} as installed: its task `gsm8k` (version 3.0), its filters `strict-match` and `flexible-extract`,",
        "its `exact_match`, mean and standard error, all through `simple_evaluate`. In place of a model that generates stands",
        "one that hands back the saved answers and stops at the task's stop words by lm-eval's own function. Ours are",
        "`answers.extractor.is_correct` (strict, style `gsm8k_marker`) and `answers.extractor.is_correct_lenient`. The answers",
        "were asked for with the run's own prompt, not lm-eval's 5-shot one: what is compared is the reading, not the level.",
        *([read_golds] if golds else []),
        "",
        "```sh",
        "pip install lm_eval .   # an environment of its own: no torch, no GPU",
        f"python reports/lm-eval-agreement/compare.py reports/{run}{' --data gsm8k/test.jsonl' if golds else ''}",
        "```",
    ]


def _levels(arms: Sequence[Arm]) -> list[str]:
    rows = []
    for arm, filter_, marks in _cells(arms):
        right = sum(mark.ours_right for mark in marks)
        accuracy, error = arm.reported[filter_]
        ours = f"{100 * right / len(marks):.2f} % {span(stats.wilson(right, len(marks)))}"
        rows.append((arm.stage, f"{OURS[filter_]} / {filter_}", ours, f"{100 * accuracy:.2f} % ± {100 * error:.2f}"))
    head = ("answers", "ours / lm-eval's", "ours, Wilson's 95 %", "lm-eval ± standard error")
    return table(head, rows, right=(2, 3))


def _deltas(arms: Sequence[Arm]) -> list[str]:
    found = {(arm.stage, filter_): (arm, marks) for arm, filter_, marks in _cells(arms)}
    rows = []
    for before, after in _DELTAS:
        for filter_, ours in OURS.items():
            if (before, filter_) not in found or (after, filter_) not in found:
                continue
            (a, first), (b, second) = found[before, filter_], found[after, filter_]
            right = {mark.id: mark.ours_right for mark in first}
            shared = [mark for mark in second if mark.id in right]
            pair = stats.paired([right[mark.id] for mark in shared], [mark.ours_right for mark in shared])
            (x, sx), (y, sy) = a.reported[filter_], b.reported[filter_]
            delta, error = y - x, math.hypot(sx, sy)
            p = 2 * NormalDist().cdf(-abs(delta) / error) if error else 1.0
            theirs = (delta - 1.96 * error, delta + 1.96 * error)
            rows.append(
                (
                    f"{before} → {after}",
                    f"{ours} / {filter_}",
                    f"{points(pair.delta)} {span(pair.interval, sign=True)}, {p_text(pair.p)}",
                    f"{points(delta)} {span(theirs, sign=True)}, {p_text(p)}",
                )
            )
    return table(("delta, points", "ours / lm-eval's", "ours, paired", "lm-eval, unpaired"), rows, right=(2, 3))


def _verdicts(marks: Sequence[Mark]) -> list[str]:
    lines: list[str] = []
    for name, group in _by_cause(marks):
        title, why = causes.CAUSES[name]
        lines += [f"**{title}** ({len(group)}). {why}", ""]
        for mark in group:
            lines.append(f"- {_both(mark)}; right for {'ours' if mark.ours_right else 'lm-eval'} only:")
            lines.append(f"  {code(mark.ending)}")
        lines.append("")
    return lines or ["There is none.", ""]


def _readings(marks: Sequence[Mark]) -> list[str]:
    lines: list[str] = []
    for name, group in _by_cause(marks):
        title, why = causes.CAUSES[name]
        lines += [f"**{title}** ({len(group)}). {why}", ""]
        shown, rest = group[:_EXAMPLES], group[_EXAMPLES:]
        lines += [f"- {_both(mark)}: {code('… ' + mark.ending[-70:].lstrip())}" for mark in shown]
        for stage, ours in dict.fromkeys((mark.stage, OURS[mark.filter]) for mark in rest):
            ids = [mark.id for mark in rest if (mark.stage, OURS[mark.filter]) == (stage, ours)]
            lines.append(f"- and {stage}, {ours}: {', '.join(ids)}")
        lines.append("")
    return lines or ["There is none.", ""]


def _both(mark: Mark) -> str:
    ours = f"`{mark.ours}`" if mark.ours is not None else f"no answer ({mark.ours_reason})"
    cut = ", cut at the length limit" if mark.cut else ""
    return f"{mark.stage} {mark.id}, {OURS[mark.filter]}, gold `{mark.gold}`: ours {ours}, lm-eval `{mark.theirs}`{cut}"


def _limits(arms: Sequence[Arm]) -> list[str]:
    strict = {
        (mark.stage, mark.id) for arm in arms for mark in arm.marks if mark.filter == "strict-match" and mark.ours_right
    }
    cut = [
        mark
        for arm in arms
        for mark in arm.marks
        if mark.cut and mark.ours_right and mark.theirs_right and (mark.stage, mark.id) not in strict
    ]
    lines = ["- Both tools read a text, not its reasoning: a right number reached by wrong steps is right for both."]
    if cut:
        named = ", ".join(f"{mark.stage} {mark.id}" for mark in cut)
        lines.append(
            f"- {len(cut)} answers are right leniently for both although the length limit cut them before any marker, most of "
            f"them because the last number happens to be the gold: {named}. The lenient accuracy of a model that does not stop "
            "holds much of this; the strict one does not."
        )
    return lines


def _cells(arms: Sequence[Arm]) -> list[tuple[Arm, str, list[Mark]]]:
    return [(arm, name, [mark for mark in arm.marks if mark.filter == name]) for arm in arms for name in OURS]


def _by_cause(marks: Sequence[Mark]) -> list[tuple[str, list[Mark]]]:
    groups = {name: [mark for mark in marks if mark.cause == name] for name in causes.CAUSES}
    return [(name, group) for name, group in groups.items() if group]
