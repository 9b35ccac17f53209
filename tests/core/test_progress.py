"""What the user sees of a run while it goes on, read from its files."""

import io

import pytest
import run_folders

from grpo_portable.progress import Progress
from grpo_portable.recipe import Recipe
from grpo_portable.run import append_line, create


@pytest.fixture
def run(tmp_path):
    return create(tmp_path / "run", Recipe(path="cpu", micro_batch=8, rollout_rows=64))


def lines(run, *happened):
    """What is printed when the run does one thing after the other; text is a sign of life, a list answers of the base."""
    out = io.StringIO()
    with Progress(run, 3, out) as display:
        for thing in happened:
            if isinstance(thing, str):
                run.heartbeat(thing)
            else:
                run_folders.write_answers(run, "base", thing)
            display.look()
    return out.getvalue().splitlines()


def test_the_base_score_is_told_before_training_begins(run):
    answers = ["right"] * 3 + ["wrong"] * 5
    told = lines(run, "evaluating base, 0/8", answers, "evaluating base, 8/8", "training", "rollout of step 1")
    assert told == ["evaluating base, 0/8", "base: 3 of 8 answers are right (37.5 %)", "training"]


def test_it_is_told_also_when_nobody_saw_the_last_chunk_counted(run):
    told = lines(run, "evaluating base, 4/8", ["right"] * 8, "evaluating base-sampled, 0/16")
    assert told[1:] == ["base: 8 of 8 answers are right (100.0 %)", "evaluating base-sampled, 0/16"]


def test_an_evaluation_that_was_cut_short_has_no_score(run):
    assert lines(run, "evaluating base, 0/8", ["right"] * 4, "loading embedded", "evaluating base, 4/8") == [
        "evaluating base, 0/8",
        "loading embedded",
        "evaluating base, 4/8",
    ]


def test_a_step_is_one_line(run):
    out = io.StringIO()
    with Progress(run, 3, out) as display:
        step = {"step": 1, "reward": 0.5, "tokens_per_s": 840.2, "memory_gib": 1.23, "seconds": 10.0}
        append_line(run.metrics_file, step)
        display.look()
    assert out.getvalue() == "step 1/3  reward 0.500  840 tok/s  1.2 GiB  20s left\n"
