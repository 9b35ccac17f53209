"""Scores are read from completions and golds alone, over the questions that all stages answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import run_folders
import spent

from grpo_portable.run.folder import append_line
from grpo_portable.scores import scoring, stats
from grpo_portable.scores.verdict import p_text, points, sentence, span


def hand_run(tmp_path, before: list[str], after: list[str] | None):
    run = run_folders.make_run(tmp_path / "run", n=0, steps=0, stages=())
    run_folders.write_answers(run, "base", before)
    if after is not None:
        run_folders.write_answers(run, "tuned", after)
    return run


def test_scores_by_hand(tmp_path):
    """Ten questions: base 4 right, 2 right without the marker, 3 wrong, 1 cut; tuned 7 right, 2 wrong, 1 empty."""
    before = ["right"] * 4 + ["plain"] * 2 + ["wrong"] * 3 + ["cut"]
    after = ["wrong"] + ["right"] * 7 + ["wrong", ""]
    scores = scoring.score_run(hand_run(tmp_path, before, after))
    assert scores["n"] == 10
    assert (scores["base"], scores["tuned"], scores["delta"]) == (0.4, 0.7, 0.3)
    assert scores["counts"] == {"both": 3, "gained": 4, "lost": 1, "neither": 2}
    assert scores["p"] == 0.375  # 5 discordant, 1 lost: 2 (1 + 5) / 32
    assert scores["against"] == "base"
    assert scores["lenient"]["base"] == 0.6
    assert scores["lenient"]["counts"] == {"both": 5, "gained": 2, "lost": 1, "neither": 2}
    base = scores["stages"]["base"]
    assert base["strict"] == {"correct": 4, "accuracy": 0.4, "wilson95": pytest.approx(stats.wilson(4, 10), abs=1e-6)}
    assert (base["marker_rate"], base["truncated_rate"], base["unreadable_rate"]) == (0.7, 0.1, 0.3)
    assert scores["stages"]["tuned"]["unreadable_rate"] == 0.1
    both = scores["both_answered"]  # questions 0-3 and 6-8: base 4 of 7, tuned 3 + 2 of 7
    assert (both["n"], both["counts"]) == (7, {"both": 3, "gained": 2, "lost": 1, "neither": 1})
    assert scores["format_gain"]["delta"] == pytest.approx(0.3 - 0.1)


def test_flat_keys_are_the_strict_block(tmp_path):
    scores = scoring.score_run(run_folders.make_run(tmp_path / "run", n=60))
    for key in ("base", "tuned", "delta", "interval", "p", "counts", "n"):
        assert scores[key] == scores["strict"][key]
    assert scores["tuned"] - scores["base"] == pytest.approx(scores["delta"], abs=1e-5)


def test_stored_marks_are_never_trusted(tmp_path):
    """A file that claims every answer right, every text read, scores what its completions say; the difference is told."""
    run = run_folders.make_run(tmp_path / "run", n=40)
    honest = scoring.score_run(run)
    lie = {"correct": True, "lenient": True, "marker": True, "extracted": "1"}
    run_folders.rewrite(run, "base", lambda record: {**record, **lie})
    scores = scoring.score_run(run)
    told = scores.pop("notes")
    assert scores == {key: value for key, value in honest.items() if key != "notes"}
    assert not honest["notes"]
    assert "stored marks differ" in told[0]


def test_no_stored_marks_are_needed(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=40)
    honest = scoring.score_run(run)
    for stage in ("base", "tuned"):
        run_folders.rewrite(run, stage, lambda r: {k: r[k] for k in ("id", "question", "gold", "completion")})
    scores = scoring.score_run(run)
    assert scores["strict"] == honest["strict"]
    assert scores["stages"]["base"]["truncated_rate"] is None
    assert scores["stages"]["base"]["mean_tokens"] is None


def test_only_questions_of_both_stages_count(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=50)
    run_folders.rewrite(run, "tuned", lambda record: record if record["id"] < 30 else None)
    scores = scoring.score_run(run)
    assert scores["n"] == scores["stages"]["base"]["n"] == 30
    assert scores["answered"] == {"base": 50, "tuned": 30}
    assert "base 50, tuned 30" in scores["notes"][0]


def test_same_id_with_another_question_is_not_the_same_question(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=20)
    run_folders.rewrite(run, "tuned", lambda r: {**r, "gold": "0"} if r["id"] < 3 else r)
    scores = scoring.score_run(run)
    assert scores["n"] == 17
    assert "3 ids stand for different questions" in scores["notes"][0]


def test_an_answer_written_twice_counts_once_and_last(tmp_path):
    run = hand_run(tmp_path, ["wrong"] * 6, ["wrong"] * 6)
    append_line(run.generations("tuned"), run_folders.record(2, "right"))
    with run.generations("tuned").open("a") as out:
        out.write('{"id": 3, "question": "torn')
    scores = scoring.score_run(run)
    assert (scores["n"], scores["counts"]["gained"]) == (6, 1)


@pytest.mark.parametrize("stage", ["base", "tuned"])
def test_one_stage_alone_has_no_delta(tmp_path, stage):
    run = run_folders.make_run(tmp_path / "run", n=30, stages=(stage,))
    scores = scoring.score_run(run)
    assert list(scores["stages"]) == [stage]
    assert scores["against"] is scores["delta"] is scores["p"] is None
    assert "there is no delta" in sentence(scores)


def test_nothing_evaluated_yet(tmp_path):
    scores = scoring.score_run(run_folders.make_run(tmp_path / "run", stages=()))
    assert (scores["n"], scores["stages"]) == (0, {})
    assert sentence(scores).startswith("Nothing was evaluated yet")


def test_with_a_bootstrap_the_delta_is_against_it(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=80, stages=("base", "bootstrap", "tuned"))
    scores = scoring.score_run(run)
    assert scores["against"] == "bootstrap"
    assert scores["base"] == scores["stages"]["bootstrap"]["strict"]["accuracy"]
    assert scores["whole"]["strict"]["base"] == scores["stages"]["base"]["strict"]["accuracy"]
    assert "after the bootstrap" in sentence(scores)


def test_sampled_answers_have_the_question_as_unit(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=60, samples=8)
    sampled = scoring.score_run(run)["sampled"]
    records = [json.loads(line) for line in run.generations("base-sampled").read_text().splitlines()]
    flags = [[r["correct"] for r in records if r["id"] == i] for i in range(60)]
    mean = stats.clustered(flags)
    base = sampled["stages"]["base"]
    assert base["samples"] == 8
    assert base["accuracy"] == pytest.approx(mean.mean, abs=1e-6)
    assert base["interval"] == pytest.approx(mean.interval, abs=1e-6)
    assert base["any_correct"] == pytest.approx(sum(map(any, flags)) / 60, abs=1e-6)
    accuracy = [sampled["stages"][s]["accuracy"] for s in ("base", "tuned")]
    assert sampled["delta"]["delta"] == pytest.approx(accuracy[1] - accuracy[0], abs=1e-5)


def test_scoring_again_gives_the_same_bytes(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=60, samples=2)
    scoring.score_run(run)
    first = (run.path / "scores.json").read_bytes()
    scoring.score_run(run)
    assert (run.path / "scores.json").read_bytes() == first


def warning(before: list[str], after: list[str], tmp_path) -> list[str]:
    return [w["kind"] for w in scoring.score_run(hand_run(tmp_path, before, after))["warnings"]]


def test_warning_when_the_interval_holds_zero(tmp_path):
    assert warning(["right", "wrong"] * 20, ["right", "right", "wrong", "wrong"] * 10, tmp_path) == ["not_shown"]


def test_warning_when_the_gain_is_only_format(tmp_path):
    assert warning(["plain"] * 40 + ["wrong"] * 20, ["right"] * 40 + ["wrong"] * 20, tmp_path) == ["format"]


def test_warning_when_part_of_the_gain_is_format(tmp_path):
    before, after = ["plain"] * 30 + ["wrong"] * 60, ["right"] * 60 + ["wrong"] * 30
    run = hand_run(tmp_path, before, after)
    (found,) = scoring.score_run(run)["warnings"]
    assert found["kind"] == "format"
    assert "about 33.3 points of the gain are format" in found["message"]


def test_warning_when_answers_improve_without_the_format(tmp_path):
    assert warning(["wrong"] * 40, ["plain"] * 40, tmp_path) == ["not_shown", "format"]


def test_no_warning_when_both_agree(tmp_path):
    assert warning(["wrong"] * 30 + ["right"] * 30, ["right"] * 60, tmp_path) == []


def test_too_few_questions_are_said_to_be_too_few(tmp_path):
    scores = scoring.score_run(hand_run(tmp_path, ["wrong"] * 3, ["right"] * 3))
    assert "3 questions are too few" in scores["warnings"][0]["message"]


@pytest.mark.parametrize(
    ("before", "after", "end"),
    [
        (["wrong"] * 30 + ["right"] * 30, ["right"] * 60, "the gain is beyond the noise of these questions."),
        (["right"] * 60, ["wrong"] * 30 + ["right"] * 30, "the loss is beyond the noise of these questions."),
        (["right"] * 60, ["right"] * 60, "not shown to differ."),
        (["plain"] * 40, ["right"] * 25 + ["wrong"] * 15, "but it is one of format: lenient accuracy fell."),
        (
            ["plain"] * 30 + ["wrong"] * 9,
            ["right"] * 30 + ["wrong"] * 9,
            "lenient accuracy is not shown to have risen.",
        ),
    ],
)
def test_the_sentence_ends_with_what_is_shown(tmp_path, before, after, end):
    text = sentence(scoring.score_run(hand_run(tmp_path, before, after)))
    assert text.startswith("GRPO ")
    assert text.endswith(end)


def test_the_sentence_has_every_number(tmp_path):
    before = ["wrong"] * 30 + ["right"] * 30
    text = sentence(scoring.score_run(hand_run(tmp_path, before, ["right"] * 60)))
    interval = stats.paired_counts(30, 30, 0, 0).interval
    assert text == (
        "GRPO raised strict accuracy from 50.0 % to 100.0 % on 60 questions (+50.0 points, 95 % interval "
        f"{span(interval, sign=True)}, exact p < 0.0001): the gain is beyond the noise of these questions."
    )


@pytest.mark.parametrize(("share", "text"), [(0.0767, "+7.7"), (0.0003, "+0.03"), (-0.0003, "-0.03"), (0, "+0.0")])
def test_points_never_hide_that_they_are_not_zero(share, text):
    assert points(share) == text


@pytest.mark.parametrize(
    ("p", "text"),
    [(1e-9, "p < 0.0001"), (0.0004, "p 0.0004"), (0.018, "p 0.018"), (0.0499, "p 0.050"), (1.0, "p 1.00")],
)
def test_p_as_text(p, text):
    assert p_text(p) == text


def test_real_size_is_fast(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=1319)
    with spent.at_most(5):
        scoring.score_run(run)


def test_every_key_of_scores_is_documented(tmp_path):
    stages = ("base", "bootstrap", "tuned")
    scores = scoring.score_run(run_folders.make_run(tmp_path / "run", n=40, stages=stages, samples=2))
    page = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text(encoding="utf-8")

    def keys(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner)

    named = set(re.findall(r"`(\w+)`", page)) | set(scoring.STAGES)
    assert set(keys(scores)) - named == set()
