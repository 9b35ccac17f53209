"""Three or more runs side by side: memory and time by run, what each learnt, and their rewards window by window.

For one recipe on several paths or number formats. The first run is the one the others are set against: answers are paired by
question, rewards by step, since runs of one recipe and seed ask the same questions at the same step. Reads files only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from grpo_portable.recipe import differences
from grpo_portable.report.markdown import letters, table, wrapped
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.scores import scoring, stats, windows
from grpo_portable.scores.verdict import p_text, percent, points, span

EXPECTED = ("path", "fp8_scales", "micro_batch", "rollout_rows", "gradient_checkpointing", "optimizer")
PAIRED_BY = (
    "rewards",
    "reward_weights",
    "data",
    "seed",
    "prompts_per_step",
    "group_size",
    "train_limit",
    "prompt_percentile",
)
FP8_COPY = {"fp8-hf": "FP8, one scale an output row"}  # the portable engine's, which has no details of its own
YOUNGER = {"backend": "plain", "fsdp": False}  # fields that runs without them had no choice in
WIDTH = 80
NAME_WIDTH = 12  # of a run's column; longer names, or more runs than fit so, get letters
ENDS = 10  # the first and last tenth of the steps are averaged for a reward's start and end


@dataclass(frozen=True)
class Row:
    """One run. GiB of memory, seconds of the median step, shares of 1; None where it was not recorded.

    `against` is the change of strict accuracy from the first run's last stage to this one's, `reward_against` that of the mean
    reward over the steps both have, each with `delta` and `interval`; both None for the first run.
    """

    name: str
    path: str
    sampler: str
    policy_gib: float | None
    engine_gib: float | None
    kv_gib: float | None
    peak_gib: float | None
    step_s: float | None
    rollout_s: float | None
    update_s: float | None
    tokens_per_s: float | None
    start_s: float | None
    reward_start: float | None
    reward_end: float | None
    sampler_kl: float | None
    before: float | None
    after: float | None
    n: int
    format_rate: float | None
    against: Mapping[str, Any] | None
    reward_against: Mapping[str, Any] | None


@dataclass(frozen=True)
class SideBySide:
    """`curves`: run → (steps, rewards); `notes` name what makes rows less comparable than they look."""

    rows: tuple[Row, ...]
    curves: Mapping[str, tuple[list[int], list[float]]]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain values; keys as the fields."""
        return {"schema": scoring.SCHEMA, **asdict(self)}

    def to_text(self) -> str:
        """Markdown tables that also read as plain text in 80 columns, as long as there are at most seven runs."""
        most = min(NAME_WIDTH, (WIDTH - 17) // len(self.rows) - 3)  # beside the column of steps
        short, legend = letters([row.name for row in self.rows], most)
        rows = [replace(row, name=name) for row, name in zip(self.rows, short, strict=True)]
        curves = dict(zip(short, self.curves.values(), strict=True))
        parts = [legend, _memory(rows), _time(rows), _answers(rows), _reward(rows), _windows(curves)]
        lines = [line for part in parts if part for line in (*part, "")]
        return "\n".join(wrapped([*lines, *(f"note: {note}" for note in self.notes)], WIDTH)).rstrip()


def side_by_side(runs: Sequence[RunFolder]) -> SideBySide:
    """The runs in the order given, the first as the yardstick. Runs without answers or steps keep their row."""
    names = _names(runs)
    steps = [windows.steps_in_order(read_lines(run.metrics_file)) for run in runs]
    answered = [_stages(run) for run in runs]
    rows = tuple(
        _row(
            run,
            name,
            mine,
            found,
            None if i == 0 else _against(answered[0], found),
            _reward_against(steps[0], mine) if i and _paired(runs[0], run) else None,
        )
        for i, (run, name, mine, found) in enumerate(zip(runs, names, steps, answered, strict=True))
    )
    curves = {name: windows.series(mine, "reward") for name, mine in zip(names, steps, strict=True)}
    return SideBySide(rows, curves, tuple(_notes(runs, names)))


def differing(runs: Sequence[RunFolder]) -> dict[str, tuple[Any, ...]]:
    """The fields in which the runs' recipes differ, each with one value a run.

    A run's own recipe holds no `auto`, so one that is read there belongs to a field that is younger than the run: it stands
    for what such runs did.
    """
    recipes = [asdict(run.recipe()) for run in runs]
    for recipe in recipes:
        recipe.update({key: value for key, value in YOUNGER.items() if recipe[key] == "auto"})
    return differences(*recipes)


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """Each run's folder, with as much of the place above it as tells it apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]} ({i})" for i, part in enumerate(parts, 1)]


def _stages(run: RunFolder) -> dict[str, scoring.Answers]:
    style = run.recipe().answer_style
    found = {stage: scoring.read_answers(run.generations(stage), style) for stage in scoring.STAGES}
    return {stage: answers for stage, answers in found.items() if answers}


def _row(
    run: RunFolder,
    name: str,
    steps: Sequence[windows.Step],
    answered: dict[str, scoring.Answers],
    against: Mapping[str, Any] | None,
    reward_against: Mapping[str, Any] | None,
) -> Row:
    record, recipe = run.read_json("run.json"), run.recipe()
    path = str(record.get("path") or recipe.path)
    held, details = record.get("held_gib") or {}, record.get("engine_details") or {}
    rewards = windows.series(steps, "reward")[1]
    ends = max(1, len(rewards) // ENDS)
    last = list(next(reversed(answered.values())).values()) if answered else []
    return Row(
        name=name,
        path=path,
        sampler=str(details.get("weights") or FP8_COPY.get(path) or record.get("dtype") or "-"),
        policy_gib=held.get("policy"),
        engine_gib=held.get("engine_weights"),
        kv_gib=held.get("engine_kv_cache"),
        peak_gib=record.get("peak_memory_gib"),
        step_s=_median(steps, "step_s"),
        rollout_s=_median(steps, "rollout_s"),
        update_s=_median(steps, "update_s"),
        tokens_per_s=_median(steps, "tokens_per_s"),
        start_s=details.get("start_s"),
        reward_start=_mean(rewards[:ends]),
        reward_end=_mean(rewards[-ends:]),
        sampler_kl=_mean(windows.series(steps, "sampler_kl")[1]),
        before=_accuracy(answered, 0) if len(answered) > 1 else None,
        after=_accuracy(answered, -1) if answered else None,
        n=len(last),
        format_rate=_mean([float(answer.marker) for answer in last]),
        against=against,
        reward_against=reward_against,
    )


def _accuracy(answered: dict[str, scoring.Answers], which: int) -> float | None:
    """Strict accuracy before GRPO (0: after the bootstrap, where there was one) or of the last stage (-1)."""
    stages = list(answered)
    stage = stages[-1] if which else stages[-2]
    return _mean([float(answer.strict) for answer in answered[stage].values()])


def _against(first: dict[str, scoring.Answers], other: dict[str, scoring.Answers]) -> dict[str, Any] | None:
    if not first or not other:
        return None
    a, b = next(reversed(first.values())), next(reversed(other.values()))
    ids = scoring.share({"a": a, "b": b}).ids
    if not ids:
        return None
    pair = stats.paired([a[id_].strict for id_ in ids], [b[id_].strict for id_ in ids])
    return {"n": len(ids), "delta": pair.delta, "interval": list(pair.interval), "p": pair.p}


def _paired(first: RunFolder, other: RunFolder) -> bool:
    """Whether a step of both asked the same questions and paid them alike."""
    return not differing((first, other)).keys() & set(PAIRED_BY)


def _reward_against(first: Sequence[windows.Step], other: Sequence[windows.Step]) -> dict[str, Any] | None:
    """The mean reward of `other` minus that of `first` over the steps both have; a normal 95 % interval over steps."""
    a, b = (dict(zip(*windows.series(steps, "reward"), strict=True)) for steps in (first, other))
    gaps = [b[step] - a[step] for step in a if step in b]
    if len(gaps) < 2:
        return None
    mean = math.fsum(gaps) / len(gaps)
    half = stats.Z * math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) * (len(gaps) - 1)))
    return {"n": len(gaps), "delta": mean, "interval": [mean - half, mean + half]}


def _notes(runs: Sequence[RunFolder], names: Sequence[str]) -> list[str]:
    """What the recipes differ in beside path and sizes, and runs that left their path."""
    unexpected = [key for key in differing(runs) if key not in EXPECTED]
    notes = [f"the recipes differ in {', '.join(unexpected)}: rows differ by more than the path"] if unexpected else []
    recipes = [run.recipe() for run in runs]
    cut = [name for name, r in zip(names, recipes, strict=True) if r.min_p or r.top_k or r.top_p < 1]
    if cut:
        notes.append(
            f"{', '.join(cut)}: unlikely tokens are not drawn (min_p, top_k, top_p), and sampler KL holds that too"
        )
    for run, name in zip(runs, names, strict=True):
        made = {span["path"] for stage in (run.read_json("run.json").get("stages") or {}).values()
                for span in stage.get("paths", [])}  # fmt: skip
        if len(made) > 1:
            notes.append(f"`{name}` changed its path on the way ({', '.join(sorted(made))}): its row is a mixture")
    return notes


def _memory(rows: Sequence[Row]) -> list[str]:
    head = ["memory, GiB", "sampled with", "policy", "engine", "KV cache", "peak"]
    cells = [
        [
            r.name,
            r.sampler.replace("one scale an ", "per ").replace("one scale a ", "per "),
            *(_number(v, 2) for v in (r.policy_gib, r.engine_gib, r.kv_gib, r.peak_gib)),
        ]
        for r in rows
    ]
    return table(head, cells, right=range(2, 6)) if any(r.peak_gib is not None for r in rows) else []


def _time(rows: Sequence[Row]) -> list[str]:
    head = ["median step, s", "step", "rollout", "update", "rollout %", "tokens/s", "start"]
    cells = [
        [
            r.name,
            *(_number(v, 2) for v in (r.step_s, r.rollout_s, r.update_s)),
            "-" if not r.step_s or r.rollout_s is None else f"{100 * r.rollout_s / r.step_s:.0f}",
            "-" if r.tokens_per_s is None else f"{r.tokens_per_s:,.0f}",
            _number(r.start_s, 1),
        ]
        for r in rows
    ]
    return table(head, cells, right=range(1, 7)) if any(r.step_s is not None for r in rows) else []


def _answers(rows: Sequence[Row]) -> list[str]:
    head = ["strict accuracy", "before", "after", "against first", "exact p", "format"]
    cells = [
        [
            r.name,
            percent(r.before),
            percent(r.after),
            "-" if r.against is None else f"{points(r.against['delta'])} {span(r.against['interval'], sign=True)}",
            "-" if r.against is None else p_text(r.against["p"]).removeprefix("p "),
            percent(r.format_rate),
        ]
        for r in rows
    ]
    return table(head, cells, right=range(1, 6)) if any(r.after is not None for r in rows) else []


def _reward(rows: Sequence[Row]) -> list[str]:
    head = ["mean reward", "start", "end", "against first, all steps", "sampler KL, nats"]
    cells = [
        [
            r.name,
            _number(r.reward_start, 3),
            _number(r.reward_end, 3),
            "-" if r.reward_against is None else _reward_gap(r.reward_against),
            _number(r.sampler_kl, 5).replace("-0.00000", "0.00000"),
        ]
        for r in rows
    ]
    return table(head, cells, right=range(1, 5)) if any(r.reward_end is not None for r in rows) else []


def _windows(curves: Mapping[str, tuple[list[int], list[float]]]) -> list[str]:
    """Mean reward by window of steps, one column a run."""
    every = sorted({step for steps, _ in curves.values() for step in steps})
    if not every:
        return []
    size = windows.window_size(len(every))
    parts = [every[i : i + size] for i in range(0, len(every), size)]
    by_step = {name: dict(zip(*curve, strict=True)) for name, curve in curves.items()}
    cells = [
        [f"{p[0]}-{p[-1]}", *(_number(_mean([run[s] for s in p if s in run]), 3) for run in by_step.values())]
        for p in parts
    ]
    return table(["reward, steps", *curves], cells, right=range(1, len(curves) + 1))


def _reward_gap(gap: Mapping[str, Any]) -> str:
    low, high = gap["interval"]
    return f"{gap['delta']:+.3f} [{low:+.3f}, {high:+.3f}]"


def _median(steps: Sequence[windows.Step], key: str) -> float | None:
    """Of the median step: the first ones start engines and capture graphs."""
    values = windows.series(steps, key)[1]
    return median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
