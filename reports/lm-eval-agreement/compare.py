#!/usr/bin/env python3
"""Reads a run's saved GSM8K answers with lm-evaluation-harness and with answers/extractor.py, and lists every difference.

    pip install lm_eval . && python compare.py RUN_FOLDER [--data gsm8k/test.jsonl] [--out FOLDER]

lm-eval runs as installed: its task file gsm8k.yaml, its filters, its metric, its aggregation. A model that hands back the
saved answers stands in for one that generates; it stops at the task's stop words by lm-eval's own function. --data is GSM8K's
test.jsonl: with it lm-eval gets the published golds, and the golds' own worked answers are read as well. Neither torch nor
the network is needed. Writes report.md and disagreements.jsonl to --out (else to this folder) and puts the notes.md it finds
there into the report; causes.py names the causes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import causes  # beside this file
import page

from grpo_portable.answers import extractor
from grpo_portable.report.markdown import shorten
from grpo_portable.run.folder import read_lines

STYLE = "gsm8k_marker"
STAGES = ("base", "bootstrap", "tuned")


@dataclass(frozen=True)
class Mark:
    """One answer, read by one of lm-eval's filters and by ours."""

    stage: str
    filter: str
    id: str
    gold: str
    theirs: str
    theirs_right: bool
    ours: str | None
    ours_reason: str
    ours_right: bool
    differs: str | None  # "verdict": right for one only; "reading": another number, the same verdict; None: neither
    cause: str | None
    cut: bool  # by the length limit
    ending: str


@dataclass(frozen=True)
class Arm:
    """All answers of one stage. `reported` is lm-eval's own accuracy and standard error by filter."""

    stage: str
    marks: tuple[Mark, ...]
    reported: Mapping[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run folder with generations/*.jsonl or .jsonl.gz")
    parser.add_argument("--data", type=Path, help="GSM8K's test.jsonl (question, answer)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    given = parser.parse_args()
    published = {row["question"]: row["answer"] for row in read_lines(given.data)} if given.data else {}
    arms = []
    for stage in STAGES:
        records = list(read_lines(given.run / "generations" / f"{stage}.jsonl"))
        if records:
            arms.append(compare(stage, records, published))
    if not arms:
        parser.error(f"no saved answers in {given.run / 'generations'}")
    if published:
        golds = [
            {"id": f"test-{i}", "question": q, "completion": a, "gold": a}
            for i, (q, a) in enumerate(published.items(), 1)
        ]
        arms.append(compare(page.GOLDS, golds, published))
    rows = [asdict(mark) for arm in arms for mark in arm.marks if mark.differs]
    given.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (given.out / "disagreements.jsonl").write_text(lines, encoding="utf-8")
    notes = given.out / "notes.md"
    report = page.render(arms, given.run.resolve().name, notes.read_text(encoding="utf-8") if notes.exists() else "")
    (given.out / "report.md").write_text(report, encoding="utf-8")
    for line in page.counts(arms):
        print(line)


def compare(stage: str, records: Sequence[Mapping[str, Any]], published: Mapping[str, str]) -> Arm:
    """Both readings of every record, by both filters. Raises ValueError when a saved gold is not the published one."""
    docs = [{"question": r["question"], "answer": _gold(r, published)} for r in records]
    samples, reported = replay(docs, [r["completion"] for r in records])
    marks = []
    for filter_, theirs in samples.items():
        for record, doc, (text, right) in zip(records, docs, theirs, strict=True):
            marks.append(_mark(stage, filter_, record, doc["answer"], text, right))
    return Arm(stage, tuple(marks), reported)


def replay(
    docs: Sequence[Mapping[str, str]], texts: Sequence[str]
) -> tuple[dict[str, list[tuple[str, bool]]], dict[str, tuple[float, float]]]:
    """What lm-eval reads in each text and whether it calls it right, by filter; and the accuracy and error it reports."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: the questions come from a file
    import datasets
    import lm_eval
    import lm_eval.tasks
    import yaml
    from lm_eval.api.model import LM
    from lm_eval.models.utils import postprocess_generated_text

    class Saved(LM):
        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [postprocess_generated_text(texts[r.doc_id], r.args[1]["until"], None) for r in requests]

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            raise TypeError("GSM8K asks for no likelihood")

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            raise TypeError("GSM8K asks for no likelihood")

    datasets.disable_progress_bars()
    task: dict[str, Any] = {
        "include": str(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"),
        "task": "gsm8k_saved",
        "dataset_path": "json",
        "dataset_name": None,
        "training_split": None,
        "fewshot_split": None,
        "num_fewshot": 0,  # the prompt was the run's own
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "test.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
        task["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": folder}
        file = Path(folder) / "gsm8k_saved.yaml"
        file.write_text(yaml.safe_dump(task), encoding="utf-8")
        results = lm_eval.simple_evaluate(model=Saved(), tasks=[str(file)], bootstrap_iters=1)
    samples: dict[str, list[tuple[str, bool]]] = {name: [] for name in page.OURS}
    for sample in sorted(results["samples"]["gsm8k_saved"], key=lambda sample: sample["doc_id"]):
        samples[sample["filter"]].append((sample["filtered_resps"][0], bool(sample["exact_match"])))
    found = results["results"]["gsm8k_saved"]
    return samples, {
        name: (float(found[f"exact_match,{name}"]), float(found[f"exact_match_stderr,{name}"])) for name in page.OURS
    }


def number(text: str) -> Fraction | None:
    """The number in what a filter of lm-eval caught, after the deletions of its metric (commas, dollars, a final dot)."""
    try:
        return Fraction(text.replace(",", "").replace("$", "").removesuffix("."))
    except ValueError:
        return None


def _mark(stage: str, filter_: str, record: Mapping[str, Any], gold: str, theirs: str, theirs_right: bool) -> Mark:
    text, cut = record["completion"], record.get("finish_reason") == "length"
    ours = extractor.read(text, STYLE) if page.OURS[filter_] == "strict" else extractor.read_lenient(text, STYLE)
    truth = extractor.read_gold(gold, STYLE).value
    ours_right = ours.value is not None and ours.value == truth
    differs = "verdict" if ours_right != theirs_right else "reading" if ours.value != number(theirs) else None
    return Mark(
        stage=stage,
        filter=filter_,
        id=record["id"],
        gold=str(truth),
        theirs=theirs,
        theirs_right=theirs_right,
        ours=None if ours.value is None else str(ours.value),
        ours_reason=ours.reason,
        ours_right=ours_right,
        differs=differs,
        cause=causes.cause(filter_, text, ours, theirs, number(theirs)) if differs else None,
        cut=cut,
        ending=_ending(text, filter_),
    )


def _gold(record: Mapping[str, Any], published: Mapping[str, str]) -> str:
    gold = published.get(record["question"])
    if gold is None:
        return f"#### {record['gold']}"
    if extractor.read_gold(gold, STYLE).value != extractor.read_gold(record["gold"], STYLE).value:
        raise ValueError(f"{record['id']}: the saved gold {record['gold']} is not the published one")
    return gold


def _ending(text: str, filter_: str) -> str:
    """The part of a completion that decides: from its first marker on, or its end."""
    first = text.find("####") if filter_ == "strict-match" else -1
    if first >= 0:
        return shorten(text[max(0, text.rfind("\n", 0, max(0, first - 1)) + 1) :], 200, keep_end=True)
    return text if len(text) <= 200 else "… " + text[-200:].lstrip()


if __name__ == "__main__":
    main()
