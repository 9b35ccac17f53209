"""The public sets in their own formats, as small local copies: columns, quirks, what is left out and why."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from grpo_portable.data import questions, rows, sets, sources
from grpo_portable.data.questions import Question, expression, load_questions
from grpo_portable.data.worked import target, working
from grpo_portable.errors import DataError, RecipeError
from grpo_portable.recipe import Recipe


def put(folder: Path, split: str, content: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return folder


GSM8K = [
    {"question": "Clips?", "answer": "48/2 = <<48/2=24>>24 clips.\n24+48 = <<24+48=72>>72\n#### 72"},
    {"question": "Dollars?", "answer": "It is 1,000 + 234 = $<<1000+234=1234>>1,234\n#### 1,234"},
    {"question": "Degrees?", "answer": "It fell by 7.\n#### -7"},
]
DAPO = [
    {
        "prompt": "Find $x$.",
        "solution": "34",
        "reward_model": {"ground_truth": "34"},
        "source_prompt": [],
        "ability": "MATH",
    },
    {"prompt": "And $y$?", "solution": "Answer: $113$", "reward_model": {}, "source_prompt": [], "ability": "MATH"},
    {
        "prompt": "And $z$?",
        "solution": "Answer: $-\\frac{3}{4}$",
        "reward_model": {},
        "source_prompt": [],
        "ability": "MATH",
    },
]
RAW_DAPO = [
    {
        "prompt": [
            {
                "role": "user",
                "content": "Solve the following math problem step by step. The last line of your response should be of the "
                "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $1+1$?\n\n"
                'Remember to put your answer on its own line after "Answer:".',
            }
        ],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "data_source": "math_dapo",
    }
] * 3
REASONING = [
    {"problem": "P1", "expected_answer": "18", "generated_solution": "<think>long</think>First 9, then 18: \\boxed{18}",
     "problem_type": "has_answer_extracted"},
    {"problem": "P1", "expected_answer": "18", "generated_solution": "<think>other</think>Twice 9.",
     "problem_type": "has_answer_extracted"},
    {"problem": "P2", "expected_answer": "5", "generated_solution": "x", "problem_type": "no_answer_extracted"},
    {"problem": "P3", "expected_answer": "x^2+1", "generated_solution": "y", "problem_type": "has_answer_extracted"},
    {"problem": "P4", "expected_answer": "\\frac{8}{3}", "generated_solution": "<think>only thought</think>",
     "problem_type": "has_answer_extracted"},
]  # fmt: skip
MATH = [
    {"problem": "Polar?", "solution": "So $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.", "subject": "Precalculus",
     "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "level": 2, "unique_id": "a"},
    {"problem": "Half?", "solution": "It is $\\boxed{\\frac{14}{3}}$.", "answer": "\\frac{14}{3}", "subject": "Algebra",
     "level": 3, "unique_id": "b"},
    {"problem": "Divisors?", "solution": "$\\boxed{9}$", "answer": "9", "subject": "Number Theory", "level": 3},
]  # fmt: skip


def golds(loaded: questions.Loaded) -> list[str]:
    return [q.gold for q in loaded.questions]


def test_gsm8k_golds_and_working(tmp_path: Path) -> None:
    loaded = load_questions(str(put(tmp_path / "gsm8k", "train", GSM8K)))
    assert golds(loaded) == ["72", "1234", "-7"]
    assert working(loaded.questions[0]) == "48/2 = 24 clips.\n24+48 = 72"
    assert target(loaded.questions[1], "gsm8k_marker") == "It is 1,000 + 234 = $1,234\n#### 1,234"


def test_dapo_golds_in_both_spellings(tmp_path: Path) -> None:
    for name in ("DAPO-Math-17k-Processed", "my-copy"):
        loaded = load_questions(str(put(tmp_path / name, "train", DAPO)), style="tagged")
        assert golds(loaded) == ["34", "113", "-0.75"], name
        assert loaded.questions[0].question == "Find $x$."
        assert [working(q) for q in loaded.questions] == ["", "", ""]


def test_the_set_before_dapo_loses_its_wrapping_and_its_repetitions(tmp_path: Path) -> None:
    loaded = load_questions(str(put(tmp_path / "DAPO-Math-17k", "train", RAW_DAPO)), style="boxed")
    assert [(q.question, q.gold) for q in loaded.questions] == [("What is $1+1$?", "2")]
    assert loaded.skipped == ((2, "the same problem as row 1"), (3, "the same problem as row 1"))


def test_open_math_reasoning_keeps_one_row_of_a_problem_with_an_answer_from_the_forum(tmp_path: Path) -> None:
    for name in ("OpenMathReasoning", "other"):
        loaded = load_questions(str(put(tmp_path / name, "cot", REASONING)), split="cot", style="tagged")
        assert [(q.id, q.gold) for q in loaded.questions] == [("cot-1", "18"), ("cot-5", "8/3")], name
        reasons = dict(loaded.skipped)
        assert reasons[2] == "the same problem as row 1"
        assert "no_answer_extracted" in reasons[3]
        assert "symbolic_correctness" in reasons[4]
    assert working(loaded.questions[0]) == "First 9, then 18: \\boxed{18}"
    assert working(loaded.questions[1]) == "only thought"


def test_math_500_keeps_its_expressions_when_the_reward_compares_them(tmp_path: Path) -> None:
    folder = str(put(tmp_path / "MATH-500", "test", MATH))
    assert golds(load_questions(folder, split="test", style="boxed")) == ["14/3", "9"]
    loaded = load_questions(folder, split="test", style="boxed", symbolic=True)
    assert golds(loaded) == ["\\left( 3, \\frac{\\pi}{2} \\right)", "14/3", "9"]
    assert loaded.skipped == ()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("so $\\boxed{x^2}$ and \\boxed{y}", "y"),
        ("Answer: $\\frac{\\pi}{2}$", "\\frac{\\pi}{2}"),
        ("steps\n#### 2\\sqrt{3}", "2\\sqrt{3}"),
        ("$(1, 2)$", "(1, 2)"),
        ("  ", None),
        (5, None),
    ],
)
def test_the_text_of_an_expression(answer: Any, text: str | None) -> None:
    assert expression(answer) == text


def test_sets_are_known_by_the_end_of_their_name_or_by_their_columns() -> None:
    def name(source: str, columns: tuple[str, ...] = ()) -> str | None:
        known = sources.recognise(source, columns)
        return known.name if known else None

    assert name("openai/gsm8k") == name("./data/GSM8K/") == "openai/gsm8k"
    assert name("me/x", ("problem", "answer", "solution", "subject", "level", "more")) == "HuggingFaceH4/MATH-500"
    assert name("me/x", ("problem", "answer")) is None
    assert name("gsm8k.jsonl") is None
    assert len({known.name for known in sources.KNOWN}) == len(sources.KNOWN)


def test_a_named_column_wins_over_what_is_known(tmp_path: Path) -> None:
    folder = put(tmp_path / "MATH-500", "test", [{**MATH[2], "other": "10"}])
    assert golds(load_questions(str(folder), split="test", answer_column="other")) == ["10"]


# --- sets too large to be fetched


class Hub:
    """What `datasets.load_dataset` gives when it streams."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.asked: dict[str, Any] = {}

    def shuffle(self, **how: Any) -> Hub:
        self.asked = how
        return self

    def __iter__(self) -> Any:
        return iter(self.content)


