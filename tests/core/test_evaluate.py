"""Evaluation: one record an answer, appended as they come, continued where a file ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from grpo_portable.data.questions import Question
from grpo_portable.evaluate import Progress, evaluate, is_complete, join, share_of
from grpo_portable.models import prompts
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Completion, Sampling
from grpo_portable.rollout.reference import ReferenceRollout
from grpo_portable.run.folder import append_line, read_lines

RECIPE = replace(Recipe(), rollout_rows=1, max_completion_tokens=7, stop=("\n\n",), seed=3)  # chunks of four questions
QUESTIONS = [Question(f"test-{i}", f"{i}+1?", str(i + 1), "") for i in range(10)]
TOKENIZER = tiny.tokenizer()
BUILDER = prompts.builder(TOKENIZER, RECIPE)
DATA = prompts.fit(QUESTIONS, BUILDER, max_tokens=100)
ANSWER = ["id", "question", "gold", "completion"]
READING = ["extracted", "correct", "lenient_extracted", "lenient", "tokens", "finish_reason", "marker"]
FIELDS = ANSWER + READING


class Adder:
    """Answers `i+1?` rightly for even i; for odd i without the marker. Sampled answers end with their number in the group."""

    name = "adder"

    def __init__(self, dies_at_call: int | None = None) -> None:
        self.asked: list[str] = []
        self.samplings: list[Sampling] = []
        self.dies_at_call = dies_at_call

    def sync(self, policy: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def generate(self, questions: Any, n: int, sampling: Sampling) -> list[list[Completion]]:
        self.samplings.append(sampling)
        if len(self.samplings) == self.dies_at_call:
            raise KeyboardInterrupt
        return [[self._answer(TOKENIZER.decode(q), k, sampling) for k in range(n)] for q in questions]

    def _answer(self, question: str, k: int, sampling: Sampling) -> Completion:
        self.asked.append(question)
        number = int(question.split("+")[0])
        text = f"#### {number + 1}" if number % 2 == 0 else f"it is {number + 1}"
        ids = TOKENIZER(text + " " * k, add_special_tokens=False)["input_ids"] + [1]
        return Completion(tuple(ids), tuple([-0.1] * len(ids)), "stop")


def test_a_record_holds_the_answer_and_how_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "generations" / "base.jsonl"
    seen = evaluate(Adder(), BUILDER, DATA, RECIPE, file)
    assert seen == Progress(done=10, total=10, correct=5)
    records = list(read_lines(file))
    assert [r["id"] for r in records] == [q.id for q in QUESTIONS]
    assert all(list(r) == FIELDS for r in records)
    assert records[2] == {
        "id": "test-2",
        "question": "2+1?",
        "gold": "3",
        "completion": "#### 3",
        "extracted": "3",
        "correct": True,
        "lenient_extracted": "3",
        "lenient": True,
        "tokens": 7,
        "finish_reason": "stop",
        "marker": True,
    }
    assert (records[3]["correct"], records[3]["lenient"], records[3]["marker"]) == (False, True, False)
    assert is_complete(DATA, file)


def test_greedy_asks_for_the_likeliest_token_with_the_rules_of_training(tmp_path: Path) -> None:
    engine = Adder()
    evaluate(engine, BUILDER, DATA, replace(RECIPE, temperature=0.7, top_p=0.5), tmp_path / "g.jsonl")
    for sampling in engine.samplings:
        assert sampling == Sampling(max_tokens=7, temperature=0.0, stop_ids=(1,), stop_strings=("\n\n",))


def test_sampled_answers_are_numbered_and_drawn_apart(tmp_path: Path) -> None:
    engine, file = Adder(), tmp_path / "s.jsonl"
    seen = evaluate(engine, BUILDER, DATA, replace(RECIPE, eval_temperature=0.9), file, samples=2)
    assert seen == Progress(done=20, total=20, correct=10)
    assert [(r["id"], r["sample"]) for r in read_lines(file)] == [(q.id, k) for q in QUESTIONS for k in (0, 1)]
    assert {s.temperature for s in engine.samplings} == {0.9}
    assert {s.seed for s in engine.samplings} == {None}
    assert is_complete(DATA, file, 2)
    assert not is_complete(DATA, file, 3)


def test_answers_arrive_chunk_by_chunk_and_a_stopped_evaluation_goes_on(tmp_path: Path) -> None:
    whole, file = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    evaluate(Adder(), BUILDER, DATA, RECIPE, whole)
    with pytest.raises(KeyboardInterrupt):
        evaluate(Adder(dies_at_call=2), BUILDER, DATA, RECIPE, file)
    assert len(list(read_lines(file))) == 4
    assert not is_complete(DATA, file)
    with file.open("a") as torn:
        torn.write('{"id": "test-4", "ques')
    again = Adder()
    told: list[Progress] = []
    seen = evaluate(again, BUILDER, DATA, RECIPE, file, progress=told.append)
    assert seen == Progress(done=10, total=10, correct=5)
    assert list(read_lines(file)) == list(read_lines(whole))
    assert again.asked == [q.question for q in QUESTIONS[4:]]
    assert [p.done for p in told] == [4, 8, 10]


def test_a_chunk_that_was_cut_in_two_is_asked_whole_and_written_once(tmp_path: Path) -> None:
    whole, file = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    evaluate(Adder(), BUILDER, DATA, RECIPE, whole)
    records = list(read_lines(whole))
    file.write_text("".join(json.dumps(r) + "\n" for r in records[:6]))
    again = Adder()
    evaluate(again, BUILDER, DATA, RECIPE, file)
    assert again.asked == [q.question for q in QUESTIONS[4:]]
    assert list(read_lines(file)) == records


@pytest.mark.parametrize(
    ("rows", "processes", "calls"),
    [
        (1, 1, [[4, 4, 2]]),
        (1, 2, [[4, 2], [4]]),  # the calls of one process
        (1, 3, [[4], [4], [2]]),
        (2, 1, [[8, 2]]),
        (2, 2, [[8], [2]]),
        (2, 3, [[8], [2], []]),  # shares of another size would round otherwise
        (64, 1, [[10]]),
        (64, 2, [[10], []]),
    ],
)
def test_several_processes_make_the_calls_of_one(
    tmp_path: Path, rows: int, processes: int, calls: list[list[int]]
) -> None:
    file, seen = tmp_path / "g.jsonl", []
    for rank in range(processes):
        engine = Calls()
        recipe, part = replace(RECIPE, rollout_rows=rows), share_of(file, rank)
        evaluate(engine, BUILDER, DATA, recipe, part, turn=(rank, processes))
        seen.append(engine.sizes)
    assert seen == calls
    join(DATA, file)
    whole = tmp_path / "whole.jsonl"
    evaluate(Adder(), BUILDER, DATA, RECIPE, whole)
    assert list(read_lines(file)) == list(read_lines(whole))


@pytest.mark.parametrize(
    ("rows", "processes", "engine"),
    [
        (rows, processes, engine)
        for rows, processes in ((64, 1), (2, 1), (1, 1), (64, 2), (1, 3))
        for engine in (PortableRollout, ReferenceRollout)
    ],
)
def test_a_sampled_answer_is_its_questions_own_whatever_shares_the_call(
    tmp_path: Path, rows: int, processes: int, engine: Any
) -> None:
    model = tiny.model()

    def asked(name: str, rows: int, processes: int, seed: int = 3) -> list[dict[str, Any]]:
        file = tmp_path / f"{name}.jsonl"
        recipe = replace(RECIPE, rollout_rows=rows, stop=(), seed=seed)
        for rank in range(processes):
            made = engine(model, TOKENIZER, rows=rows)
            evaluate(made, BUILDER, DATA, recipe, share_of(file, rank), samples=2, turn=(rank, processes))
        join(DATA, file)
        return list(read_lines(file))

    whole = asked("whole", 4, 1)
    assert asked("part", rows, processes) == whole
    assert asked("other", 4, 1, seed=4) != whole
    assert len({record["completion"] for record in whole}) > 15  # of 20: neither questions nor samples share noise


def test_every_stage_draws_with_the_same_noise(tmp_path: Path) -> None:
    engines = Adder(), Adder()
    for name, engine in zip(("base", "tuned"), engines, strict=True):
        evaluate(engine, BUILDER, DATA, RECIPE, tmp_path / f"{name}.jsonl", samples=2)
    seeds = [[seed for sampling in engine.samplings for seed in sampling.seeds] for engine in engines]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == len(QUESTIONS)


class Calls(Adder):
    """Keeps how many questions each call had."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def generate(self, questions: Any, n: int, sampling: Sampling) -> list[list[Completion]]:
        self.sizes.append(len(questions))
        return super().generate(questions, n, sampling)


