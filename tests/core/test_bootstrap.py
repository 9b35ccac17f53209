"""What the bootstrap teaches, from which rows, and how its probe judges the format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from grpo_portable.data.questions import Question
from grpo_portable.errors import DataError
from grpo_portable.models import prompts
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Completion, Sampling
from grpo_portable.training import bootstrap
from grpo_portable.training.arguments import sft_arguments
from grpo_portable.training.batches import ShuffledSteps, by_length_within_steps

RECIPE = replace(Recipe(), max_completion_tokens=32, prompt_template="{question}\n", seed=3)
QUESTIONS = [Question(f"q-{i}", f"{i} plus 1?", str(i + 1), f"{i}+1={i + 1}\n#### {i + 1}") for i in range(10)]
BUILDER = prompts.builder(tiny.tokenizer(), RECIPE)


def decoded(ids: list[int]) -> str:
    return BUILDER.tokenizer.decode(ids)


def test_only_the_answer_and_its_end_are_taught() -> None:
    example = bootstrap.rows(QUESTIONS[:1], BUILDER, RECIPE).examples[0]
    assert decoded(example["input_ids"]) == "0 plus 1?\n0+1=1\n#### 1<eos>"
    taught = [i for i in example["labels"] if i != -100]
    assert decoded(taught) == "0+1=1\n#### 1<eos>"
    assert example["labels"][-len(taught) :] == taught


def test_rows_that_would_teach_guessing_or_cutting_off_are_left_out() -> None:
    bare = [replace(q, answer=q.gold) for q in QUESTIONS[:2]]
    long = [replace(QUESTIONS[2], answer="1 and 1 is 2, " * 4 + "so 3\n#### 3")]
    made = bootstrap.rows([*bare, *long, *QUESTIONS[3:]], BUILDER, RECIPE)
    assert (len(made.examples), made.over_length, made.no_working) == (7, 1, 2)
    with pytest.raises(DataError, match="nothing to learn from") as refused:
        bootstrap.rows(bare, BUILDER, RECIPE)
    assert "bootstrap_data" in (refused.value.help or "")
    with pytest.raises(DataError, match="longer than max_completion_tokens"):
        bootstrap.rows(long, BUILDER, RECIPE)


def test_the_probe_asks_questions_the_bootstrap_does_not_use() -> None:
    recipe = replace(RECIPE, bootstrap_limit=6, bootstrap_probe=4)
    taught = {decoded(e["input_ids"]).partition("\n")[0] for e in bootstrap.rows(QUESTIONS, BUILDER, recipe).examples}
    fitted = prompts.fit(QUESTIONS, BUILDER, max_tokens=64)
    asked = {decoded(list(ids)).partition("\n")[0] for ids in bootstrap.probe_prompts(fitted, recipe)}
    assert len(taught) == 6
    assert len(asked) == 4
    assert not taught & asked


class Scripted:
    """An engine that gives these texts."""

    name = "scripted"

    def __init__(self, *texts: str) -> None:
        self.texts, self.synced = texts, 0

    def sync(self, model: Any) -> None:
        self.synced += 1

    def generate(self, asked: Any, n: int, sampling: Sampling) -> list[list[Completion]]:
        assert (sampling.temperature, sampling.min_p) == (0.7, 0.1)  # as rollouts are drawn
        ids = [BUILDER.tokenizer(text)["input_ids"] for text in self.texts]
        return [[Completion(tuple(row), (0.0,) * len(row), "stop")] for row in ids]

    def close(self) -> None:
        pass


def test_the_share_counts_the_format_not_the_answer() -> None:
    engine = Scripted("so\n#### 1", "so\n#### 999<eos>", "so 1", "#### 1 apples")
    share = bootstrap.format_share(
        engine, tiny.model(), BUILDER, [(1,)] * 4, replace(RECIPE, temperature=0.7, min_p=0.1)
    )
    assert share == 0.5
    assert engine.synced == 1


@pytest.mark.parametrize(
    ("rows", "batch", "micro", "world", "shared"),
    [
        (100, 16, 8, 1, (8, 2, 13)),  # rows of a micro-batch, micro-batches of a step, steps of two epochs
        (100, 16, 6, 1, (4, 4, 13)),  # what divides the batch
        (5, 16, 8, 1, (5, 1, 2)),  # not more than there are
        (100, 16, 8, 3, (5, 1, 14)),  # 15 rows, five each
        (2, 16, 8, 3, (1, 1, 2)),  # each has one
    ],
)
def test_processes_have_as_many_rows_of_a_batch_each(
    tmp_path: Path, rows: int, batch: int, micro: int, world: int, shared: tuple[int, int, int]
) -> None:
    recipe = replace(RECIPE, bootstrap_batch=batch, bootstrap_epochs=2.0, micro_batch=micro)
    made = sft_arguments(recipe, rows=rows, output_dir=tmp_path, dtype="float32", cpu=True, world=world)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps, made.max_steps) == shared


def test_a_step_keeps_its_rows_and_its_micro_batches_are_of_like_length() -> None:
    lengths = [5, 9, 1, 7, 3, 8]
    assert by_length_within_steps([0, 1, 2, 3, 4, 5], lengths, 4) == [1, 3, 0, 2, 5, 4]  # 9 7 5 1, then 8 3
    # micro-batches of two: 2 x 9 + 2 x 5 + 2 x 8 tokens with padding, 2 x 9 + 2 x 7 + 2 x 8 before
    seen = list(sampler := ShuffledSteps(lengths, 2, seed=1))
    assert sorted(seen) == list(range(6)) and seen == list(ShuffledSteps(lengths, 2, seed=1))
    assert all(lengths[a] >= lengths[b] for a, b in zip(seen[::2], seen[1::2], strict=True))
    steps = {frozenset(seen[i : i + 2]) for i in (0, 2, 4)}
    sampler.set_epoch(1)
    other = list(sampler)
    assert {frozenset(other[i : i + 2]) for i in (0, 2, 4)} != steps
