"""The embedded default: its problems are right and well parted, its model is small and honest, and only a true reward helps."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.shape_files import shape_from_path
from doctor.shapes import count, shape_of
from grpo_portable.answers.extractor import is_correct, is_correct_lenient, parse_gold
from grpo_portable.embedded import model_folder, problems
from grpo_portable.embedded.build import HABITS, Phase, Settings, build, drill, habitual
from grpo_portable.embedded.problems import LARGEST, REPORT_COUNT, REPORT_SEED, SPLITS, draw, draw_distinct, generate
from grpo_portable.embedded.templates import TEMPLATES
from grpo_portable.errors import DataError
from grpo_portable.plan import catalogue
from grpo_portable.recipe import load

STYLE = "gsm8k_marker"
CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")

# --- problems


@pytest.mark.parametrize(
    ("name", "numbers", "answer"),
    [
        ("gain", (12, 7), 19),
        ("lose", (30, 12), 18),
        ("groups", (6, 8), 48),
        ("gain, lose", (20, 15, 8), 27),
        ("lose, gain", (20, 15, 8), 13),
        ("three", (10, 20, 5), 35),
        ("groups and more", (4, 6, 10), 34),
        ("groups but fewer", (4, 6, 10), 14),
        ("more than", (12, 7), 31),
        ("fewer than", (12, 7), 17),
        ("times as many", (5, 3), 20),
        ("half, then fewer", (48, 10), 14),
        ("spend", (50, 4, 6), 26),
    ],
)
def test_templates_by_hand(name: str, numbers: tuple[int, ...], answer: int) -> None:
    template = next(t for t in TEMPLATES if t.name == name)
    done = problems.solve(template, numbers, [step[2] for step in template.steps])
    assert done is not None and done[-1][-1] == answer


@given(split=st.sampled_from(SPLITS), seed=st.integers(0, 10**6))
def test_every_problem_is_readable_and_worked_right(split: str, seed: int) -> None:
    problem = draw(split, random.Random(seed))
    lines = problem.answer.split("\n")
    assert "{" not in problem.question + problem.answer
    assert sorted(map(int, re.findall(r"\d+", problem.question))) == sorted(problem.numbers)
    worked = [CALCULATION.search(line) for line in lines[:-1]]
    for found in worked:
        assert found is not None
        left, operation, right, result = found.groups()
        assert eval(left + operation + right) == int(result)
        assert 1 <= int(result) <= LARGEST
    assert worked[-1] is not None and lines[-1] == f"#### {worked[-1][4]}"
    assert parse_gold(problem.answer, STYLE) == worked[-1][4]
    assert is_correct(problem.answer, worked[-1][4], STYLE)


def test_splits_share_no_problem_and_no_question() -> None:
    drawn = {split: draw_distinct(split, 1000 if split != "train" else 12000) for split in SPLITS}
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for key in (lambda p: (p.template.name, p.numbers), lambda p: p.question):
            assert not {key(p) for p in drawn[one]} & {key(p) for p in drawn[other]}
    for split, drawn_problems in drawn.items():
        assert all(problems.split_of(p.template.name, p.numbers) == split for p in drawn_problems)
        assert {p.template.name for p in drawn_problems} == {t.name for t in TEMPLATES}


def test_a_report_asks_the_same_questions_everywhere() -> None:
    asked = generate("test", REPORT_COUNT, REPORT_SEED)
    assert len({q["question"] for q in asked}) == 300
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == "d9a0ebc17fecd0a5", "the questions of all published reports changed"
    assert generate("test", 300, 1) != asked
    assert generate("test", 100, REPORT_SEED) == asked[:100]


def test_bad_requests_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no split `validation`"):
        generate("validation", 1)
    monkeypatch.setattr(problems, "TEMPLATES", [t for t in TEMPLATES if t.name == "groups"])  # 88 products in all
    with pytest.raises(DataError, match="ends before 50 problems"):
        generate("test", 50)


def test_problems_and_folder_need_no_torch() -> None:
    code = "import sys, grpo_portable.embedded.build, grpo_portable.embedded.problems; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- slips


def test_slips_are_wrong_answers_worked_right() -> None:
    rng = random.Random(0)
    slipped, lucky = set(), 0
    for problem in draw_distinct("train", 2000):
        text, gold = habitual(problem, rng, slips=1.0), parse_gold(problem.answer, STYLE)
        assert gold is not None
        assert is_correct(text, gold, STYLE) == is_correct_lenient(text, gold)
        for left, operation, right, result in CALCULATION.findall(text):
            assert eval(left + operation + right) == int(result)
        if problem.template.name in HABITS:
            slipped.add(problem.template.name)
            lucky += is_correct(text, gold, STYLE)  # by chance, as when half is spent and half is left
        else:
            assert text == problem.answer
        assert habitual(problem, rng, slips=0.0) == problem.answer
    assert slipped == set(HABITS) and lucky < 40


def test_drills_are_calculations_of_the_training_problems() -> None:
    lines = drill(random.Random(0)).splitlines()
    assert len(lines) == 7 and all(CALCULATION.fullmatch(line.strip()) for line in lines)


# --- the model


def test_the_model_is_small_and_safe() -> None:
    files = {f.name: f.stat().st_size for f in model_folder().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(files)
    assert sum(files.values()) < 4 * 2**20
    assert not [name for name in files if name.endswith((".bin", ".pt", ".py", ".pkl"))]
    config = json.loads((model_folder() / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "float32")
    built = json.loads((model_folder() / "built.json").read_text())
    now = json.loads(json.dumps(Settings().__dict__, default=lambda phase: phase.__dict__))
    assert built["settings"] == now, "build.py has changed since the model was built"


def test_the_tokenizer_reads_any_text_and_single_digits() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    assert (
        tokenizer.chat_template is None and tokenizer.eos_token == "<|endoftext|>" and tokenizer.pad_token == "<|pad|>"
    )
    for text in ("Mia has 47 shells.\n#### 47", "Ünïcode ∑ 三\t 12,345.6", "  two  spaces", "1990"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.decode([i]) for i in tokenizer(" 47 + 305")["input_ids"]] == [" 4", "7", " +", " 3", "0", "5"]
    for problem in draw_distinct("dev", 200):
        asked, answered = tokenizer(f"{problem.question}\n")["input_ids"], tokenizer(problem.answer)["input_ids"]
        assert asked + answered == tokenizer(f"{problem.question}\n{problem.answer}")["input_ids"]


def test_the_recipe_leaves_room_for_every_question_and_answer() -> None:
    from transformers import AutoTokenizer

    recipe, tokenizer = load(catalogue.find("arithmetic-embedded")), AutoTokenizer.from_pretrained(model_folder())
    assert (recipe.model, recipe.data, recipe.eval_split) == ("embedded", "arithmetic", "test")
    for row in generate("train", 2000) + generate("test", 300):
        asked = recipe.prompt_template.replace("{question}", row["question"])
        assert len(tokenizer(asked)["input_ids"]) <= recipe.max_prompt_tokens
        assert len(tokenizer(row["answer"])["input_ids"]) < recipe.max_completion_tokens


@pytest.mark.parametrize("ending", ["\n", ""])
def test_the_base_is_neither_good_nor_hopeless(ending: str) -> None:
    """25-60 % greedy on the questions of a report, with or without the line end after the question; strict = lenient."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_folder()),
        AutoModelForCausalLM.from_pretrained(model_folder()),
    )
    assert model.dtype == torch.float32
    asked = generate("test", REPORT_COUNT, REPORT_SEED)
    inputs = tokenizer([q["question"] + ending for q in asked], return_tensors="pt", padding=True)
    with torch.no_grad():
        written = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=48, do_sample=False
        )
    texts = tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    golds = [parse_gold(q["answer"], STYLE) or "" for q in asked]
    strict = sum(is_correct(text, gold, STYLE) for text, gold in zip(texts, golds, strict=True))
    lenient = sum(is_correct_lenient(text, gold) for text, gold in zip(texts, golds, strict=True))
    assert 0.25 * 300 <= strict <= 0.60 * 300
    assert strict == lenient


