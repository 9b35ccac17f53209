"""Held-out questions → generations: greedy answers, and sampled ones if asked for, one JSON line each as they arrive.

Base, bootstrapped and tuned model are asked through the same prompts with the same stop rules and token limit, by the
engine of the run's path. A file is continued where it ends: what is in it is kept and not asked again.

    id, question, gold, completion, extracted, correct, lenient_extracted, lenient, tokens, finish_reason, marker (, sample)
"""

from __future__ import annotations

import glob
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.answers import extractor, judge
from grpo_portable.data.questions import Question
from grpo_portable.models.prompts import Fitted, PromptBuilder, completion_text
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Completion, Rollout, Sampling
from grpo_portable.run.folder import append_line, read_lines, write_atomically


@dataclass(frozen=True)
class Progress:
    done: int
    total: int
    correct: int


def evaluate(
    engine: Rollout,
    prompts: PromptBuilder,
    data: Fitted,
    recipe: Recipe,
    file: Path,
    *,
    samples: int = 0,
    progress: Callable[[Progress], None] = lambda seen: None,
    known: Sequence[Path] = (),
    turn: tuple[int, int] = (0, 1),
) -> Progress:
    """Append what is missing in `file`: the greedy answer of each question, or `samples` drawn ones when `samples` > 0.

    The engine must already hold the weights to be asked. Returns how many answers the file holds, and how many are right.
    What the files `known` hold is not asked again. With `turn` (r, n) only every n-th chunk from the r-th on is asked: n
    processes ask what one would, in the same calls of the engine, so that they get the same answers.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    wanted, (first, every) = max(1, samples), turn
    # Four times what the engine holds at once, so that it can fill rows that end early. Twice as many would spare a GPU a tenth
    # of its steps and a CPU nothing, lose twice as much when killed, and leave several processes too few chunks to share.
    chunks = list(_chunks(data, max(1, 4 * int(recipe.rollout_rows) // wanted)))[first::every]
    found = _known((file, *known))
    asked = {(q.id, k) for chunk in chunks for q, _ in chunk for k in range(wanted)}
    right = sum(correct for key, correct in found.items() if key in asked)
    done = len(found.keys() & asked)
    progress(Progress(done, len(asked), right))
    for chunk in chunks:
        missing = {(q.id, k) for q, _ in chunk for k in range(wanted)} - found.keys()
        if not missing:
            continue
        # the whole chunk is asked again: products round by the rows beside them, so that a continued file holds to the bit what
        # an uninterrupted one would
        sampling = _sampling(prompts, recipe, [q for q, _ in chunk] if samples else [])
        groups = engine.generate([ids for _, ids in chunk], wanted, sampling)
        for (question, _), group in zip(chunk, groups, strict=True):
            for k, completion in enumerate(group):
                if (question.id, k) not in missing:
                    continue
                record = answered(question, completion, prompts, recipe.answer_style)
                append_line(file, record | {"sample": k} if samples else record)
                done, right = done + 1, right + record["correct"]
        progress(Progress(done, len(asked), right))
    return Progress(done, len(asked), right)


def _known(files: Iterable[Path]) -> dict[tuple[str, int], bool]:
    """(question's id, number of the sample) → whether it is right, of all answers in the files."""
    return {(r["id"], r.get("sample", 0)): bool(r.get("correct")) for f in files for r in read_lines(f)}


def counted(data: Fitted, file: Path, samples: int = 0) -> Progress:
    """How many of the answers `evaluate` would ask for `file` holds, and how many are right."""
    asked = {(q.id, k) for q in data.questions for k in range(max(1, samples))}
    found = {key: correct for key, correct in _known([file]).items() if key in asked}
    return Progress(len(found), len(asked), sum(found.values()))


def is_complete(data: Fitted, file: Path, samples: int = 0) -> bool:
    """Whether `file` holds every answer `evaluate` would ask for."""
    seen = counted(data, file, samples)
    return seen.done == seen.total


def share_of(file: Path, rank: int) -> Path:
    """Where one of several processes writes its part of what belongs into `file`."""
    return file.with_name(f".{file.stem}-{rank}{file.suffix}")


def shares(file: Path) -> list[Path]:
    """The parts of `file` that processes have written, also those of an earlier start with more of them."""
    return sorted(file.parent.glob(f".{glob.escape(file.stem)}-[0-9]*{file.suffix}"))


def join(data: Fitted, file: Path) -> None:
    """Put the parts that several processes wrote into `file`, and its answers in the order of the questions."""
    parts = shares(file)
    order = {q.id: i for i, q in enumerate(data.questions)}
    records = {(r["id"], r.get("sample", 0)): r for f in (file, *parts) for r in read_lines(f) if r["id"] in order}
    whole = sorted(records.values(), key=lambda r: (order[r["id"]], r.get("sample", 0)))
    if not parts and whole == list(records.values()):
        return
    write_atomically(file, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in whole))
    for part in parts:
        part.unlink(missing_ok=True)


def answered(question: Question, completion: Completion, prompts: PromptBuilder, style: str) -> dict[str, Any]:
    """The record of one answer."""
    text = completion_text(prompts.tokenizer, completion.token_ids, prompts.stop_ids)
    gold = question.gold
    return {
        "id": question.id,
        "question": question.question,
        "gold": gold,
        "completion": text,
        "extracted": judge.extracted(text, gold, style),
        "correct": bool(judge.correct(text, gold, style)),
        "lenient_extracted": judge.extracted_lenient(text, gold, style),
        "lenient": bool(judge.lenient(text, gold, style)),
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "marker": extractor.has_marker(text, style),
    }


def _chunks(data: Fitted, size: int) -> Iterator[Sequence[tuple[Question, tuple[int, ...]]]]:
    pairs = list(zip(data.questions, data.prompts, strict=True))
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _sampling(prompts: PromptBuilder, recipe: Recipe, drawn: Sequence[Question]) -> Sampling:
    """Greedy is the model's first choice with nothing added; answers to the questions `drawn`, if there are any, come from the
    whole distribution at eval_temperature. Their noise is a question's and a sample's own: what memory made of chunks, and how
    many processes share them, does not change it, and every stage draws with the same.
    """
    return Sampling(
        max_tokens=recipe.max_completion_tokens,
        temperature=recipe.eval_temperature if drawn else 0.0,
        stop_ids=prompts.stop_ids,
        stop_strings=recipe.stop,
        seeds=tuple(random.Random(f"evaluation {recipe.seed} {q.id}").getrandbits(62) for q in drawn),
    )
