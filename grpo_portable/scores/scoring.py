"""Saved generations → scores.json: every answer is read again here, stored flags are never trusted.

Strict reads the answer as the recipe's style asks for it, lenient takes it in any format; both by the extractor of the
rewards (`answers/extractor.py`). Shares and deltas are fractions of 1. A delta is over the questions that both stages answered,
paired by question (`stats.py`). `docs/statistics.md` lists the keys of scores.json. Reads files only, no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.answers import extractor, judge
from grpo_portable.errors import RunFolderError
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.scores import stats, verdict

SCHEMA = 1
STAGES = ("base", "bootstrap", "tuned")


@dataclass(frozen=True)
class Answer:
    """One completion as this version reads it. `tokens` and `truncated` are None when the record does not say."""

    id: str
    question: str
    gold: str
    completion: str
    extracted: str | None
    strict: bool
    lenient: bool
    marker: bool
    tokens: int | None
    truncated: bool | None
    reread: bool  # a mark stored with the completion said otherwise


@dataclass(frozen=True)
class Shared:
    """The ids that all stages answered, in the first stage's order, and sentences on what had to be left out."""

    ids: tuple[str, ...]
    notes: tuple[str, ...]


Answers = Mapping[str, Answer]


def read_answers(file: Path, style: str) -> dict[str, Answer]:
    """Greedy answers by question id; an id written twice keeps its last record. {} when the file is not there."""
    return {str(r["id"]): grade(r, style) for r in read_lines(file)}


def read_samples(file: Path, style: str) -> dict[str, list[Answer]]:
    """Sampled answers by question id, k of each; a sample number written twice keeps its last record."""
    last = {(str(r["id"]), r.get("sample")): r for r in read_lines(file)}
    samples: dict[str, list[Answer]] = {}
    for (id_, _), record in last.items():
        samples.setdefault(id_, []).append(grade(record, style))
    return samples


def grade(record: Mapping[str, Any], style: str) -> Answer:
    """A record of a generations file, read from its completion and gold alone."""
    completion, gold = record.get("completion"), record.get("gold")
    stored, finish = (record.get("correct"), record.get("lenient")), record.get("finish_reason")
    # an expression that cannot be compared here (no math-verify) keeps the mark it was given where it could be
    strict, lenient = (
        bool(was if now is None else now)
        for now, was in zip(
            (judge.correct(completion, gold, style), judge.lenient(completion, gold, style)), stored, strict=True
        )
    )
    return Answer(
        id=str(record["id"]),
        question=str(record.get("question") or ""),
        gold="" if gold is None else str(gold),
        completion=completion if isinstance(completion, str) else "" if completion is None else str(completion),
        extracted=judge.extracted(completion, gold, style),
        strict=strict,
        lenient=lenient,
        marker=extractor.has_marker(completion, style),
        tokens=record["tokens"] if isinstance(record.get("tokens"), int) else None,
        truncated=None if finish is None else finish == "length",
        reread=any(was is not None and bool(was) != now for was, now in zip(stored, (strict, lenient), strict=True)),
    )


def score_run(run: RunFolder) -> dict[str, Any]:
    """The scores of a run from its generations, written to scores.json and returned."""
    scores = scores_of(run)
    run.write_json("scores.json", scores)
    return scores


def scores_of(run: RunFolder) -> dict[str, Any]:
    """The scores of a run from its generations."""
    style = run.recipe().answer_style
    stages = {stage: read_answers(run.generations(stage), style) for stage in STAGES}
    samples = {stage: read_samples(run.generations(f"{stage}-sampled"), style) for stage in STAGES}
    scores = score(
        {stage: found for stage, found in stages.items() if found},
        style,
        {stage: found for stage, found in samples.items() if found},
    )
    if run.read_json("task.json").get("base_too"):
        scores["subject"] = "the adapter"  # nothing was trained here
    return scores


def require_answers(run: RunFolder) -> None:
    """Raise RunFolderError when the run has no answers yet, so that there is nothing to score."""
    if any(next(read_lines(run.generations(stage)), None) for stage in STAGES):
        return
    raise RunFolderError(
        f"run `{run.path}` has no answers to score",
        because="generations/ holds none",
        help=f"they are made by the run: grpo-portable train --resume --out {run.word}",
    )


def score(
    stages: Mapping[str, Answers], style: str, samples: Mapping[str, Mapping[str, Sequence[Answer]]] | None = None
) -> dict[str, Any]:
    """The content of scores.json from graded answers, pure. A stage that is not there is left out; None is not known."""
    shared = share(stages)
    samples = samples or {}
    rows = {stage: [found[id_] for id_ in shared.ids] for stage, found in stages.items()}
    against = "bootstrap" if "bootstrap" in stages else "base"
    scores: dict[str, Any] = {
        "schema": SCHEMA,
        "style": style,
        "n": len(shared.ids),
        "against": against if {against, "tuned"} <= rows.keys() and shared.ids else None,
        "base": None,
        "tuned": None,
        "delta": None,
        "interval": None,
        "p": None,
        "counts": None,
        "verdict": None,
        "stages": {stage: summary(found) for stage, found in rows.items()} if shared.ids else {},
        "answered": {stage: len(found) for stage, found in stages.items()},
    }
    if scores["against"]:
        blocks = compare_answers(rows[against], rows["tuned"])
        strict = blocks["strict"]
        scores |= {
            key: strict[key] for key in ("base", "tuned", "delta", "interval", "p", "counts", "verdict")
        } | blocks
        if against == "bootstrap" and "base" in rows:
            scores["whole"] = compare_answers(rows["base"], rows["tuned"])
    if samples:
        scores["sampled"] = score_samples(samples, shared.ids, against)
    scores["notes"] = [*shared.notes, *_reread(rows)]
    scores["warnings"] = verdict.warnings(scores)
    return scores


