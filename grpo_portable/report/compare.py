"""Two runs on the same questions: the paired delta of their last answers, what it cost, and what the runs did differently.

For BF16 against FP8, with and without bootstrap, one seed against another. Pairs questions by id and text, so that two runs
with different held-out data are refused instead of compared. Reads files only; writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo_portable.errors import DataError, RunFolderError
from grpo_portable.report.markdown import letters, shorten, table, wrapped
from grpo_portable.report.setting import duration, training_seconds
from grpo_portable.report.side_by_side import differing
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.scores import scoring, stats, windows
from grpo_portable.scores.verdict import p_text, percent, points, span

ONE_RUN_EACH = "each side is one training run: the interval is over questions, what another seed would do is not in it"
WIDTH = 80
NAME_WIDTH, MODEL_WIDTH = 7, 26  # of a column: wider names get letters, wider models are cut in the middle
ASKED_BY = (  # recipe fields that change how a question is put or read; if they differ, more than the models differs
    "system_prompt", "prompt_template", "chat_template", "enable_thinking", "few_shot", "answer_style",
    "max_completion_tokens", "max_prompt_tokens", "stop",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two runs: its name, the stage whose answers are compared, and what it cost. None: not recorded."""

    name: str
    stage: str
    model: str
    path: str
    steps: int
    step_s: float | None
    tokens_per_s: float | None
    train_s: float | None
    memory_gib: float | None


@dataclass(frozen=True)
class Comparison:
    """Deltas are b minus a, in shares of 1; `gains` sets b's gain over its own base against a's, question by question."""

    a: Side
    b: Side
    strict: Mapping[str, Any]
    lenient: Mapping[str, Any]
    both_answered: Mapping[str, Any] | None
    gains: Mapping[str, Any] | None
    differs: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values; keys as the fields."""
        return {
            "schema": scoring.SCHEMA,
            **asdict(self),
            "verdict": self.strict["verdict"],
            "sentence": self.sentence(),
        }

    def sentence(self) -> str:
        """The verdict in one sentence."""
        strict, a, b = self.strict, self.a.name, self.b.name
        of_a, of_b = percent(strict["a"]), percent(strict["b"])
        delta = (
            f"{points(strict['delta'])} points, 95 % interval {span(strict['interval'], sign=True)}, "
            f"exact {p_text(strict['p'])}"
        )
        if strict["verdict"] == "not shown to differ":
            found = f"are not shown to differ in strict accuracy on {strict['n']:,} questions"
            return f"`{a}` and `{b}` {found} ({of_a} and {of_b}, {delta})."
        word = "more" if strict["verdict"] == "higher" else "fewer"
        found = f"answers {word} of {strict['n']:,} questions rightly than"
        return f"`{b}` {found} `{a}` ({of_b} against {of_a}, {delta})."  # in the order of the names

    def to_text(self) -> str:
        """The comparison for a terminal of 80 columns, in markdown."""
        short, legend = letters([_named(side) for side in (self.a, self.b)], NAME_WIDTH)
        lines = [self.sentence(), "", *legend, *([""] if legend else [])]
        lines += [*_results(self, short), "", _counts(self, short), "", *_costs(self, short)]
        if self.gains:
            lines += ["", _gains_text(self, short)]
        if self.differs:
            lines += ["", "the recipes differ in"]
            lines += [f"- {key}: {_short(was)} → {_short(now)}" for key, (was, now) in self.differs.items()]
        for word, texts in (("warning", self.warnings), ("note", self.notes)):
            lines += [line for text in texts for line in ("", f"{word}: {text}")]
        return "\n".join(wrapped(lines, WIDTH))


def compare(run_a: RunFolder, run_b: RunFolder) -> Comparison:
    """Compare the last stages that the runs have answers of; RunFolderError if there are none, DataError if none is shared."""
    stages_a, stages_b = _stages(run_a), _stages(run_b)
    last_a, last_b = (next(reversed(found)) for found in (stages_a, stages_b))
    name_a, name_b = _names(run_a, run_b)
    shared = scoring.share({name_a: stages_a[last_a], name_b: stages_b[last_b]})
    if not shared.ids:
        raise DataError(
            f"`{name_a}` and `{name_b}` have no question in common",
            because="; ".join(shared.notes) or None,
            help="compare runs with the same eval_data, eval_split, eval_limit and seed",
        )
    blocks = scoring.compare_answers(
        [stages_a[last_a][id_] for id_ in shared.ids], [stages_b[last_b][id_] for id_ in shared.ids]
    )
    strict, lenient = _ab(blocks["strict"]), _ab(blocks["lenient"])
    differs = differing((run_a, run_b))
    asked = [key for key in ASKED_BY if key in differs]
    warnings = []
    if asked:
        warnings.append(
            f"the questions were not asked and read in the same way ({', '.join(asked)}): the delta mixes that in"
        )
    if strict["verdict"] != lenient["verdict"]:
        warnings.append(
            f"strict says {strict['verdict']}, lenient says {lenient['verdict']} ({points(lenient['delta'])} points): "
            "part of the difference is format"
        )
    a, b = _side(run_a, name_a, last_a), _side(run_b, name_b, last_b)
    return Comparison(
        a=a,
        b=b,
        strict=strict,
        lenient=lenient,
        both_answered=_ab(blocks["both_answered"]) if blocks["both_answered"] else None,
        gains=_gains(stages_a, stages_b),
        differs=differs,
        notes=(*shared.notes, *([ONE_RUN_EACH] if a.steps or b.steps else [])),
        warnings=tuple(warnings),
    )


def _stages(run: RunFolder) -> dict[str, scoring.Answers]:
    style = run.recipe().answer_style
    answered: dict[str, scoring.Answers] = {}
    for stage in scoring.STAGES:
        if found := scoring.read_answers(run.generations(stage), style):
            answered[stage] = found
    if not answered:
        raise RunFolderError(f"run `{run.path}` has no answers to compare", because="generations/ holds none")
    return answered


def _names(run_a: RunFolder, run_b: RunFolder) -> tuple[str, str]:
    a, b = run_a.path.resolve(), run_b.path.resolve()
    if a.name != b.name:
        return a.name, b.name
    if a.parent.name != b.parent.name:
        return f"{a.parent.name}/{a.name}", f"{b.parent.name}/{b.name}"
    return f"{a.name} (a)", f"{b.name} (b)"


def _side(run: RunFolder, name: str, stage: str) -> Side:
    record, recipe = run.read_json("run.json"), run.recipe()
    steps = windows.steps_in_order(read_lines(run.metrics_file))
    seconds, speed, memory = (windows.series(steps, key)[1] for key in ("step_s", "tokens_per_s", "memory_gib"))
    return Side(
        name=name,
        stage=stage,
        model=str(record.get("base_model") or recipe.model),
        path=str(record.get("path") or recipe.path),
        steps=len(steps),
        step_s=sum(seconds) / len(seconds) if seconds else None,
        tokens_per_s=sum(speed) / len(speed) if speed else None,
        train_s=training_seconds(record, steps),
        memory_gib=record.get("peak_memory_gib") or (max(memory) if memory else None),
    )


def _gains(stages_a: Mapping[str, scoring.Answers], stages_b: Mapping[str, scoring.Answers]) -> dict[str, Any] | None:
    """Each run's gain from its base to its tuned model, and b's minus a's with the question as the unit."""
    if not all({"base", "tuned"} <= stages.keys() for stages in (stages_a, stages_b)):
        return None
    four = [stages[stage] for stages in (stages_a, stages_b) for stage in ("base", "tuned")]
    ids = scoring.share(dict(zip(("a base", "a tuned", "b base", "b tuned"), four, strict=True))).ids
    if not ids:
        return None
    base_a, tuned_a, base_b, tuned_b = ([answers[id_].strict for id_ in ids] for answers in four)
    gain_a = [after - before for before, after in zip(base_a, tuned_a, strict=True)]
    gain_b = [after - before for before, after in zip(base_b, tuned_b, strict=True)]
    # a difference of two gains lies in -2..2: halved for the mean, doubled again after it
    mean = stats.paired_mean([(b - a) / 2 for a, b in zip(gain_a, gain_b, strict=True)])
    return {
        "n": len(ids),
        "a": sum(gain_a) / len(ids),
        "b": sum(gain_b) / len(ids),
        "delta": 2 * mean.mean,
        "interval": [2 * bound for bound in mean.interval],
        "p": mean.p,
    }


