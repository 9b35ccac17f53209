"""Two runs compared on the questions both answered."""

from __future__ import annotations

import json
import re

import pytest
import run_folders

from grpo_portable.errors import DataError, RunFolderError
from grpo_portable.report import page
from grpo_portable.report.compare import compare
from grpo_portable.report.side_by_side import side_by_side
from grpo_portable.scores import stats


def two(tmp_path, a: list[str], b: list[str], base: list[str] | None = None, **recipe):
    runs = []
    for name, answers in (("bf16", a), ("fp8", b)):
        choices = recipe if name == "fp8" else {}
        run = run_folders.make_run(tmp_path / name, n=0, steps=12 if name == "bf16" else 20, stages=(), **choices)
        if base is not None:
            run_folders.write_answers(run, "base", base)
        run_folders.write_answers(run, "tuned", answers)
        runs.append(run)
    return runs


def test_by_hand(tmp_path):
    """b rights 20 that a got wrong, a rights 5 that b got wrong."""
    a = ["right"] * 45 + ["wrong"] * 55
    b = ["wrong"] * 5 + ["right"] * 60 + ["wrong"] * 35
    c = compare(*two(tmp_path, a, b))
    pair = stats.paired_counts(40, 20, 5, 35)
    assert (c.strict["a"], c.strict["b"], c.strict["delta"]) == (0.45, 0.6, 0.15)
    assert c.strict["counts"] == {"both": 40, "gained": 20, "lost": 5, "neither": 35}
    assert c.strict["interval"] == pytest.approx(pair.interval, abs=1e-6)
    assert c.strict["p"] == pytest.approx(pair.p, rel=1e-5)
    assert c.sentence().startswith(
        "`fp8` answers more of 100 questions rightly than `bf16` (60.0 % against 45.0 %, +15.0 points"
    )


def test_the_other_way_round_is_the_mirror(tmp_path):
    runs = two(tmp_path, ["right"] * 30 + ["wrong"] * 30, ["right"] * 50 + ["wrong"] * 10)
    there, back = compare(*runs), compare(*reversed(runs))
    assert there.strict["delta"] == -back.strict["delta"]
    assert "answers fewer" in back.sentence()


def test_equal_runs_are_not_shown_to_differ(tmp_path):
    c = compare(*two(tmp_path, ["right", "wrong"] * 30, ["right", "wrong"] * 30))
    assert c.strict["p"] == 1.0
    assert "are not shown to differ" in c.sentence()


def test_gain_over_gain(tmp_path):
    """Both from 10 of 40; a gains 10, b gains 20: 10 questions of 40 apart."""
    base = ["right"] * 10 + ["wrong"] * 30
    c = compare(*two(tmp_path, ["right"] * 20 + ["wrong"] * 20, ["right"] * 30 + ["wrong"] * 10, base))
    assert (c.gains["a"], c.gains["b"], c.gains["delta"]) == (0.25, 0.5, 0.25)
    assert c.gains["p"] == stats.mcnemar_exact(10, 0)
    assert "gained +25.0 points, fp8 +50.0: +25.0 points apart" in c.to_text().replace("\n", " ")


def test_what_the_runs_did_differently(tmp_path):
    c = compare(*two(tmp_path, ["right"] * 20, ["right"] * 20, learning_rate=1e-5))
    assert c.differs == {"steps": (12, 20), "learning_rate": (5e-6, 1e-5)}
    assert (c.a.steps, c.b.steps) == (12, 20)
    assert c.warnings == ()
    assert "note: each side is one training run" in c.to_text()


@pytest.mark.parametrize("written", [137.5, 0.0], ids=["a whole training", "one that was killed"])
def test_a_training_takes_as_long_as_its_report_says(tmp_path, written):
    runs = two(tmp_path, ["right"] * 20, ["right"] * 20)
    stages = runs[0].read_json("run.json")["stages"]
    runs[0].update_json("run.json", stages={**stages, "train": {"seconds": written}})
    told = next(line for line in compare(*runs).to_text().splitlines() if line.lstrip("| ").startswith("training "))
    (said,) = re.findall(r"training ([\d.]+ (?:min \d+ )?s)", page.write_report(runs[0]).read_text())
    assert said in told and said != "0.0 s"


