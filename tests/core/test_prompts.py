"""One prompt builder: what training sees is what evaluation sees, and both agree on where an answer ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from grpo_portable.data.questions import Question
from grpo_portable.data.worked import worked_answer
from grpo_portable.errors import DataError, RecipeError
from grpo_portable.models.prompts import answer_room, builder, choose_shots, completion_text, fit, generation_stop_ids
from grpo_portable.recipe import Recipe

PLAIN = tiny.tokenizer()
CHAT = tiny.tokenizer(tiny.CHAT_TEMPLATE)
SHOTS = (Question("train-1", "1+1?", "2", "1+1=<<1+1=2>>2\n#### 2"),)


@pytest.mark.parametrize(
    ("tokenizer", "changes", "shots", "expected"),
    [
        (PLAIN, {}, (), "3+4?"),
        (PLAIN, {"prompt_template": "{question}\n"}, (), "3+4?\n"),
        (PLAIN, {"prompt_template": "Q {question} A {x}"}, (), "Q 3+4? A {x}"),
        (PLAIN, {"system_prompt": "Add."}, (), "Add.\n\n3+4?"),
        (PLAIN, {"prompt_template": "{question}\n"}, SHOTS, "1+1?\n1+1=2\n#### 2\n\n3+4?\n"),
        (CHAT, {}, (), "<user>3+4?<end><assistant>"),
        (CHAT, {"system_prompt": "Add."}, (), "<system>Add.<end><user>3+4?<end><assistant>"),
        (CHAT, {"chat_template": "none"}, (), "3+4?"),
        (CHAT, {}, SHOTS, "<user>1+1?<end><assistant>1+1=2\n#### 2<end><user>3+4?<end><assistant>"),
    ],
)
def test_the_text_of_a_prompt(tokenizer: object, changes: dict, shots: tuple, expected: str) -> None:
    made = builder(tokenizer, replace(Recipe(), **changes), shots=shots)
    assert made.text("3+4?") == expected
    assert PLAIN.decode(made.ids("3+4?")) == expected


def test_braces_in_a_question_stay_as_they_are() -> None:
    made = builder(PLAIN, replace(Recipe(), prompt_template="{question} \\boxed{}"))
    assert made.text("{question} {0} {x}") == "{question} {0} {x} \\boxed{}"


def test_a_template_from_a_file_and_its_own_switch(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(
        "{% if enable_thinking is defined and not enable_thinking %}quick: {% endif %}{{ messages[0].content }}"
    )
    recipe = replace(Recipe(), chat_template=str(file))
    assert builder(PLAIN, recipe).text("Q") == "Q"
    assert builder(PLAIN, replace(recipe, enable_thinking=False)).text("Q") == "quick: Q"


def test_templates_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        builder(PLAIN, replace(Recipe(), chat_template=str(tmp_path / "none.jinja")))
    file = tmp_path / "t.jinja"
    file.write_text("{{ raise_exception('System role not supported') }}")
    with pytest.raises(RecipeError, match="System role not supported"):
        builder(PLAIN, replace(Recipe(), chat_template=str(file))).text("Q")


def test_stop_ids_are_the_end_token_the_turn_end_and_the_models_own() -> None:
    end, eos = CHAT.convert_tokens_to_ids(["<end>", "<eos>"])
    assert builder(CHAT, Recipe(), generation_stop_ids=(7, eos)).stop_ids == (eos, end, 7)
    assert builder(CHAT, replace(Recipe(), chat_template="none")).stop_ids == (eos,)
    model = tiny.model()
    assert generation_stop_ids(model) == (1,)
    model.generation_config.eos_token_id = [1, 5]
    assert generation_stop_ids(model) == (1, 5)


def test_the_target_is_the_worked_answer_and_the_end_of_the_turn() -> None:
    question = Question("train-1", "48/2?", "24", "48/2 = <<48/2=24>>24 clips\n#### 24")
    for tokenizer, end in ((PLAIN, "<eos>"), (CHAT, "<end>")):
        made = builder(tokenizer, Recipe())
        assert PLAIN.decode(made.target_ids(question)) == f"48/2 = 24 clips\n#### 24{end}"
    assert worked_answer(" no marks ") == "no marks"


def test_a_completion_is_read_without_its_end_tokens_only() -> None:
    end, eos, pad = CHAT.convert_tokens_to_ids(["<end>", "<eos>", "<pad>"])
    ids = CHAT("#### 4", add_special_tokens=False)["input_ids"]
    assert completion_text(CHAT, [*ids, end, eos], (eos, end)) == "#### 4"
    assert completion_text(CHAT, [*ids, pad, *ids], (eos, end)) == "#### 4<pad>#### 4"
    assert completion_text(CHAT, [eos], (eos,)) == ""


def test_long_prompts_are_left_out_and_counted() -> None:
    questions = [Question(f"q-{n}", "x" * n, "1", "1") for n in (5, 1, 4, 2, 3, 40, 6, 7, 8, 9, 10)]
    made = builder(PLAIN, Recipe())
    fitted = fit(questions, made, max_tokens=20)
    assert (len(fitted.questions), fitted.over_length, fitted.over_percentile) == (10, 1, 0)
    fitted = fit(questions, made, max_tokens=20, percentile=90)
    assert (len(fitted.questions), fitted.over_length, fitted.over_percentile) == (9, 1, 1)
    assert [q.id for q in fitted.questions] == ["q-5", "q-1", "q-4", "q-2", "q-3", "q-6", "q-7", "q-8", "q-9"]
    assert [len(ids) for ids in fitted.prompts] == [5, 1, 4, 2, 3, 6, 7, 8, 9]
    with pytest.raises(DataError, match="all 11 prompts are longer") as error:
        fit(questions, made, max_tokens=0)
    assert "the shortest has 1 tokens" in str(error.value)


def test_shots_are_drawn_by_seed() -> None:
    questions = [Question(f"q-{n}", str(n), "1", "1") for n in range(20)]
    assert choose_shots(questions, 4, 1) == choose_shots(questions, 4, 1)
    assert choose_shots(questions, 4, 1) != choose_shots(questions, 4, 2)


def test_the_description_shows_one_prompt() -> None:
    shown = builder(CHAT, Recipe()).describe("3+4?")
    assert shown["example"] == "<user>3+4?<end><assistant>"
    assert shown["stop"] == ["<eos>", "<end>"]
    assert shown["chat_template"] is True


# --- a system text the template does not want

REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ("<{{ m.role }}>{{ m.content }}<end>{% endfor %}")
)
DROPS = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}<end>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "because"), [(REFUSES, "System role not supported"), (DROPS, "leaves a system message out")]
)
def test_a_system_text_the_template_does_not_take_goes_into_the_users_turn(template: str, because: str) -> None:
    recipe = replace(Recipe(), chat_template=template, system_prompt="Add  it.\nThen stop.")
    made = builder(PLAIN, recipe)
    assert made.text("3+4?") == "<user>Add  it.\nThen stop.\n\n3+4?<end>"
    assert because in (made.folded or "")
    assert because in made.describe("3+4?")["system_in_user_turn"]
    shown = builder(PLAIN, recipe, shots=SHOTS).messages("3+4?")
    assert [m["role"] for m in shown] == ["user", "assistant", "user"]
    assert shown[0]["content"].startswith("Add  it.")
    assert builder(CHAT, replace(recipe, chat_template="auto")).folded is None
    assert builder(PLAIN, replace(recipe, chat_template="none")).folded is None


def test_the_template_of_system_c_opens_the_reasoning() -> None:
    from grpo_portable.plan import catalogue
    from grpo_portable.recipe import load

    recipe = load(catalogue.find("dapo-llama-3.2-1b-fp8"))
    made = builder(PLAIN, recipe)
    assert made.text("3+4?") == f"{recipe.system_prompt}<eos>3+4?<eos><start_working_out>"
    assert made.opens_reasoning
    assert made.stop_ids == (PLAIN.eos_token_id,)
    taught = PLAIN.decode(made.target_ids(SHOTS[0]))
    assert taught == "1+1=2<end_working_out><SOLUTION>2</SOLUTION><eos>"
    closed = builder(CHAT, replace(recipe, chat_template="auto"))
    assert not closed.opens_reasoning
    assert PLAIN.decode(closed.target_ids(SHOTS[0])).startswith("<start_working_out>1+1=2<end_working_out>")


def test_the_answer_gets_what_the_longest_prompt_leaves() -> None:
    made = builder(PLAIN, Recipe())
    questions = [Question(f"q-{n}", "x" * n, "1", "1") for n in range(1, 101)]
    recipe = replace(Recipe(), context_tokens=2048, max_completion_tokens=1984, prompt_percentile=90.0)
    fitted = fit(questions, made, max_tokens=512, percentile=recipe.prompt_percentile)
    assert fitted.over_percentile == 10
    assert answer_room(recipe, fitted) == 2048 - 90
    assert answer_room(replace(recipe, max_completion_tokens=100), fitted) == 100
    assert answer_room(replace(recipe, context_tokens=0), fitted) == 1984
    with pytest.raises(DataError, match="90 tokens of the 90"):
        answer_room(replace(recipe, context_tokens=90), fitted)
