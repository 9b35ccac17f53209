"""The report's rooms on results: accuracies, the 2x2 counts, and the questions gained and lost. Values → markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_portable.report.markdown import code, folded, plain, shorten, table
from grpo_portable.scores.scoring import Answer, Answers
from grpo_portable.scores.verdict import p_text, percent, points, span

COLUMNS = {"base": "base", "bootstrap": "after bootstrap", "tuned": "tuned"}
EXAMPLES = 10
QUESTION_CHARS, COMPLETION_CHARS = 220, 260


def results(scores: Mapping[str, Any], most_tokens: int | None = None) -> list[str]:
    """The table: one column a stage, then the delta in points with its 95 % interval and exact p."""
    stages = scores.get("stages") or {}
    if not stages:
        return []
    rows = [_accuracy_row(kind, scores) for kind in ("strict", "lenient")]
    if scores.get("both_answered"):
        rows.append(_both_answered_row(scores))
    if (scores.get("sampled") or {}).get("stages"):
        rows.append(_sampled_row(scores))
    limit = f" ({most_tokens} tokens)" if most_tokens else ""
    for label, key in (
        ("answers in the asked format", "marker_rate"),
        (f"cut off at the length limit{limit}", "truncated_rate"),
        ("no answer could be read", "unreadable_rate"),
    ):
        rows.append(_rate_row(label, key, scores))
    rows.append(_tokens_row(scores))
    names = [COLUMNS[stage] for stage in stages]
    what = "GRPO's delta" if len(stages) > 2 else "delta"
    delta = [f"{what}, points", "95 % interval", "exact p"] if scores.get("against") else []
    head = [f"{scores['n']:,} held-out questions", *names, *delta]
    return table(head, [row[: len(head)] for row in rows], right=range(1, len(head)))


def counts(scores: Mapping[str, Any]) -> list[str]:
    """The 2x2 table in words, the bootstrap check, the power, and with a format bootstrap the way from the raw base."""
    if not scores.get("against"):
        return []
    strict, found = scores["strict"], scores["counts"]
    text = (
        f"Of {strict['n']:,} questions {found['gained']} were gained (wrong, then right) and {found['lost']} lost; "
        f"{found['both']} were right both times, {found['neither']} never. "
        f"Resampling the questions gives {span(strict['bootstrap'], sign=True)}."
    )
    if strict["smallest_detectable"] is not None:
        least = points(strict["smallest_detectable"], sign=False)
        text += f" A true delta of {least} points would be shown four times in five."
    lines = [text]
    if scores.get("whole"):
        whole = scores["whole"]["strict"]
        lines += [
            "",
            f"From the raw base, bootstrap and GRPO together: {points(whole['delta'])} points strict, "
            f"95 % interval {span(whole['interval'], sign=True)}, exact {p_text(whole['p'])}.",
        ]
    return lines


def examples(before: Answers, after: Answers, ids: Sequence[str]) -> list[str]:
    """Up to ten questions gained and ten lost, the first in the order of the data, each with both answers, folded away."""
    gained = [id_ for id_ in ids if after[id_].strict and not before[id_].strict]
    lost = [id_ for id_ in ids if before[id_].strict and not after[id_].strict]
    lines: list[str] = []
    for word, found in (("gained", gained), ("lost", lost)):
        shown = found[:EXAMPLES]
        title = f"{word}: {'none' if not found else f'the first {len(shown)} of {len(found)}'}"
        lines += [*folded(title, [line for id_ in shown for line in _example(before[id_], after[id_])]), ""]
    return lines


def _example(before: Answer, after: Answer) -> list[str]:
    return [
        f"- **{code(before.id)}** {plain(shorten(before.question, QUESTION_CHARS))} Gold: {code(before.gold)}",
        f"  - before: {_reading(before)}: {_ending(before)}",
        f"  - after: {_reading(after)}: {_ending(after)}",
    ]


def _reading(answer: Answer) -> str:
    read = "no answer" if answer.extracted is None else code(shorten(answer.extracted, 40))
    return f"{'right' if answer.strict else 'wrong'}, {read}{', cut off' if answer.truncated else ''}"


def _ending(answer: Answer) -> str:
    return code(shorten(answer.completion, COMPLETION_CHARS, keep_end=True)) if answer.completion.strip() else "(empty)"


def _accuracy_row(kind: str, scores: Mapping[str, Any]) -> list[str]:
    label = {"strict": "**strict**: the answer as it was asked for", "lenient": "lenient: the answer in any format"}[
        kind
    ]
    bold = "**" if kind == "strict" else ""
    cells = [
        f"{bold}{percent(s[kind]['accuracy'])}{bold} ({s[kind]['correct']}) {span(s[kind]['wilson95'])}"
        for s in scores["stages"].values()
    ]
    return [label, *cells, *_delta_cells(scores.get(kind), bold)]


def _delta_cells(block: Mapping[str, Any] | None, bold: str = "") -> list[str]:
    if not block:
        return ["", "", ""]
    return [
        f"{bold}{points(block['delta'])}{bold}",
        span(block["interval"], sign=True),
        p_text(block["p"]).removeprefix("p "),
    ]


def _both_answered_row(scores: Mapping[str, Any]) -> list[str]:
    block = scores["both_answered"]
    cells = {scores["against"]: percent(block["base"]), "tuned": percent(block["tuned"])}
    label = f"strict, where both gave an answer ({block['n']})"
    return [label, *(cells.get(stage, "") for stage in scores["stages"]), *_delta_cells(block)]


def _sampled_row(scores: Mapping[str, Any]) -> list[str]:
    sampled = scores["sampled"]
    most = max(found["samples"] for found in sampled["stages"].values())
    cells = []
    for stage in scores["stages"]:
        found = sampled["stages"].get(stage)
        cells.append(f"{percent(found['accuracy'])} {span(found['interval'])}" if found else "")
    return [f"strict, sampled ({most} answers a question)", *cells, *_delta_cells(sampled.get("delta"))]


def _rate_row(label: str, key: str, scores: Mapping[str, Any]) -> list[str]:
    stages = scores["stages"]
    cells = [percent(found[key]) for found in stages.values()]
    before, after = (stages.get(stage, {}).get(key) for stage in (scores.get("against"), "tuned"))
    delta = points(after - before) if before is not None and after is not None else ""
    return [label, *cells, delta, "", ""]


def _tokens_row(scores: Mapping[str, Any]) -> list[str]:
    cells = [found["mean_tokens"] for found in scores["stages"].values()]
    return ["mean length, tokens", *("-" if tokens is None else f"{tokens:.0f}" for tokens in cells), "", "", ""]
