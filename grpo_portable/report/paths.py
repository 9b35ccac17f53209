"""Which path made which part of a run, and the warning when two answers that are compared were made on different ones.

From the `paths` of run.json's stages: who made the answers or steps from number `from` on. A run changes its path only when
it must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_portable.report.markdown import code

Json = Mapping[str, Any]
NAMES = {"base": "base", "bootstrap": "bootstrap", "train": "training", "tuned": "tuned"}
UNITS = {"train": "step", "bootstrap": "step"}


def by_stage(record: Json) -> str:
    """`base on A; training on A, from step 40 on B; tuned on B`; empty when one path made it all, or nobody noted it."""
    stages = {name: _paths(record, name) for name in NAMES if _paths(record, name)}
    if len({span["path"] for spans in stages.values() for span in spans}) < 2:
        return ""
    return "; ".join(f"{NAMES[name]} on {_spans(name, spans)}" for name, spans in stages.items())


def warning(record: Json, scores: Json) -> str | None:
    """What a reader must know when the two answers to a question were made on different paths, None when they were not."""
    against = scores.get("against")
    if not against:
        return None
    before, after = ({span["path"] for span in _paths(record, stage)} for stage in (against, "tuned"))
    if len(before | after) < 2 or not before or not after:
        return None
    return (
        f"the run had to change its path: {_names(before)} made the answers of the {against} model, {_names(after)} those of "
        "the tuned one. Engines and number formats differ in some greedy answers, so a part of the delta may be theirs and not "
        f"the training's; to be sure, ask the {against} model again on the last path (`grpo-portable eval`)"
    )


def _spans(stage: str, spans: list[Json]) -> str:
    unit = UNITS.get(stage, "answer")
    first, *rest = (str(span["path"]) for span in spans)
    later = (f"from {unit} {span['from'] + 1} on {code(path)}" for span, path in zip(spans[1:], rest, strict=True))
    return ", ".join([code(first), *later])


def _paths(record: Json, stage: str) -> list[Json]:
    found = ((record.get("stages") or {}).get(stage) or {}).get("paths") or []
    return [
        span for span in found if isinstance(span, Mapping) and "path" in span and isinstance(span.get("from"), int)
    ]


def _names(paths: set[str]) -> str:
    return " and ".join(code(path) for path in sorted(paths))