@pytest.mark.parametrize(
    ("there", "part", "rewritten"),
    [
        ([0, 1, 2, 3], None, False),
        ([], None, False),
        ([2, 3, 0, 1], None, True),  # one process went on where of two only the second had written
        ([0, 3, 1], None, True),
        ([0, 1], [3, 2], True),
    ],
)
def test_answers_stand_in_the_order_of_the_questions(
    there: list[int], part: list[int] | None, rewritten: bool, tmp_path: Path
) -> None:
    file = tmp_path / "base.jsonl"
    for place, numbers in ((file, there), (share_of(file, 1), part)):
        for number in numbers or ():
            append_line(place, {"id": DATA.questions[number].id, "correct": True})
    before = file.stat().st_ino if there else None
    join(DATA, file)
    assert [r["id"] for r in read_lines(file)] == [DATA.questions[n].id for n in sorted(there + (part or []))]
    assert file.exists() == bool(there) and (not there or (file.stat().st_ino != before) == rewritten)


def test_a_complete_file_is_not_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "g.jsonl"
    evaluate(Adder(), BUILDER, DATA, RECIPE, file)
    engine = Adder()
    assert evaluate(engine, BUILDER, DATA, RECIPE, file) == Progress(10, 10, 5)
    assert engine.asked == []
