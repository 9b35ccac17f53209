"""Charts of a run as small PNG files: accuracy before and after, the reward by step, and the components behind it.

The only file that imports matplotlib, inside the function that draws. Colours are Okabe and Ito's, told apart by colour-blind
readers; nothing is told by colour alone. The same inputs give the same bytes.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from grpo_portable.run.folder import replacing
from grpo_portable.scores import windows
from grpo_portable.scores.verdict import points, span

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#7A7A7A", "#222222"
STAGE_MARKS = {"base": ("o", GREY), "bootstrap": ("D", ORANGE), "tuned": ("o", BLUE)}
STAGE_LABELS = {"base": "base", "bootstrap": "after bootstrap", "tuned": "tuned"}
RUN_COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":")
WIDTH_INCHES, DPI = 7.6, 110
MARKED_EVENTS = ("fallback", "retry", "oom", "nonfinite", "resume")


@dataclass(frozen=True)
class Panel:
    """One small chart: a title that says what is drawn, steps, values, and whether values are shares of 1."""

    title: str
    steps: list[int]
    values: list[float]
    share: bool = False


def draw(
    folder: Path, scores: Mapping[str, Any], steps: Sequence[windows.Step], events: Sequence[Mapping[str, Any]]
) -> dict[str, Path]:
    """Draw what there is data for into `folder`; the files by name (accuracy, reward, components). {} without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return {}
    figures = {}
    with matplotlib.rc_context(_style()):
        if scores.get("stages"):
            figures["accuracy"] = _accuracy(scores)
        if windows.series(steps, "reward")[0]:
            figures["reward"] = _reward(steps, events)
        found = panels(steps)
        if found:
            figures["components"] = _components(found)
        return {name: _save(figure, folder / f"{name}.png") for name, figure in figures.items()}