def test_a_large_set_is_read_only_as_far_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def endless() -> Any:
        for i in count():
            taken.append(i)
            yield {"problem": f"P{i}", "expected_answer": str(i), "problem_type": "has_answer_extracted"}

    hub = Hub(endless())
    calls: list[Any] = []

    def load_dataset(*names: Any, **how: Any) -> Hub:
        calls.append((names, how))
        return hub

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    loaded = load_questions("nvidia/OpenMathReasoning", split="cot", style="tagged", limit=300, seed=7)
    assert len(loaded.questions) == loaded.total == 300
    assert len(taken) <= 301
    assert calls == [(("nvidia/OpenMathReasoning", None), {"split": "cot", "streaming": True})]
    assert hub.asked["seed"] == 7
    with pytest.raises(DataError, match="3,200,000") as refused:
        load_questions("nvidia/OpenMathReasoning", split="cot")
    assert "train_limit" in (refused.value.help or "")


def test_a_stream_in_which_nothing_can_be_used_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    content = ({"problem": "P", "expected_answer": "1", "problem_type": "other"} for _ in count())
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: Hub(content))
    with pytest.raises(DataError, match="none of the 1050 rows"):
        load_questions("nvidia/OpenMathReasoning", split="cot", limit=1)


def test_looking_ahead_takes_nothing() -> None:
    stream = rows.Stream(iter(range(5)), 100)
    assert list(stream.first(2)) == [0, 1]
    assert list(stream.first(3)) == [0, 1, 2]
    assert list(stream) == [0, 1, 2, 3, 4]
    assert list(rows.Stream(iter(range(5)), 2)) == [0, 1]