def test_a_difference_that_is_a_line_end_or_nothing_is_seen(tmp_path):
    told = compare(
        *two(tmp_path, ["right"] * 20, ["right"] * 20, prompt_template="{question}\n", system_prompt="Be brief.")
    ).to_text()
    assert "- prompt_template: {question} → {question}⏎" in told
    assert "- system_prompt: empty → Be brief." in told


def without(run, *keys):
    """A run as an older version settled it, whose recipe did not know these fields."""
    lines = run.recipe_file.read_text().splitlines()
    run.recipe_file.write_text("\n".join(line for line in lines if line.partition(":")[0] not in keys))


def test_a_field_that_is_younger_than_a_run_is_no_difference(tmp_path):
    a, b = two(tmp_path, ["right"] * 20, ["right"] * 20, backend="plain", fsdp=False)
    without(a, "backend", "fsdp", "vllm_server")
    assert compare(a, b).differs == compare(b, a).differs | {"steps": (12, 20)} == {"steps": (12, 20)}
    assert not any("backend" in note for note in side_by_side([a, b, a]).notes)


def test_what_an_older_run_could_not_do_is_a_difference(tmp_path):
    a, b = two(tmp_path, ["right"] * 20, ["right"] * 20, backend="server", vllm_server="http://h:1", fsdp=False)
    without(a, "backend", "fsdp")
    assert compare(a, b).differs["backend"] == ("plain", "server")


def test_questions_asked_differently_are_warned_of(tmp_path):
    c = compare(*two(tmp_path, ["right"] * 20, ["right"] * 20, prompt_template="Q: {question}", few_shot=2))
    assert "prompt_template, few_shot" in c.warnings[0]
    assert "warning: the questions were not asked" in c.to_text()


def test_a_difference_of_format_is_warned_of(tmp_path):
    c = compare(*two(tmp_path, ["plain"] * 30, ["right"] * 30))
    assert "part of the difference is format" in c.warnings[0]


def test_runs_of_other_questions_are_refused(tmp_path):
    runs = two(tmp_path, ["right"] * 10, ["right"] * 10)
    run_folders.rewrite(runs[1], "tuned", lambda r: {**r, "question": "another one"})
    with pytest.raises(DataError, match="no question in common") as caught:
        compare(*runs)
    assert "10 ids stand for different questions" in str(caught.value)


def test_a_run_without_answers_is_refused(tmp_path):
    runs = [run_folders.make_run(tmp_path / name, stages=stages) for name, stages in (("a", ("base",)), ("b", ()))]
    with pytest.raises(RunFolderError, match="no answers to compare"):
        compare(*runs)


def test_the_last_stage_of_each_is_compared(tmp_path):
    a = run_folders.make_run(tmp_path / "one" / "run", n=50, stages=("base",))
    b = run_folders.make_run(tmp_path / "two" / "run", n=40)
    c = compare(a, b)
    assert (c.a.name, c.b.name) == ("one/run", "two/run")
    assert (c.a.stage, c.b.stage) == ("base", "tuned")
    assert c.gains is None
    assert c.strict["n"] == 40
    assert "40 answered by all" in c.notes[0]


def test_json_holds_the_same(tmp_path):
    c = compare(*two(tmp_path, ["right"] * 30 + ["wrong"] * 10, ["right"] * 40, learning_rate=1e-5))
    found = json.loads(json.dumps(c.to_json()))
    assert found["strict"] == c.strict
    assert found["verdict"] == "higher"
    assert found["b"]["steps"] == 20
    assert found["differs"]["learning_rate"] == [5e-6, 1e-5]


def test_long_names_get_letters_and_the_page_fits_a_terminal(tmp_path):
    runs = []
    for name in ("gsm8k-smollm2-135m-20261130-053012", "gsm8k-smollm2-135m-20261130-061533"):
        answers = ["right"] * 30 + ["wrong"] * 10
        run = run_folders.make_run(tmp_path / name, n=0, steps=12, stages=(), system_prompt=name + " Solve it. " * 9)
        run_folders.write_answers(run, "base", answers)
        run_folders.write_answers(run, "tuned", answers)
        runs.append(run)
    text = compare(*runs).to_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "a: gsm8k-smollm2-135m-20261130-053012\n" in text
    assert "|      a |      b | points |" in text


def test_text_reads_as_plain_text(tmp_path):
    lines = compare(*two(tmp_path, ["right"] * 30 + ["wrong"] * 10, ["right"] * 40)).to_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "only in fp8 10, only in bf16 0" in " ".join(lines)
    assert any(line.startswith("| seconds a step") for line in lines)