def test_building_is_repeatable_and_leaves_a_loadable_folder(tmp_path: Path) -> None:
    phase = Phase(steps=3, peak_learning_rate=1e-3, problems=4, drills=2, slips=0.0)
    settings = Settings(seed=3, hidden=32, layers=1, heads=2, mlp=64, phases=(phase, replace(phase, slips=0.8)))
    records = [build(tmp_path / name, settings) for name in "ab"]
    assert records[0] == records[1] and 0 <= records[0]["dev_accuracy"] <= 1
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


# --- GRPO

COIN = """
import random

coin = random.Random(0)

def toss(completions, **_):
    return [coin.random() for _ in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "least", "most"), [("true", 15.0, 100.0), ("random", -5.0, 5.0), ("format", -5.0, 5.0)]
)
def test_only_the_true_reward_helps(reward: str, least: float, most: float, tmp_path: Path) -> None:
    """The recipe as it stands, and with its reward replaced by a coin or by the format alone."""
    (tmp_path / "coin.py").write_text(COIN)
    names = {"true": "correctness, marker_format", "random": f"{tmp_path}/coin.py:toss", "format": "marker_format"}
    command = [sys.executable, "-m", "grpo_portable.cli", "train", "arithmetic-embedded", "--auto", "--path", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), "--set", f"rewards=[{names[reward]}]"],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert least <= 100 * scores["strict"]["delta"] <= most
    if reward == "true":
        assert scores["strict"]["p"] < 0.001
        assert run["stages"]["train"]["seconds"] < 120


def test_the_doctor_knows_the_models_shape_without_looking_for_it(tmp_path, monkeypatch):
    (tmp_path / "embedded").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of that name is not the built-in model
    known, built = shape_of("embedded"), shape_from_path(model_folder())
    assert count(known) == known.params == built.params and shape_of("somebody/embedded") is None
    assert replace(known, basis="", moe_intermediate=0) == replace(built, name="embedded", basis="", moe_intermediate=0)