def test_the_configuration_of_a_known_set_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_dataset(*names: Any, **_: Any) -> list[dict[str, Any]]:
        calls.append(names)
        return GSM8K

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    load_questions("openai/gsm8k")
    load_questions("openai/gsm8k", config="socratic")
    load_questions("me/other")
    assert calls == [("openai/gsm8k", "main"), ("openai/gsm8k", "socratic"), ("me/other", None)]


# --- a run's three sets


def recipe(tmp_path: Path, **changes: Any) -> Recipe:
    put(tmp_path / "gsm8k", "train", GSM8K)
    put(tmp_path / "gsm8k", "test", [{"question": "Else?", "answer": "#### 1"}])
    folder = str(tmp_path / "gsm8k")
    return replace(Recipe(), data=folder, eval_data=folder, **changes)


def test_held_out_questions_are_refused_or_dropped(tmp_path: Path) -> None:
    asked = recipe(tmp_path, eval_split="train", eval_limit=1)
    with pytest.raises(DataError, match="also stand in the training data") as refused:
        sets.gather(asked, trains=True)
    help = "name other questions: --set eval_data=FILE, or leave these out of the training, where 2 are left: "
    assert refused.value.help == help + "--set on_overlap=drop"
    gathered = sets.gather(replace(asked, on_overlap="drop"), trains=True)
    assert gathered.train is not None
    assert len(gathered.train.questions) == 2
    assert gathered.told == (
        "1 training questions are also held out, and were left out",
        "a step asks 8 questions and only 2 can be trained on: it asks some several times",
    )


@pytest.mark.parametrize("on_overlap", ["refuse", "drop"])
def test_a_file_without_held_out_questions_beside_it_is_told_so(tmp_path: Path, on_overlap: str) -> None:
    file = str(put(tmp_path / "own", "train", GSM8K) / "train.jsonl")
    asked = replace(Recipe(), data=file, eval_data=file, on_overlap=on_overlap)
    with pytest.raises(DataError, match="also stand in the training data") as refused:
        sets.gather(asked, trains=True)
    assert refused.value.help == "name other questions: --set eval_data=FILE"  # dropping would leave none
    assert "both are read from `train.jsonl`: eval_data is the training data" in str(refused.value.because)


