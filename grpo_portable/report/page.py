"""Run folder → report.md and charts/: one screen that says whether the run helped, then what is behind it.

Everything is computed from the files of the run, so a report can be rebuilt anywhere and gives the same text. Pieces that are
not there yet (no training, no evaluation, no matplotlib) leave their rooms out. The rooms are in `results`,
`training` and `setting`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_portable.recipe import Recipe
from grpo_portable.report import charts, paths, results, setting, training
from grpo_portable.report.markdown import plain
from grpo_portable.run.folder import RunFolder, read_lines, write_atomically
from grpo_portable.scores import scoring, windows
from grpo_portable.scores import verdict as words

CHART_TEXT = {
    "accuracy": "Accuracy with 95 % intervals",
    "reward": "Mean reward by step",
    "components": "Reward components and vital signs by step",
}


def write_report(run: RunFolder) -> Path:
    """Score a run, write its report.md and charts/, and return the report's file."""
    scores = scoring.score_run(run)
    steps = windows.steps_in_order(read_lines(run.metrics_file))
    events = list(read_lines(run.events_file))
    drawn = charts.draw(run.path / "charts", scores, steps, events)
    file = run.path / "report.md"
    write_atomically(file, page(run, scores, steps, events, drawn))
    return file


def verdict(run: RunFolder) -> str:
    """The verdict of a run in one sentence, from its scores."""
    return words.sentence(run.read_json("scores.json"))


def page(
    run: RunFolder,
    scores: Mapping[str, Any],
    steps: list[windows.Step],
    events: list[dict[str, Any]],
    drawn: Mapping[str, Path],
) -> str:
    """The text of the report, in the order in which a stranger asks: did it help, by what, where, how, and what else.

    `drawn`: name of a chart → its file.
    """
    recipe, facts = run.recipe(), run.read_json("facts.json")
    plan, record = run.read_json("plan.json"), run.read_json("run.json")
    path = str(record.get("path") or recipe.path)
    trains = run.trains()
    train_seconds = setting.training_seconds(record, steps)
    lines = [f"# {_title(recipe, record, steps, trains)}", "", f"**{words.sentence(scores)}**", ""]
    lines += _warnings(scores, paths.warning(record, scores))
    lines += [*results.results(scores, recipe.max_completion_tokens), "", *results.counts(scores), ""]
    lines += _images(drawn, ("accuracy", "reward"))
    lines += ["## What ran", "", *setting.setting(recipe, record, facts, train_seconds, trains), ""]
    lines += [*setting.prompt(record), ""]
    lines += _room("Why no faster path", setting.closed_paths(plan, path, events))
    lines += ["## Events", "", *setting.events(events), ""]
    lines += _room("Training, window by window", training.window_table(steps), _images(drawn, ("components",)))
    lines += _room("Does the reward agree with the evaluation?", training.agreement(steps, scores))
    lines += _room("Questions gained and lost", _examples(run, scores))
    lines += ["## Versions", "", setting.versions(record, facts) or "Not recorded.", ""]
    lines += ["## Repeating it", "", *setting.repeat(recipe, record, trains), ""]
    lines += ["## What this does not show", "", *setting.scope(recipe, record, scores, len(steps)), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _title(recipe: Recipe, record: Mapping[str, Any], steps: list[windows.Step], trains: bool) -> str:
    model = plain(str(record.get("base_model") or record.get("model") or recipe.model).rstrip("/").rsplit("/", 1)[-1])
    count = f"{len(steps)} step{'s' if len(steps) > 1 else ''}" if steps else "not trained yet"
    done = f"GRPO on {model}, {count}" if trains else f"Evaluation of {model}"
    return f"{done}: {setting.eval_name(recipe)}"


def _warnings(scores: Mapping[str, Any], of_paths: str | None) -> list[str]:
    found = [*([of_paths] if of_paths else []), *(w["message"] for w in words.warnings(scores))]
    told = [f"> **Warning:** {message[0].upper()}{message[1:]}." for message in found]
    told += [f"> **Note:** {note[0].upper()}{note[1:]}." for note in scores.get("notes") or []]
    return [line for text in told for line in (text, "")]


def _images(drawn: Mapping[str, Path], names: tuple[str, ...]) -> list[str]:
    return [
        line for name in names if name in drawn for line in (f"![{CHART_TEXT[name]}](charts/{drawn[name].name})", "")
    ]


def _room(title: str, *parts: list[str]) -> list[str]:
    """A headed section; nothing when its parts are all empty."""
    body = [line for part in parts if part for line in (*part, "")]
    return [f"## {title}", "", *body] if body else []


def _examples(run: RunFolder, scores: Mapping[str, Any]) -> list[str]:
    if not scores.get("against"):
        return []
    style = str(scores["style"])
    stages = {s: scoring.read_answers(run.generations(s), style) for s in scores["stages"]}
    shared = scoring.share(stages)
    return results.examples(stages[scores["against"]], stages["tuned"], shared.ids)
