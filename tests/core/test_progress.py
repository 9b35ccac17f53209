"""What the user sees of a run while it goes on, read from its files."""

import io
import re

import pytest
import run_folders

from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import append_line, create
from grpo_portable.run.progress import Progress
from grpo_portable.supervision.phase import Phase
from grpo_portable.training import metrics


@pytest.fixture
def run(tmp_path):
    return create(tmp_path / "run", Recipe(path="cpu", micro_batch=8, rollout_rows=64))


def asking(stage, done, total):
    """The sign of life of an evaluation."""
    words = f"evaluating {stage}, {done}/{total}"
    return {"phase": Phase.EVALUATION, "doing": words, "stage": stage, "total": total}


def of_a_step(phase):
    return {"phase": phase, "doing": f"what {phase} is called"}


def lines(run, *happened):
    """What is printed when the run does one thing after the other; text and records are signs of life, a list answers of the
    base, a number a step; what stands in a tuple happens between two looks.
    """
    out = io.StringIO()
    with Progress(run, 3, out) as display:
        for things in happened:
            for thing in things if isinstance(things, tuple) else (things,):
                if isinstance(thing, int):
                    append_line(run.metrics_file, {"step": thing})
                elif isinstance(thing, list):
                    run_folders.write_answers(run, "base", thing)
                else:
                    run.heartbeat(**({"phase": Phase.STARTING, "doing": thing} if isinstance(thing, str) else thing))
            display.look()
    return out.getvalue().splitlines()


def test_the_base_score_is_told_before_training_begins(run):
    answers = ["right"] * 3 + ["wrong"] * 5
    told = lines(run, asking("base", 0, 8), answers, asking("base", 8, 8), "training", of_a_step(Phase.ROLLOUT))
    assert told == ["evaluating base, 0/8", "base: 3 of 8 answers are right (37.5 %)", "training"]


@pytest.mark.parametrize("next_one", [[asking("base-sampled", 0, 16)], []], ids=["another follows", "the last"])
def test_it_is_told_also_when_nobody_saw_the_last_chunk_counted(run, next_one):
    told = lines(run, asking("base", 4, 8), ["right"] * 8, *next_one)
    assert told[1:] == ["base: 8 of 8 answers are right (100.0 %)", *(beat["doing"] for beat in next_one)]


def test_an_evaluation_that_was_cut_short_has_no_score(run):
    assert lines(run, asking("base", 0, 8), ["right"] * 4, "loading embedded", asking("base", 4, 8)) == [
        "evaluating base, 0/8",
        "loading embedded",
        "evaluating base, 4/8",
    ]


def test_of_what_is_being_done_only_the_record_counts(run):
    """The words are for a reader: nothing is taken from them."""
    assert lines(run, "evaluating base, 0/1", ["right"], "training") == ["evaluating base, 0/1", "training"]


def test_a_step_is_told_before_what_came_after_it(run):
    told = lines(run, of_a_step(Phase.UPDATE), (3, asking("tuned", 0, 8)))
    assert told == ["step 3/3", "evaluating tuned, 0/8"]


def test_rows_that_were_left_out_are_told_at_once_and_not_again_on_resume(run):
    run.event("data", "1 of 2 rows of q.jsonl (train) cannot be used")
    run.event("resume", "the run goes on")
    out = io.StringIO()
    with Progress(run, 3, out) as display:
        run.event("data", "3 of 9 rows of more.jsonl (test) cannot be used")
        run.event("saved", "after step 2")
        display.look()
        display.look()
    assert out.getvalue() == "note: 3 of 9 rows of more.jsonl (test) cannot be used\n"


def test_a_long_note_is_wrapped(run):
    out = io.StringIO()
    with Progress(run, 3, out) as display:
        run.event("data", "3 of 9 rows of more.jsonl (test) cannot be used: " + "the answer holds no number, " * 5)
        display.look()
    said = out.getvalue().splitlines()
    assert len(said) > 1 and max(map(len, said)) <= 80 and said[1].startswith("  ")


@pytest.mark.parametrize("seen", [True, False], ids=["a retry", "a resume"])
def test_of_a_run_that_goes_on_only_new_steps_are_told(run, seen):
    """Its lines after the checkpoint are cut off, so that the file is read anew."""
    out = io.StringIO()
    made = lambda *steps: [append_line(run.metrics_file, {"step": step}) for step in steps]  # noqa: E731
    if not seen:
        made(1, 2, 3)
    with Progress(run, 4, out) as display:
        if seen:
            made(1, 2, 3)
        display.look()
        run.event("resume", "training goes on from step 2", step=2)
        metrics.cut(run, 2)
        display.look()
        made(3)
        display.look()
        made(4)
    before = ["step 1/4", "step 2/4", "step 3/4"] if seen else []
    assert out.getvalue().splitlines() == [*before, "training goes on from step 2", "step 3/4", "step 4/4"]


def test_a_step_is_one_line(run):
    out = io.StringIO()
    with Progress(run, 3, out) as display:
        step = {"step": 1, "reward": 0.5, "tokens_per_s": 840.2, "memory_gib": 1.23, "seconds": 10.0}
        append_line(run.metrics_file, step)
        display.look()
    assert out.getvalue() == "step 1/3  reward 0.500  840 tok/s  1.2 GiB  20s left\n"


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self):
        return True


def test_on_a_terminal_a_step_has_a_line_of_its_own(run, monkeypatch):
    """Beside the bar, 80 columns would cut it off after the reward's first digit."""
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    with Progress(run, 50, out) as display:
        step = {"step": 12, "reward": 0.5, "tokens_per_s": 840.2, "memory_gib": 1.23, "seconds": 60.0}
        append_line(run.metrics_file, step)
        display.look()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    told = "step 12/50  reward 0.500  840 tok/s  1.2 GiB  3m 10s left"
    assert told in [line.strip() for line in re.split(r"[\r\n]+", shown)]