def curves(file: Path, runs: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Path | None:
    """Draw the running mean reward of several runs over their steps into `file`; None without matplotlib or without steps.

    Each run has a colour, a dash and its name at its end.
    """
    found = {name: curve for name, curve in runs.items() if curve[0]}
    try:
        import matplotlib
    except ImportError:
        return None
    if not found:
        return None
    with matplotlib.rc_context(_style()):
        figure, axes = _figure(3.4)
        axis = axes[0][0]
        for i, (name, (xs, ys)) in enumerate(found.items()):
            colour, dash = RUN_COLOURS[i % len(RUN_COLOURS)], DASHES[i // len(RUN_COLOURS) % len(DASHES)]
            axis.plot(xs, ys, color=colour, linewidth=0.6, alpha=0.25)
            axis.plot(xs, smooth(ys), color=colour, linewidth=1.8, linestyle=dash, label=name)
        axis.set_title("mean reward of a step, running mean; pale: each step")
        axis.set_xlabel("optimizer step")
        axis.locator_params(axis="x", integer=True)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
        return _save(figure, file)


def panels(steps: Sequence[windows.Step]) -> list[Panel]:
    """The small charts worth drawing: every reward component, then the vital signs that were recorded."""
    found = [
        Panel(f"reward: {name.replace('_', ' ')}", *windows.series(steps, windows.component(name)))
        for name in windows.reward_names(steps)
    ]
    vital = [
        ("groups without spread", "zero_spread", True),
        ("completions cut off", "truncated", True),
        ("completion tokens", "completion_tokens", False),
        ("entropy", "entropy", False),
        ("gradient norm", "grad_norm", False),
        ("KL to the start", "kl", False),
    ]
    found += [Panel(title, *windows.series(steps, key), share=share) for title, key, share in vital]
    return [panel for panel in found if len(panel.steps) > 1]


def smooth(values: Sequence[float]) -> list[float]:
    """Centred running mean over about a tenth of the run (at least three values), over fewer at the ends."""
    half, count = max(1, len(values) // 20), len(values)
    # exact: rounded, a spike would leave nothing of what follows it
    sums = [Fraction(0), *itertools.accumulate(map(Fraction, values))]
    ends = [(max(0, i - half), min(count, i + half + 1)) for i in range(count)]
    return [float((sums[end] - sums[begin]) / (end - begin)) for begin, end in ends]


def _style() -> dict[Any, Any]:
    return {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.edgecolor": "#BBBBBB",
        "axes.labelcolor": INK,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": "#555555",
        "ytick.color": "#555555",
        "text.color": INK,
        "axes.grid": True,
        "grid.color": "#EEEEEE",
        "axes.axisbelow": True,
    }


def _figure(height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _accuracy(scores: Mapping[str, Any]) -> Any:
    """Dots with 95 % intervals for strict, lenient and sampled accuracy, one row each; the delta stands at the right."""
    rows = _accuracy_rows(scores)
    figure, axes = _figure(0.75 + 0.52 * len(rows))
    axis = axes[0][0]
    for y, (_, stages, delta) in enumerate(rows):
        lift = 0.16 if len(stages) > 1 else 0.0
        for i, (stage, (accuracy, (low, high))) in enumerate(stages.items()):
            marker, colour = STAGE_MARKS[stage]
            place = y + lift * (2 * i / max(1, len(stages) - 1) - 1)
            axis.plot(
                [100 * low, 100 * high], [place] * 2, color=colour, linewidth=2, alpha=0.45, solid_capstyle="butt"
            )
            axis.plot(
                100 * accuracy,
                place,
                marker=marker,
                color=colour,
                markersize=7,
                markerfacecolor="white" if stage == "base" else colour,
                markeredgewidth=1.6,
                linestyle="none",
                label=STAGE_LABELS[stage] if y == 0 else None,
            )
        if delta:
            text = f"{points(delta['delta'])}  {span(delta['interval'], sign=True)}"
            axis.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", visible=False)
    low, high = axis.get_xlim()
    axis.set_xlim(max(0, low - 2), min(100, high + 2))
    axis.set_xlabel("accuracy, % of questions; bars are 95 % intervals")
    if any(delta for _, _, delta in rows):
        axis.annotate(
            "change in points", (1.01, 1.0), xycoords="axes fraction", va="bottom", color="#555555", fontsize=8
        )
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False, handletextpad=0.1
    )
    return figure


def _accuracy_rows(scores: Mapping[str, Any]) -> list[tuple[str, dict[str, tuple[float, Sequence[float]]], Any]]:
    stages = scores["stages"]
    rows = [
        (kind, {s: (found[kind]["accuracy"], found[kind]["wilson95"]) for s, found in stages.items()}, scores.get(kind))
        for kind in ("strict", "lenient")
    ]
    sampled = scores.get("sampled") or {}
    if sampled.get("stages"):
        found = {s: (v["accuracy"], v["interval"]) for s, v in sampled["stages"].items()}
        rows.append(("strict, sampled", found, sampled.get("delta")))
    return rows


def _reward(steps: Sequence[windows.Step], events: Sequence[Mapping[str, Any]]) -> Any:
    """Mean reward by step: every step pale, the running mean strong; events that changed the run marked at the foot."""
    figure, axes = _figure(2.6)
    axis = axes[0][0]
    xs, ys = windows.series(steps, "reward")
    line = smooth(ys)
    axis.plot(xs, ys, color=BLUE, linewidth=0.8, alpha=0.35, marker="o", markersize=2.2, markeredgewidth=0)
    axis.plot(xs, line, color=BLUE, linewidth=2.2)
    axis.annotate(f"{line[-1]:.2f}", (xs[-1], line[-1]), (5, 0), textcoords="offset points", va="center", color=BLUE)
    axis.set_title("mean reward of a step; strong line: running mean")
    axis.set_xlabel("optimizer step")
    axis.locator_params(axis="x", integer=True)
    axis.set_xlim(xs[0] - 0.5, xs[-1] + max(1.0, 0.01 * len(xs)))
    foot = axis.get_ylim()[0]
    marked = [e for e in events if e.get("kind") in MARKED_EVENTS and isinstance(e.get("step"), (int, float))]
    for event in marked[:6]:
        axis.plot(event["step"], foot, marker="^", color=ORANGE, markersize=7, clip_on=False)
        axis.annotate(
            str(event["kind"]), (event["step"], foot), (6, 4), textcoords="offset points", color=ORANGE, fontsize=8
        )
    axis.set_ylim(bottom=foot)
    return figure


def _components(found: Sequence[Panel]) -> Any:
    columns = len(found) if len(found) < 4 else min((4, 3), key=lambda c: (-len(found) % c, -c))
    rows = math.ceil(len(found) / columns)
    figure, axes = _figure(1.5 * rows + 0.25, rows, columns)
    for axis, panel in zip(axes.flat, found, strict=False):
        scale = 100.0 if panel.share else 1.0
        values = [scale * v for v in panel.values]
        axis.plot(panel.steps, values, color=GREY, linewidth=0.7, alpha=0.5)
        axis.plot(panel.steps, smooth(values), color=BLUE, linewidth=1.8)
        axis.set_title(panel.title + (", %" if panel.share else ""))
        if panel.share:
            axis.set_ylim(-2, max(10.0, min(102.0, 1.1 * max(values))))
        axis.locator_params(nbins=4)
        axis.locator_params(axis="x", integer=True)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    figure.supxlabel("optimizer step", fontsize=9)
    return figure


def _save(figure: Any, file: Path) -> Path:
    """Write a PNG of 256 colours, a third of the size; no software version is in it, so the same run gives the same bytes."""
    from PIL import Image

    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part:
        Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            part, format="png", optimize=True
        )
    return file