def test_another_split_that_repeats_questions_is_shown_one(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    put(tmp_path / "gsm8k", "test", GSM8K[:1])
    with pytest.raises(DataError) as refused:
        sets.gather(asked, trains=True)
    assert refused.value.because == "for example test-1 is the same question as train-1"


def test_each_set_is_read_by_its_own_columns(tmp_path: Path) -> None:
    put(tmp_path / "mine", "train", [{"q": "Mine?", "a": "3"}])
    held_out = str(put(tmp_path / "MATH-500", "test", MATH))
    mine = replace(
        Recipe(),
        data=str(tmp_path / "mine"),
        question_column="q",
        answer_column="a",
        eval_data=held_out,
        answer_style="boxed",
    )
    gathered = sets.gather(mine, trains=True)
    assert gathered.train is not None
    assert golds(gathered.train) == ["3"]
    assert golds(gathered.held_out) == ["14/3", "9"]
    put(tmp_path / "also", "test", [{"q": "Also?", "a": "4"}])  # not a public set: the named columns are its too
    assert golds(sets.gather(replace(mine, eval_data=str(tmp_path / "also")), trains=True).held_out) == ["4"]


def test_the_bootstrap_may_have_a_set_of_its_own(tmp_path: Path) -> None:
    taught = str(put(tmp_path / "OpenMathReasoning", "cot", REASONING))
    asked = recipe(tmp_path, bootstrap_epochs=1.0, bootstrap_data=taught, answer_style="tagged")
    gathered = sets.gather(asked, trains=True)
    assert gathered.bootstrap is not None
    assert golds(gathered.bootstrap) == ["18", "8/3"]
    assert sets.gather(replace(asked, bootstrap_epochs=0.0), trains=True).bootstrap is None
    assert set(sets.parts(asked, trains=True)) == {"eval", "train", "bootstrap"}
    assert set(sets.parts(asked, trains=False)) == {"eval"}  # a bootstrap set that is out of reach stops no evaluation
    assert set(sets.parts(replace(asked, few_shot=1), trains=False)) == {"eval", "train"}
    assert sets.gather(asked, trains=False) == sets.Gathered(None, gathered.held_out, None, ())


def test_expressions_need_math_verify_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="math-verify"):
        sets.gather(recipe(tmp_path, rewards=("symbolic_correctness",)), trains=True)


# --- worked answers in the target format

Q = Question("x", "Q", "24", "48/2 = <<48/2=24>>24 clips\n#### 24")
SOLVED = Question("x", "Q", "1/2", "1/2", "Halve it: $\\boxed{\\frac{1}{2}}$.")


@pytest.mark.parametrize(
    ("question", "style", "opened", "expected"),
    [
        (Q, "gsm8k_marker", False, "48/2 = 24 clips\n#### 24"),
        (
            Q,
            "tagged",
            False,
            "<start_working_out>48/2 = 24 clips<end_working_out><SOLUTION>24</SOLUTION>",
        ),
        (Q, "tagged", True, "48/2 = 24 clips<end_working_out><SOLUTION>24</SOLUTION>"),
        (Q, "boxed", False, "48/2 = 24 clips\nThe answer is \\boxed{24}."),
        (Q, "free", False, "48/2 = 24 clips\nAnswer: 24"),
        (SOLVED, "boxed", False, "Halve it: $\\boxed{\\frac{1}{2}}$."),
        (SOLVED, "gsm8k_marker", False, "Halve it: $\\boxed{\\frac{1}{2}}$.\n#### 1/2"),
        (Question("x", "Q", "7", "7"), "gsm8k_marker", False, "#### 7"),
    ],
)
def test_targets(question: Question, style: str, opened: bool, expected: str) -> None:
    from grpo_portable.answers import extractor

    made = target(question, style, opened=opened)
    assert made == expected
    assert extractor.is_correct(made, question.gold, style)
    assert extractor.has_marker(made, style) or style == "free" or not working(question) or question is SOLVED


@pytest.mark.parametrize("text", ["7", "Answer: 7", "The answer is $7$.", "#### 7", "\\frac{1}{2}"])
def test_an_answer_alone_is_no_working(text: str) -> None:
    assert working(Question("x", "Q", "7", text)) == ""


@pytest.mark.parametrize("text", ["3+4=7", "Three and four.\n#### 7", "It is 7 since 3 and 4"])
def test_steps_are_working(text: str) -> None:
    assert working(Question("x", "Q", "7", text))
