"""Whose prompt, questions and model an adapter is judged with: those of its run, unless others are named."""

from pathlib import Path

import pytest

from grpo_portable.errors import ModelError, UsageError
from grpo_portable.eval_task import OF_THIS_MACHINE, WEIGHTS, eval_task
from grpo_portable.recipe import Recipe, load
from grpo_portable.run.folder import create

EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
RECIPE = Recipe(
    model="org/model", data="org/set", eval_data="test.jsonl", path="bf16-hf", micro_batch=8, rollout_rows=64
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    create(tmp_path / "run", RECIPE)
    (tmp_path / "run" / "adapter").mkdir()
    (tmp_path / "run" / "adapter" / WEIGHTS).write_bytes(EMPTY)
    return tmp_path / "run"


@pytest.mark.parametrize("named", ["run", "run/adapter"])
def test_an_adapter_in_its_run_brings_the_runs_recipe_along(run: Path, named: str) -> None:
    task = eval_task(None, model=None, data=None, adapter=run.parent / named)
    assert (task.recipe, task.adapter) == (str(run / "recipe.yaml"), run / "adapter")
    recipe = load(Path(task.recipe), task.overrides)
    assert (recipe.model, recipe.eval_data) == ("org/model", "test.jsonl")
    # sizes and path are this machine's, not those of the machine that trained
    assert (recipe.path, recipe.micro_batch, recipe.rollout_rows) == ("auto", "auto", "auto")
    assert task.told == "prompt and limits, questions, model: those of the run `run`"


def test_what_is_named_wins_over_the_run(run: Path) -> None:
    task = eval_task(None, model="mine", data="q.jsonl", adapter=run, settings=["path=cpu", "eval_limit=9"])
    recipe = load(Path(task.recipe or ""), task.overrides)
    assert (recipe.model, recipe.eval_data, recipe.path, recipe.eval_limit) == ("mine", "q.jsonl", "cpu", 9)
    assert task.told == "prompt and limits: those of the run `run`"
    assert eval_task("gsm8k-base", model="mine", data=None, adapter=run).recipe == "gsm8k-base"


def test_an_adapter_from_elsewhere_needs_its_model_named(run: Path, tmp_path: Path) -> None:
    (run / "adapter").rename(tmp_path / "alone")
    with pytest.raises(UsageError, match="no model is named"):
        eval_task(None, model=None, data=None, adapter=tmp_path / "alone")
    task = eval_task(None, model="org/model", data=None, adapter=tmp_path / "alone", base_too=True)
    assert (task.recipe, task.told, task.overrides) == (None, None, ("model=org/model",))
    assert task.to_json()["base_too"] is True


def test_mistakes_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no adapter"):
        eval_task(None, model="m", data=None, adapter=tmp_path)
    with pytest.raises(UsageError, match="--base-too"):
        eval_task(None, model="m", data=None, adapter=None, base_too=True)


def test_every_size_that_follows_the_machine_is_a_field() -> None:
    assert all(hasattr(RECIPE, setting.partition("=")[0]) for setting in OF_THIS_MACHINE)