def share(stages: Mapping[str, Answers]) -> Shared:
    """The questions on which stages can be compared: the id is in all, and it is the same question with the same gold."""
    if not stages:
        return Shared((), ("no answers are saved yet",))
    first, *others = stages.values()
    common = [id_ for id_ in first if all(id_ in other for other in others)]
    same = [
        id_
        for id_ in common
        if all((other[id_].question, other[id_].gold) == (first[id_].question, first[id_].gold) for other in others)
    ]
    notes = []
    if any(len(found) != len(common) for found in stages.values()):
        sizes = ", ".join(f"{stage} {len(found)}" for stage, found in stages.items())
        notes.append(
            f"not every question was answered by all ({sizes}): only the {len(common)} answered by all can count"
        )
    if len(same) < len(common):
        notes.append(f"{len(common) - len(same)} ids stand for different questions or golds and are left out")
    return Shared(tuple(same), tuple(notes))


def summary(found: Sequence[Answer]) -> dict[str, Any]:
    """Accuracies and rates of one stage over the questions given (at least one)."""
    n = len(found)
    tokens = [a.tokens for a in found if a.tokens is not None]
    cut = [a.truncated for a in found if a.truncated is not None]
    return {
        "n": n,
        "strict": _accuracy([a.strict for a in found]),
        "lenient": _accuracy([a.lenient for a in found]),
        "marker_rate": _round(sum(a.marker for a in found) / n),
        "truncated_rate": _round(sum(cut) / len(cut)) if cut else None,
        "unreadable_rate": _round(sum(a.extracted is None for a in found) / n),
        "mean_tokens": _round(sum(tokens) / len(tokens)) if tokens else None,
    }


def compare_answers(a: Sequence[Answer], b: Sequence[Answer]) -> dict[str, Any]:
    """Blocks `strict`, `lenient`, `both_answered` and `format_gain` for two lists of answers to the same questions."""
    both = [(x, y) for x, y in zip(a, b, strict=True) if x.extracted is not None and y.extracted is not None]
    format_gain = stats.paired_mean(
        [(y.strict - x.strict) - (y.lenient - x.lenient) for x, y in zip(a, b, strict=True)]
    )
    return {
        "strict": _block([x.strict for x in a], [y.strict for y in b]),
        "lenient": _block([x.lenient for x in a], [y.lenient for y in b]),
        "both_answered": _block([x.strict for x, _ in both], [y.strict for _, y in both]) if both else None,
        "format_gain": {"delta": _round(format_gain.mean), "interval": _rounds(format_gain.interval)},
    }


def score_samples(
    samples: Mapping[str, Mapping[str, Sequence[Answer]]], ids: Iterable[str], against: str
) -> dict[str, Any]:
    """Strict accuracy over sampled answers, the question as the unit; the delta pairs questions, not samples."""
    common = [id_ for id_ in ids if all(id_ in found for found in samples.values())]
    if not common:
        return {"n": 0, "stages": {}, "delta": None}
    scores: dict[str, Any] = {"n": len(common), "stages": {}, "delta": None}
    means: dict[str, list[float]] = {}
    for stage, found in samples.items():
        flags = [[answer.strict for answer in found[id_]] for id_ in common]
        mean = stats.clustered(flags)
        means[stage] = [sum(row) / len(row) for row in flags]
        scores["stages"][stage] = {
            "samples": max(map(len, flags)),
            "accuracy": _round(mean.mean),
            "interval": _rounds(mean.interval),
            "any_correct": _round(sum(map(any, flags)) / len(flags)),
        }
    if {against, "tuned"} <= means.keys():
        delta = stats.paired_mean([y - x for x, y in zip(means[against], means["tuned"], strict=True)])
        scores["delta"] = {
            "delta": _round(delta.mean),
            "interval": _rounds(delta.interval),
            "p": _round(delta.p or 0.0),
            "verdict": stats.verdict(delta.mean, delta.interval, delta.p or 0.0),
        }
    return scores


def _accuracy(flags: Sequence[bool]) -> dict[str, Any]:
    k, n = sum(flags), len(flags)
    return {"correct": k, "accuracy": _round(k / n), "wilson95": _rounds(stats.wilson(k, n))}


def _block(a: Sequence[bool], b: Sequence[bool]) -> dict[str, Any]:
    pair = stats.paired(a, b)
    least = pair.smallest_detectable
    return {
        "base": _round(sum(a) / pair.n),
        "tuned": _round(sum(b) / pair.n),
        "delta": _round(pair.delta),
        "interval": _rounds(pair.interval),
        "p": _round(pair.p),
        "n": pair.n,
        "counts": {"both": pair.both, "gained": pair.gained, "lost": pair.lost, "neither": pair.neither},
        "method": pair.method,
        "bootstrap": _rounds(pair.bootstrap),
        "smallest_detectable": None if least is None else _round(least),
        "verdict": pair.verdict,
    }


def _reread(rows: Mapping[str, Sequence[Answer]]) -> list[str]:
    count = sum(answer.reread for found in rows.values() for answer in found)
    return [f"{count} stored marks differ from what this version reads; what it reads counts"] if count else []


def _round(x: float) -> float:
    return float(f"{x:.6g}")


def _rounds(interval: stats.Interval) -> list[float]:
    return [_round(bound) for bound in interval]
