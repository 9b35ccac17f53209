"""What tests/gpu/two_cards.sh left, as a page: `python reports/two-h200/page.py OUT/x2`.

Copies it beside this file, writes report.md, and prints the line for `MEASURED` in doctor/spread.py. What was not measured
(`rollout.json`, `compare.txt`, the runs) is left out.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doctor.cards import find_card
from grpo_portable.bench.gpus import table

HERE = Path(__file__).parent
FILES = ("step.json", "rollout.json", "compare.txt", "topology.txt", "facts.json")
RUNS = ("smollm2-one-card", "smollm2-two-cards")
ANSWERS = tuple(f"{run}/generations/base.jsonl.gz" for run in RUNS)  # of the base, greedy, as the runs wrote them
WANTED = {"step": 1.8, "rollout": 1.9}  # times as fast as one card


def measured(step: Mapping[str, Any]) -> str:
    """The line of doctor/spread.py's `MEASURED` for a report of one and two cards."""
    one, two = (next(seen for seen in step["on"] if seen["processes"] == count) for count in (1, 2))
    seconds = f"{one['seconds_median']}, {two['seconds_median']}"
    card = find_card(step["device"])[0].name
    return f'Measured("{card}", "{work(step)}", {seconds}, "reports/two-h200/step.json"),'


def work(step: Mapping[str, Any]) -> str:
    """What a step of the report consists of."""
    size = step["step"]
    tokens = f"{size['questions']} x {size['group']} completions of {size['longest_completion']} tokens"
    return f"{step['model']}, {step['path']}, {tokens}"


def page(
    step: Mapping[str, Any],
    rollout: Mapping[str, Any] | None,
    compared: str | None,
    runs: tuple[str, ...],
    answers: tuple[bytes, bytes] | None = None,
) -> str:
    """The page in Markdown. `compared`: what `grpo-portable compare` said of `runs`; `answers`: ANSWERS, unpacked."""
    lines = [
        "# Two cards of one host",
        "",
        f"**A whole step: {_times(step['times'], WANTED['step'])}. "
        f"Its rollouts: {_times(step['rollout_times'], WANTED['rollout'])}.** "
        "The same global batch on one card and on both.",
        "",
        "`bash tests/gpu/two_cards.sh speed` (`step.json`): random weights, one step to warm up, the median of the two after",
        "it. Seconds of a step are those of the run's own metrics, meeting points included; those of a rollout are the slower",
        "card's, with the engine's sync. `topology.txt` says how the cards are joined, `facts.json` what the machine is.",
        "",
        "```",
        table(step),
        "```",
    ]
    if rollout is not None:
        lines += ["", "Rollouts alone (`two_cards.sh rollout`, `rollout.json`):", "", "```", table(rollout), "```"]
    if answers is not None:
        one, two = (file.splitlines() for file in answers)
        same = sum(a == b for a, b in zip(one, two, strict=True))
        lines += [
            "",
            f"**Answers of two cards and of one: {same:,} of {len(one):,} are the same, byte for byte.** SmolLM2-135M-Instruct",
            f"before training, greedy, GSM8K's test questions (`two_cards.sh smollm2`; `{ANSWERS[0]}`, `{ANSWERS[1]}`).",
        ]
    if compared is not None:
        lines += [
            "",
            "## SmolLM2-135M-Instruct on GSM8K",
            "",
            "`two_cards.sh smollm2`: the same recipe on one card and on two, "
            + " and ".join(f"[{name}]({name}/report.md)" for name in runs)
            + ". Both ran at the same",
            "time and shared a card, so only what they learnt is to be compared, not their seconds.",
            "The first step on two cards was made in evaluation mode, and its reward is missing in `metrics.jsonl`",
            "(mended since).",
            "",
            "```",
            compared.strip(),
            "```",
        ]
    return "\n".join([*lines, ""])


def _times(seen: float | None, wanted: float) -> str:
    if seen is None:
        return "not measured"
    return f"{seen:.2f} times as fast ({wanted} were wanted{'' if seen >= wanted else ', and missed'})"


def answers_kept() -> tuple[bytes, bytes] | None:
    """The content of ANSWERS, where both are there."""
    if not all((HERE / name).is_file() for name in ANSWERS):
        return None
    one, two = (gzip.decompress((HERE / name).read_bytes()) for name in ANSWERS)
    return one, two


def main(place: Path) -> int:
    """Copy what is in `place`, write report.md, print the line to paste; the exit code."""
    for name in FILES:
        if (place / name).is_file() and (place / name).stat().st_size:
            shutil.copy(place / name, HERE / name)
    for name in RUNS:
        if (place / "reports" / name).is_dir():
            shutil.copytree(place / "reports" / name, HERE / name, dirs_exist_ok=True)
    step = json.loads((HERE / "step.json").read_text(encoding="utf-8"))
    rollout, compared = HERE / "rollout.json", HERE / "compare.txt"
    text = page(
        step,
        json.loads(rollout.read_text(encoding="utf-8")) if rollout.is_file() else None,
        compared.read_text(encoding="utf-8") if compared.is_file() else None,
        tuple(name for name in RUNS if (HERE / name).is_dir()),
        answers_kept(),
    )
    (HERE / "report.md").write_text(text, encoding="utf-8")
    print(measured(step))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
