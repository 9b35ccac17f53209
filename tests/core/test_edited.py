"""A run's recipe that was edited before the run goes on: told, or refused where it would contradict what was made."""

import pytest

from grpo_portable.errors import RunFolderError
from grpo_portable.recipe import Recipe
from grpo_portable.run import edited
from grpo_portable.run.folder import RunFolder, create, read_lines


@pytest.fixture
def run(tmp_path) -> RunFolder:
    made = create(tmp_path / "run", Recipe(path="cpu", micro_batch=8, rollout_rows=64, steps=12))
    edited.take_over(made, made=False)
    return made


def edit(run: RunFolder, line: str) -> None:
    key = line.partition(":")[0]
    lines = [line if old.startswith(f"{key}:") else old for old in run.recipe_file.read_text().splitlines()]
    run.recipe_file.write_text("\n".join(lines) + "\n")


def told(run: RunFolder) -> list[str]:
    return [e["message"] for e in read_lines(run.events_file)]


def test_a_recipe_that_stayed_is_not_spoken_of(run):
    edited.take_over(run, made=True)
    assert told(run) == []


def test_before_anything_was_made_every_edit_is_taken_over_and_told_once(run):
    edit(run, "system_prompt: Add.")
    edited.take_over(run, made=False)
    edited.take_over(run, made=True)
    assert told(run) == ['recipe.yaml was changed: system_prompt "" → "Add."']


@pytest.mark.parametrize("line", ["steps: 20", "save_every: 3", "model: elsewhere/model", "micro_batch: 4"])
def test_where_it_lies_how_it_runs_and_what_is_to_come_may_change(run, line):
    edit(run, line)
    edited.take_over(run, made=True)
    (message,) = told(run)
    assert f"{line.partition(':')[0]} " in message


@pytest.mark.parametrize(
    "line", ["learning_rate: 0.1", "lora_rank: 8", "system_prompt: Add.", "seed: 4", "eval_limit: 9"]
)
def test_what_answers_and_steps_were_made_with_may_not(run, line):
    edit(run, line)
    for _ in range(2):  # nor the second time
        with pytest.raises(RunFolderError) as caught:
            edited.take_over(run, made=True)
    assert line.partition(":")[0] in caught.value.fact
    assert "was made as it was" in str(caught.value) and "begin a new run" in str(caught.value.help)


def test_a_trained_run_cannot_be_made_longer(run):
    run.adapter.mkdir()
    edit(run, "steps: 20")
    with pytest.raises(RunFolderError, match="steps 12 → 20, because the training is done"):
        edited.take_over(run, made=True)


def test_what_the_run_itself_settles_is_no_edit(run):
    run.settle(max_completion_tokens=99)
    edited.take_over(run, made=True)
    assert told(run) == []


def test_a_run_of_an_older_version_is_taken_as_it_is(run):
    values = run.read_json("run.json")["recipe_values"]
    del values["seed"]
    run.update_json("run.json", recipe_values=values)
    edited.take_over(run, made=True)
    run.update_json("run.json", recipe_values=None)
    edited.take_over(run, made=True)
    assert told(run) == []