def _ab(block: Mapping[str, Any]) -> dict[str, Any]:
    return {{"base": "a", "tuned": "b"}.get(key, key): value for key, value in block.items()}


def _results(c: Comparison, short: list[str]) -> list[str]:
    head = ["", *short, "points", "95 % interval", "exact p"]
    blocks = [("strict", c.strict), ("lenient", c.lenient)]
    if c.both_answered:
        blocks.append(("if both answered", c.both_answered))
    rows = [
        [
            name,
            percent(block["a"]),
            percent(block["b"]),
            points(block["delta"]),
            span(block["interval"], sign=True),
            p_text(block["p"]).removeprefix("p "),
        ]
        for name, block in blocks
    ]
    return table(head, rows, right=range(1, 6))


def _counts(c: Comparison, short: list[str]) -> str:
    a, b = short
    found = c.strict["counts"]
    counts = (
        f"right in both {found['both']}, only in {b} {found['gained']}, only in {a} {found['lost']}, "
        f"in neither {found['neither']}"
    )
    least = c.strict["smallest_detectable"]
    power = f"; a delta of {points(least, sign=False)} points would be shown four times in five" if least else ""
    both = f"; both gave an answer to {c.both_answered['n']:,}" if c.both_answered else ""
    return counts + both + power


def _named(side: Side) -> str:
    return side.name if side.stage == "tuned" else f"{side.name}, {side.stage}"


def _costs(c: Comparison, short: list[str]) -> list[str]:
    columns = [_cost_cells(side) for side in (c.a, c.b)]
    rows = [[name, columns[0][name], columns[1][name]] for name in columns[0]]
    return table(["", *short], [row for row in rows if row[1:] != ["-", "-"]], right=(1, 2))


def _cost_cells(side: Side) -> dict[str, str]:
    return {
        "model": shorten(side.model.rsplit("/", 1)[-1], MODEL_WIDTH, keep_end=True),
        "path": side.path,
        "steps": str(side.steps),
        "seconds a step": _number(side.step_s, "{:.2f}"),
        "rollout tokens/s": _number(side.tokens_per_s, "{:,.0f}"),
        "training": "-" if side.train_s is None else duration(side.train_s),
        "peak memory, GiB": _number(side.memory_gib, "{:.2f}"),
    }


def _gains_text(c: Comparison, short: list[str]) -> str:
    (a, b), gains = short, c.gains or {}
    word = stats.verdict(gains["delta"], tuple(gains["interval"]), gains["p"])
    return (
        f"over its own base {a} gained {points(gains['a'])} points, {b} {points(gains['b'])}: "
        f"{points(gains['delta'])} points apart, 95 % interval {span(gains['interval'], sign=True)}, {word}"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _short(value: Any) -> str:
    """One line of any value; line ends are seen, since two texts may differ in nothing else."""
    text = re.sub(r" *\n *", "⏎", str(list(value) if isinstance(value, tuple) else value)) or "empty"
    return text if len(text) <= 60 else text[:59] + "…"
