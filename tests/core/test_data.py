"""Questions from every kind of source; what cannot be used is named, counted, and never silently trained on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_portable.data.questions import Question, load_questions, normalised, overlap, refuse_overlap
from grpo_portable.errors import DataError

ROWS = [
    {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "#### 1,001"},
    {"question": "Half of five?", "answer": "#### 2.50"},
]
GOLDS = ["4", "1001", "2.5"]


def jsonl(path: Path, rows: list, encoding: str = "utf-8") -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding=encoding)
    return path


def golds(source: Path | str, **options: object) -> list[str]:
    return [q.gold for q in load_questions(str(source), **options).questions]  # type: ignore[arg-type]


def test_every_file_format_gives_the_same_questions(tmp_path: Path) -> None:
    import csv

    import pyarrow
    import pyarrow.parquet

    jsonl(tmp_path / "a.jsonl", ROWS)
    jsonl(tmp_path / "bom.jsonl", ROWS, "utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as table:
            writer = csv.DictWriter(table, ["question", "answer"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    files = sorted(p for p in tmp_path.iterdir())
    assert len(files) == 7
    for file in files:
        loaded = load_questions(str(file), split="train")
        assert [q.gold for q in loaded.questions] == GOLDS, file.name
        assert [q.id for q in loaded.questions] == ["train-1", "train-2", "train-3"]
        assert loaded.questions[0].answer == ROWS[0]["answer"]
        assert (loaded.skipped, loaded.total) == ((), 3)


def test_half_a_character_makes_a_row_faulty_and_names_its_column(tmp_path: Path) -> None:
    torn = [
        {"question": "Two and \ud83d two?", "answer": "4"},
        {"question": "Two and two?", "answer": "4 \udc00"},
        {"question": "Whole: \U0001f600?", "answer": "5"},  # both halves of a pair are a character
        {"question": "And one?", "answer": "5", "rationale": "so \ud800"},
    ]
    loaded = load_questions(str(jsonl(tmp_path / "torn.jsonl", torn)))
    assert [q.question for q in loaded.questions] == ["Whole: \U0001f600?"]
    told = {number: reason.split("`")[1] for number, reason in loaded.skipped}
    assert told == {1: "question", 2: "answer", 4: "rationale"}
    assert all("surrogate" in reason for _, reason in loaded.skipped)


def test_a_folder_holds_one_file_a_split(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", ROWS[:2])
    jsonl(tmp_path / "test.jsonl", ROWS[2:])
    assert golds(tmp_path, split="train") == GOLDS[:2]
    assert golds(tmp_path, split="test") == GOLDS[2:]


def test_the_built_in_problems_have_splits_that_share_nothing() -> None:
    train, test = load_questions("arithmetic", split="train"), load_questions("arithmetic", split="test")
    assert len(test.questions) == 300
    assert len(train.questions) > 1000
    assert overlap(train.questions, test.questions) == ()


@pytest.mark.parametrize(
    ("row", "question", "gold"),
    [
        ({"problem": "Q", "expected_answer": "7", "generated_solution": "long"}, "Q", "7"),
        ({"problem": "Q", "solution": "so \\boxed{9}", "answer": "9"}, "Q", "9"),
        ({"Prompt": "Q", "Label": 3}, "Q", "3"),
        ({"input": "Q", "target": 2.5}, "Q", "2.5"),
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], "gold": "1"}, "Q", "1"),
    ],
)
def test_columns_are_guessed(tmp_path: Path, row: dict, question: str, gold: str) -> None:
    loaded = load_questions(str(jsonl(tmp_path / "x.jsonl", [row])), style="boxed")
    assert (loaded.questions[0].question, loaded.questions[0].gold) == (question, gold)


def test_columns_can_be_named_also_inside_an_object(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", [{"text": "Q", "reward_model": {"ground_truth": "12"}}])
    loaded = load_questions(str(file), question_column="text", answer_column="reward_model.ground_truth")
    assert loaded.questions[0].gold == "12"


def test_rows_that_cannot_be_used_are_named_and_counted(tmp_path: Path) -> None:
    bad = ["{torn", {"question": "", "answer": "#### 1"}, {"question": "Q", "answer": None}, [1]]
    file = jsonl(tmp_path / "x.jsonl", [ROWS[0], *bad, {"question": "Q", "answer": "no number at all"}, ROWS[2]])
    loaded = load_questions(str(file))
    assert [q.id for q in loaded.questions] == ["train-1", "train-7"]
    reasons = dict(loaded.skipped)
    assert sorted(reasons) == [2, 3, 4, 5, 6]
    assert "JSON" in reasons[2]
    assert "question" in reasons[3]
    assert "answer" in reasons[4]
    assert "list" in reasons[5]
    assert "no number at all" in reasons[6]
    assert loaded.total == 7


def test_a_limit_is_drawn_by_seed_and_kept_in_order(tmp_path: Path) -> None:
    rows = [{"question": f"Q{i}", "answer": str(i)} for i in range(50)]
    rows[10]["answer"] = "?"
    file = str(jsonl(tmp_path / "x.jsonl", rows))
    first = load_questions(file, limit=20, seed=1)
    numbers = [int(q.gold) for q in first.questions]
    assert len(numbers) == 20
    assert numbers == sorted(numbers)
    assert load_questions(file, limit=20, seed=1) == first
    assert load_questions(file, limit=20, seed=2).questions != first.questions
    assert len(load_questions(file, limit=200, seed=1).questions) == 49


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", "", ["no rows", "a row looks like this", '"question"']),
        ("prose.jsonl", "Once upon a time\n", ["no row that can be read", "row 1: the line is not a JSON object"]),
        ("lists.jsonl", "[1]\n", ["no row that can be read", "row 1: the row is list"]),
        ("hollow.jsonl", "{}\n", ["no row that can be read", "row 1: it is empty"]),
        ("columns.jsonl", '{"text": "Q", "y": 1}\n', ["question column", "text, y", "question_column"]),
        ("noanswer.jsonl", '{"question": "Q", "y": 1}\n', ["answer column", "question, y", "answer_column"]),
        (
            "gold.jsonl",
            '{"question": "Q", "answer": "blue"}\n',
            ["none of the 1 rows", "row 1", "blue", "answer_style"],
        ),
        ("broken.json", "[1, ", ["not JSON"]),
        ("broken.parquet", "no", ["not a Parquet file"]),
        ("broken.jsonl.gz", "no", ["cannot be read"]),
        ("x.docx", "x", ["kind that is not known", ".jsonl"]),
    ],
)
def test_unusable_files_say_why(tmp_path: Path, name: str, content: str, words: list[str]) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(DataError) as error:
        load_questions(str(file))
    told = " ".join(error.value.lines())
    assert all(word in told for word in words), told
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nested.json", b"[" * 100_000, ["not JSON"]),
        ("torn.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 50, ["cannot be read", "invalid block type"]),
        ("short.csv.gz", gzip.compress(b"question,answer\nQ,1\n", mtime=0)[:-4], ["cannot be read"]),
    ],
)
def test_torn_files_say_why(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        load_questions(str(tmp_path / name))
    told = " ".join(error.value.lines())
    assert all(word in told for word in words), told


def test_a_long_worked_answer_in_a_table_is_read(tmp_path: Path) -> None:
    working = "two and two " * 20_000  # 240,000 characters; Python's reader of tables stops at 131,072
    (tmp_path / "long.csv").write_text(f'question,answer\nTwo and two?,"{working}\n#### 4"\n')
    assert golds(tmp_path / "long.csv") == ["4"]


def test_a_missing_file_is_no_hub_id() -> None:
    for source in ("questions.jsonl", "./folder", "/nowhere/at/all"):
        with pytest.raises(DataError, match="is not there"):
            load_questions(source)


def test_a_data_set_that_cannot_be_had_says_how_to_give_a_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError) as error:
        load_questions("openai/gsm8k", config="main", split="train")
    told = " ".join(error.value.lines())
    assert "openai/gsm8k" in told
    assert "--data" in told


def test_a_named_column_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="`prompt_text`"):
        load_questions(str(jsonl(tmp_path / "x.jsonl", ROWS)), question_column="prompt_text")


def test_trained_questions_cannot_be_held_out() -> None:
    def asked(*texts: str) -> list[Question]:
        return [Question(f"x-{i}", text, "1", "1") for i, text in enumerate(texts)]

    train = asked("How many apples?", "How many pears?")
    held_out = asked("Something else", "how  many\nPEARS?")
    assert normalised("how  many\nPEARS?") == normalised("How many pears?")
    assert overlap(train, held_out) == (("x-1", "x-1"),)
    with pytest.raises(DataError, match="1 of the 2 held-out questions"):
        refuse_overlap(train, held_out)
    refuse_overlap(train, held_out[:1])


def test_gsm8k_reads_whole() -> None:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip("the GSM8K files are not beside this checkout")
    train, test = load_questions(str(folder), split="train"), load_questions(str(folder), split="test")
    assert (len(train.questions), len(test.questions)) == (7473, 1319)
    assert train.skipped == test.skipped == ()
    refuse_overlap(train.questions, test.questions)


def test_reading_questions_imports_no_torch(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", ROWS)
    code = f"""
import sys
from grpo_portable.data.questions import load_questions
load_questions({str(file)!r})
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
