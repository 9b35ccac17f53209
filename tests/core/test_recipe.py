"""A recipe is read whole or refused with the key's name; what is written back reads as the same recipe."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from grpo_portable.errors import RecipeError
from grpo_portable.plan import catalogue
from grpo_portable.recipe import Recipe, load, override, recipe_from_mapping, to_yaml

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_written_recipe_reads_back_equal(tmp_path):
    recipe = override(Recipe(), ["learning_rate=5e-6", "rewards=[correctness]", "epsilon_high=0.28", "model=./x: y"])
    file = tmp_path / "r.yaml"
    file.write_text(to_yaml(recipe, "two\nlines"), encoding="utf-8")
    assert load(file) == recipe
    assert override(recipe, ["rewards=correctness", "reward_weights=2"]) == replace(recipe, reward_weights=(2.0,))
    assert file.read_text(encoding="utf-8").startswith("# two\n# lines\n")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lerning_rate=3", ["unknown key `lerning_rate`", "`learning_rate`"]),
        ("steps=many", ["`steps`", "whole number", "'many'"]),
        ("steps=0", ["`steps`", "at least 1"]),
        ("steps=1.5", ["`steps`", "whole number"]),
        ("steps=true", ["`steps`", "whole number"]),
        ("learning_rate=.inf", ["`learning_rate`"]),
        ("learning_rate=.nan", ["`learning_rate`"]),
        (f"learning_rate=1{400 * '0'}", ["`learning_rate`", "finite"]),
        ("loss=gropo", ["`loss`", "`grpo`"]),
        ("top_p=2", ["`top_p`", "at most 1"]),
        ("rewards=correctness, tags", ["`rewards`", "list of text"]),
        ("rewards=[]", ["`rewards` is empty"]),
        ("reward_weights=[1, 2, 3]", ["3 reward_weights for 2 rewards"]),
        ("prompt_template=Solve it", ["{question}"]),
        ("micro_batch=7", ["micro_batch 7", "64"]),
        ("dora=true lora_rank=0", ["adapter"]),
        ("steps", ["no `=`"]),
        ("micro_batch=foo", ["`micro_batch`", "auto"]),
        ("rollout_rows=many", ["`rollout_rows`", "auto"]),
        ("reward_weights=[1, .nan]", ["`reward_weights`", "nan"]),
        ("reward_weights=[1, .inf]", ["`reward_weights`", "finite"]),
        ("report_to=[tensorbord]", ["`report_to`", "did you mean `tensorboard`"]),
        ("loss=GRPO", ["`loss`", "did you mean `grpo`"]),
        ("seed=99999999999999999999", ["`seed`", "at most 4294967295"]),
        ("steps=99999999999999999999", ["`steps`", "at most"]),
        ("model=", ["`model` is empty"]),
        ("data=", ["`data` is empty"]),
        ("lora_targets=", ["`lora_targets` is empty"]),
        ('rewards=[""]', ["`rewards` is empty"]),
        ('stop=[""]', ["`stop`", "empty"]),
    ],
)
def test_refusals_name_the_key(setting, words):
    settings = setting.split(" ") if "lora_rank" in setting else [setting]
    with pytest.raises(RecipeError) as caught:
        override(Recipe(), settings)
    text = "\n".join(caught.value.lines())
    assert all(word in text for word in words), text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "not `key: value`"),
        ("steps: [1\n", "not YAML"),
        ("steps: 1\nsteps: 2\n", "given twice"),
        ("steps: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("steps: " + "9" * 5000, "not YAML"),
        ("model: 2020-13-45", "not YAML"),
        ("a: " + "[" * 50_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load(file)
    assert words in str(caught.value)


def test_missing_and_binary_files_are_one_line(tmp_path):
    for content in (None, b"\xff\xfe\x00"):
        file = tmp_path / "r.yaml"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(RecipeError) as caught:
            load(file)
        assert len(caught.value.lines()) == 1


def test_numbers_written_the_short_way_are_numbers():
    assert recipe_from_mapping({"learning_rate": 1}).learning_rate == 1.0
    assert override(Recipe(), ["learning_rate=1e-4"]).learning_rate == 1e-4
    assert override(Recipe(), ["model=3407"]).model == "3407"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("prompt_template={question} now", "{question} now"),  # YAML would read a mapping and stumble over the rest
        ("prompt_template=Q: {question}", "Q: {question}"),
        ("chat_template={{ messages[0]['content'] }}", "{{ messages[0]['content'] }}"),
        ("system_prompt=- think: [first", "- think: [first"),
    ],
)
def test_text_with_yaml_in_it_is_text(setting, value):
    assert getattr(override(Recipe(), [setting]), setting.partition("=")[0]) == value


def test_white_space_may_end_a_completion():
    assert override(Recipe(), ['stop=["\\n\\n", " "]']).stop == ("\n\n", " ")


@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_recipes_that_come_along_are_valid_and_introduce_themselves(file):
    load(file)
    header = "\n".join(catalogue.header(file))
    for word in ("Machine:", "Launch:", "Change:", f"train {file.stem}"):
        assert word in header


def test_every_field_explains_itself():
    assert all(len(f.metadata["doc"]) > 8 for f in fields(Recipe))


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError) as caught:
        catalogue.find("gsm8k-smollm2-135")
    assert "`gsm8k-smollm2-135m`" in str(caught.value.help)
