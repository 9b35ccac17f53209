"""The command line: every mistake is one to three lines and an exit code, nothing is lost, and `--auto` says its plan."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import run_folders

from doctor.facts import Facts
from doctor.plan import diagnose
from grpo_portable import cli, launch, preflight
from grpo_portable.errors import PathClosed, RecipeError, RunFolderError, UsageError
from grpo_portable.plan import listing
from grpo_portable.recipe import Recipe, load, override, to_yaml
from grpo_portable.run import folder as run_folder

ROWS = [{"question": f"What is {a} + 1?", "answer": f"{a} + 1 = {a + 1}\n#### {a + 1}"} for a in range(40)]


def run(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "grpo_portable.cli", *map(str, arguments)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def unwrapped(told):
    """What was told, a sentence a line."""
    return told.replace("\n  ", " ")


def rows(file, records):
    file.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train"], 2, ["no recipe was named", "--auto"]),
        (["train", "gsm8k-smolm2"], 2, ["no recipe `gsm8k-smolm2`", "gsm8k-smollm2-135m"]),
        (["train", "./none.yaml"], 2, ["no recipe file"]),
        (["train", "--auto", "--set", "lerning_rate=1"], 2, ["lerning_rate", "`learning_rate`"]),
        (["train", "--auto", "--set", "steps=lots"], 2, ["`steps`", "whole number"]),
        (["train", "--auto", "--set", "rewards=correctnes"], 2, ["no reward is called", "did you mean `correctness`"]),
        (["train", "--auto", "--set", "rewards=a, b"], 2, ["must be a list of texts", "[a, b]"]),
        (["train", "--auto", "--path", "fp9-vllm"], 2, ["--path: `path`", "fp8-vllm"]),
        (["train", "--auto", "--path", "gpu"], 2, ["--path: `path` cannot be 'gpu'", "bf16-hf"]),
        (["eval", "--adapter", "nope"], 2, ["no such folder", "help: ", "--adapter runs/NAME"]),
        (["compare", "nope", "nope"], 2, ["`nope` holds no run", "no such folder", "help: "]),
        (
            ["train", "gsm8k-base", "--auto", "--model", "embedded", "--data", "none.jsonl"],
            2,
            ["`none.jsonl` is not there"],
        ),
        (["train", "gsm8k-base", "--auto", "--model", "./none", "--dry-run"], 2, ["`./none` is not there"]),
        (["eval", "--model", "embedded", "--data", "./none.csv.gz"], 2, ["`./none.csv.gz` is not there"]),
        (["train", "--resume", "--out", "nowhere"], 2, ["holds no run"]),
        (["train", "--resume"], 2, ["no run to go on with"]),
        (["score", "nowhere"], 2, ["holds no run"]),
        (["report", "nowhere"], 2, ["holds no run"]),
        (["recipes", "nope"], 2, ["no recipe `nope`"]),
        (["train", "--frobnicate"], 2, ["--frobnicate"]),
    ],
)
def test_mistakes_are_told_in_a_few_lines(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == code, told
    assert all(word in told for word in words), told
    if "--frobnicate" not in arguments:  # typer draws its own box
        assert len(unwrapped(told).splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_only_an_export_or_a_bench_needs_is_told_in_three_lines(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "grpo_portable.bench.rollout", raising=False)
    monkeypatch.delattr("grpo_portable.bench.rollout", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "rollout", "--shape", "qwen3-4b"])
    told = capsys.readouterr().err
    assert ended.value.code == 1 and told.startswith("error: numpy is not installed, because")
    assert "grpo-doctor --install-plan" in told and len(unwrapped(told).splitlines()) <= 3


def test_a_module_of_ours_that_is_gone_is_no_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpo_portable.bench.rollout", None)
    monkeypatch.delattr("grpo_portable.bench.rollout", raising=False)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["bench", "rollout"])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Makes runs of a name, oldest first: interrupted ones, or what else the name says."""
    monkeypatch.chdir(tmp_path)

    def make(*names):
        for age, name in enumerate(names):
            folder = run_folder.create(run_folder.RUNS / name, Recipe(eval_samples=0), "")
            if name.startswith("eval"):
                folder.write_json("task.json", {"only": "evaluate"})
            if name.startswith("refused"):
                folder.write_json("failure.json", {"kind": name.partition("-")[2] or "user"})
            elif not name.startswith("cut"):
                run_folders.write_answers(folder, "base", ["right"])
            if name.endswith(("done", "unreported")):
                folder.write_json("run.json", {"data": {"eval": {"used": 1}}})
                run_folders.write_answers(folder, "tuned", ["right"])
                folder.adapter.mkdir()
                (folder.adapter / "adapter_config.json").write_text('{"r": 4}')
                (folder.adapter / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
            if name.endswith("done"):
                (folder.path / "report.md").write_text("done")
            os.utime(folder.recipe_file, (age, age))

    return make


@pytest.mark.parametrize(
    ("there", "trains", "taken", "words"),
    [
        (["older", "trained", "eval-1"], True, "trained", ["not finished", "interrupted too: `--out runs/older`"]),
        (["older", "trained", "eval-1"], False, "eval-1", []),
        (["older", "new-done"], True, "older", ["going on with runs/older"]),
        (["older", "refused"], True, "older", ["going on with runs/older"]),
        (["cut-early", "refused"], True, "cut-early", []),
        (["older", "refused-reward"], True, "older", []),
        (["older", "refused-import"], True, "older", []),
        (
            ["refused", "cut-killed", "refused-killed"],
            True,
            "refused-killed",
            ["interrupted too: `--out runs/cut-killed`"],
        ),
        (["old-done", "refused"], True, "refused", ["whose start was refused; no other run in runs/ was interrupted"]),
        (["unreported", "new-done"], True, "unreported", ["not finished"]),
        (["eval-unreported", "eval-done"], False, "eval-unreported", ["not finished"]),
        (["old-done", "new-done"], True, "new-done", ["every run in runs/ is finished; the newest is runs/new-done"]),
        (["older", "eval-done"], False, "eval-done", ["every evaluation in runs/ is finished"]),
    ],
)
def test_resume_takes_the_newest_run_of_its_kind_that_can_go_on(runs, capsys, there, trains, taken, words):
    runs(*there)
    assert launch._chosen(None, trains=trains).run.path.name == taken
    told = unwrapped(capsys.readouterr().out)
    assert all(word in told for word in words) and ("interrupted too" in told) == ("interrupted too" in str(words)), (
        told
    )


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (
            "trained/adapter",
            ["the adapter in `{here}/trained`", "help: grpo-portable export {here}/trained --to adapter"],
        ),
        ("elsewhere", ["the adapter in `{here}/elsewhere`", "name the run that trained the adapter"]),
        (None, ["it asked a model without an adapter", "name the run that trained the adapter"]),
    ],
)
def test_an_evaluation_is_not_exported_and_names_the_run_it_asked(tmp_path, monkeypatch, capsys, adapter, words):
    monkeypatch.chdir(tmp_path)
    run_folder.create(tmp_path / "trained", Recipe())
    asked = str(tmp_path / adapter) if adapter else None
    run_folder.create(tmp_path / "asked", Recipe()).write_json("task.json", {"only": "evaluate", "adapter": asked})
    code, said = told(capsys, "export", "asked", "--to", "adapter")
    assert code == 2 and "run `asked` is an evaluation" in said and "--resume" not in said
    assert all(word.format(here=tmp_path) in said for word in words), said


def test_a_run_without_answers_has_no_scores(tmp_path):
    folder = run_folder.create(tmp_path / "new", Recipe(), "")
    done = run("score", "new", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no answers to score" in done.stderr and "--resume --out new" in done.stderr
    assert not (folder.path / "scores.json").exists()


def test_a_path_this_machine_has_not_names_its_wall(tmp_path):
    facts = {
        "schema": 1,
        "gpus": [],
        "packages": {"torch": "2.13.0+cpu", "vllm": "absent"},
        "host": {"platform": "linux"},
    }
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    done = run(
        "train",
        "arithmetic-embedded",
        "--auto",
        "--path",
        "bf16-hf",
        "--dry-run",
        "--facts",
        "facts.json",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "bf16-hf is closed" in done.stderr and "help:" in done.stderr


def test_dry_run_says_the_plan_and_writes_nothing(tmp_path):
    done = run("train", "arithmetic-embedded", "--auto", "--path", "cpu", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("path", "cpu", "embedded", "16 questions x 8 completions", "memory", "because"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == [] and "would not start" not in done.stdout


@pytest.mark.parametrize("there", ["a run", "a file", "below a file", "not to be written"])
def test_a_folder_that_cannot_be_taken_is_refused_alike_in_a_dry_run_and_at_a_start(tmp_path, there):
    out = tmp_path / "out"
    if there == "a run":
        run_folder.create(out, Recipe())
    elif "file" in there:
        out.write_text("mine")
        out = out / "below" if there == "below a file" else out
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    else:
        tmp_path.chmod(0o500)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError) as started:
        run_folder.create(out, Recipe())
    with pytest.raises(RunFolderError) as planned:
        run_folder.may_create(out)
    tmp_path.chmod(0o700)
    assert started.value.lines() == planned.value.lines()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_fails_where_out_holds_a_run(tmp_path):
    run_folder.create(tmp_path / "out", Recipe())
    asked = ["train", "arithmetic-embedded", "--auto", "--path", "cpu", "--out", "out"]
    started, planned = run(*asked, cwd=tmp_path), run(*asked, "--dry-run", cwd=tmp_path)
    assert started.returncode == planned.returncode == 2
    for told in (started.stderr, planned.stdout):
        assert "`out` already holds a run" in unwrapped(told) and "continue it with --resume" in unwrapped(told)


def test_a_dry_run_says_what_a_start_would_be_refused_for_and_is_silent_of_another_machine(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "math_verify" else real(name, *more)
    )
    facts = Path(__file__).parents[1] / "doctor" / "saved" / "h200-torch211-bare.json"
    asked = {"auto": True, "out": None, "dry_run": True, "fallback": True}
    asked["overrides"] = ["path=auto", "rewards=[symbolic_correctness]"]
    assert launch.train("arithmetic-embedded", **asked, facts_file=str(facts)) == 0
    assert "would not start" not in capsys.readouterr().out
    monkeypatch.setattr(launch, "_probe", lambda: launch.saved_facts(str(facts)))
    assert launch.train("arithmetic-embedded", **asked) == RecipeError.exit_code
    plan, _, refused = capsys.readouterr().out.partition("it would not start now\n")
    assert plan.startswith("plan\n") and "needs math-verify, which is not installed" in unwrapped(refused)
    rows = {
        row.name: row
        for row in listing.rows(launch.saved_facts(str(facts)), listing.Here(lambda _: {}, preflight.lacking()))
    }
    assert rows["dapo-qwen3-14b-80gb"].fits is False and "math-verify" in rows["dapo-qwen3-14b-80gb"].why


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q", "answer": "4"}, "also stand in the training data"),
        ({"q": "?", "a": "4"}, "no question column"),
    ],
)
def test_a_dry_run_reads_questions_that_lie_here(tmp_path, row, words):
    rows(tmp_path / "q.jsonl", [row] * 3)
    asked = [
        "train",
        "arithmetic-embedded",
        "--auto",
        "--path",
        "cpu",
        "--data",
        "q.jsonl",
        "--set",
        "eval_data=q.jsonl",
    ]
    done = run(*asked, "--dry-run", cwd=tmp_path)
    plan, _, refused = done.stdout.partition("it would not start now\n")
    assert done.returncode == 2 and plan.startswith("plan\n") and words in " ".join(refused.split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"question": "q", "answer": "no number"}\n' * 3, "gold"),
        ("", "holds no rows"),
        ("no JSON\n", "row 1: the line is not a JSON object"),
    ],
)
def test_data_that_cannot_be_used_is_told_before_a_folder_is_made(tmp_path, content, words):
    """Of all that test_data knows, a few."""
    (tmp_path / "q.jsonl").write_text(content)
    settings = ["--set", "eval_data=q.jsonl", "--out", "out"]
    done = run("train", "arithmetic-embedded", "--auto", "--path", "cpu", *settings, cwd=tmp_path)
    errors = unwrapped(done.stderr).splitlines()
    assert done.returncode == 2 and len(errors) == 2 and words in errors[0] and errors[1].startswith("help: "), errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./no-such-folder", ["no-such-folder"]),
        ("nobody/no-such-model", ["nobody/no-such-model", "local"]),
        ("./q.jsonl", ["q.jsonl"]),
    ],
)
def test_a_model_that_cannot_be_had_says_what_was_tried(tmp_path, model, words):
    rows(tmp_path / "q.jsonl", ROWS)
    settings = [
        "--data",
        "q.jsonl",
        "--set",
        "eval_data=arithmetic",
        "--set",
        "gradient_checkpointing=false",
        "--out",
        "out",
    ]
    done = run("train", "gsm8k-base", "--auto", "--path", "cpu", "--model", model, *settings, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    errors = unwrapped(done.stderr[done.stderr.index("error:") :])
    assert len(errors.splitlines()) <= 2 and all(word in errors for word in words), errors


def test_a_hub_out_of_reach_is_told_before_anything_is_loaded_or_written(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        gone = f"http://127.0.0.1:{listening.getsockname()[1]}"
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"), "")
    rows(tmp_path / "q.jsonl", ROWS)
    asked = ["gsm8k-base", "--auto", "--path", "cpu", "--model", "nobody/none", "--data", "q.jsonl", "--out", "out"]
    began = time.monotonic()
    done = run("train", *asked, cwd=tmp_path, HF_HUB_OFFLINE="", HF_ENDPOINT=gone, **proxies)
    planned = run("train", *asked, "--dry-run", cwd=tmp_path, HF_HUB_OFFLINE="", HF_ENDPOINT=gone, **proxies)
    told = unwrapped(done.stderr).splitlines()
    assert (done.returncode, planned.returncode, len(told)) == (2, 2, 2), done.stderr
    assert "model `nobody/none` is not on this machine, and the hub is out of reach, because 127.0.0.1" in told[0]
    assert not (tmp_path / "out").exists()
    missing = " ".join(planned.stdout.partition("it would not start now")[2].split())
    assert missing.startswith(
        "model `nobody/none` is not on this machine, and the hub is out of reach, because 127.0.0.1"
    )
    assert "help: without a network give a local one" in missing
    assert time.monotonic() - began < 60  # two looks at the machine; the client's own retries take half a minute more


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "arithmetic-embedded"),
        ({"data": "My questions.JSONL.gz"}, "my-questions-embedded"),
        ({"model": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "arithmetic-smollm2-135m-instruct"),
        ({"data": "./sets/a.b.csv", "model": "~/models/Some.Q8_0.gguf"}, "a.b-some.q8_0"),
    ],
)
def test_a_run_on_data_or_a_model_of_ones_own_is_not_named_after_the_recipe(changed, name):
    facts = str(
        Path(__file__).parents[1] / "doctor" / "saved" / "h200-torch211-bare.json"
    )  # of files nothing is asked there
    overrides = [f"{key}={value}" for key, value in changed.items()]
    assert launch.prepare("arithmetic-embedded", auto=True, overrides=overrides, facts_file=facts).name == name


def test_a_dry_run_says_what_a_start_would_note(tmp_path):
    rows(tmp_path / "q.jsonl", [{"question": "q", "answer": "4"}, {"question": "q2", "answer": "?"}])
    asked = [
        "train",
        "arithmetic-embedded",
        "--auto",
        "--path",
        "cpu",
        "--data",
        "q.jsonl",
        "--set",
        "prompts_per_step=8",
    ]
    done = run(
        *asked,
        "--set",
        "group_size=4",
        "--set",
        "micro_batch=8",
        "--set",
        "eval_data=arithmetic",
        "--dry-run",
        cwd=tmp_path,
    )
    noted = unwrapped(done.stdout.partition("what a start would note\n")[2])
    assert done.returncode == 0, done.stderr
    assert "1 of 2 rows of q.jsonl (train) cannot be used and are left out: row 2: gold answer" in " ".join(
        noted.split()
    )
    assert "a step asks 8 questions and only 1 can be trained on" in " ".join(noted.split())


@pytest.mark.parametrize(
    ("few_shot", "words"), [(3, "none would be left to train on"), (4, "has 3 usable training questions")]
)
def test_more_worked_examples_than_questions_are_refused_alike_in_a_dry_run_and_at_a_start(tmp_path, few_shot, words):
    rows(tmp_path / "q.jsonl", [{"question": f"q{i}", "answer": "4"} for i in range(3)])
    asked = ["train", "arithmetic-embedded", "--auto", "--path", "cpu", "--data", "q.jsonl", "--out", "out"]
    asked += ["--set", "eval_data=arithmetic", "--set", f"few_shot={few_shot}"]
    started, planned = run(*asked, cwd=tmp_path), run(*asked, "--dry-run", cwd=tmp_path)
    assert started.returncode == planned.returncode == 2 and not (tmp_path / "out").exists()
    for told in (started.stderr, planned.stdout):
        assert words in " ".join(told.split()) and "few_shot of at most 2" in " ".join(told.split())


def test_a_folder_that_holds_no_model_is_refused_alike_in_a_dry_run_and_at_a_start(tmp_path):
    (tmp_path / "model").mkdir()
    asked = ["train", "arithmetic-embedded", "--auto", "--path", "cpu", "--model", "model", "--out", "out"]
    started, planned = run(*asked, cwd=tmp_path), run(*asked, "--dry-run", cwd=tmp_path)
    assert started.returncode == planned.returncode == 2 and started.stderr == planned.stderr
    assert "folder `model` holds no model, because there is no config.json in it" in unwrapped(started.stderr)
    assert not (tmp_path / "out").exists()


def test_a_run_can_be_repeated_from_its_own_recipe_and_its_folder_is_kept(tmp_path):
    small = ["--set", "steps=2", "--set", "eval_limit=8", "--set", "eval_samples=0", "--set", "prompts_per_step=2"]
    small += ["--set", "micro_batch=8", "--path", "cpu"]
    first = run("train", "arithmetic-embedded", "--auto", *small, "--out", "first", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "first"
    for name in ("recipe.yaml", "run.json", "facts.json", "plan.json", "metrics.jsonl", "scores.json", "report.md"):
        assert (folder / name).is_file(), name
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert {f.name for f in (folder / "generations").iterdir()} == {"base.jsonl", "tuned.jsonl"}
    recipe = load(folder / "recipe.yaml")
    assert "auto" not in (recipe.path, recipe.model, recipe.data, recipe.micro_batch, recipe.rollout_rows)

    again = run("train", folder / "recipe.yaml", "--out", "second", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in ("base.jsonl", "tuned.jsonl"):
        assert (folder / "generations" / name).read_text() == (tmp_path / "second" / "generations" / name).read_text()
    refused = run("train", folder / "recipe.yaml", "--out", "first", cwd=tmp_path)
    assert refused.returncode == 2 and "--resume" in refused.stderr


def test_a_recipe_can_be_copied_out_and_nothing_is_overwritten(tmp_path):
    done = run("recipes", "arithmetic-embedded", "--copy", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 0 and load(tmp_path / "mine.yaml").model == "embedded"
    planned = run(*done.stdout.partition("grpo-portable ")[2].split(), "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0 and planned.stdout.startswith("plan\n"), planned.stderr
    again = run("recipes", "arithmetic-embedded", "--copy", "mine.yaml", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr


def test_a_settled_recipe_loses_nothing_on_the_way_through_yaml(tmp_path):
    recipe = override(
        Recipe(), ["path=cpu", "model=embedded", "data=arithmetic", "micro_batch=4", "stop=['Question:']"]
    )
    (tmp_path / "r.yaml").write_text(to_yaml(recipe))
    assert load(tmp_path / "r.yaml") == recipe


def told(capsys, *arguments):
    """Exit code and stderr of a command in this process."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(a) for a in arguments])
    return left.value.code, unwrapped(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--resume", "gsm8k-base"], ["--resume does not go with a recipe"]),
        (["train", "--resume", "--set", "steps=300"], ["--resume does not go with --set", "as it was settled"]),
        (["train", "--resume", "--model", "m"], ["--model"]),
        (["train", "--resume", "--dry-run"], ["--dry-run"]),
        (["eval", "--resume", "--data", "more.jsonl"], ["--resume does not go with --data"]),
        (["recipes", "--copy", "mine.yaml"], ["--copy copies one recipe", "recipes NAME --copy mine.yaml"]),
        (["recipes", "gsm8k-base", "--json"], ["--json is for the list"]),
    ],
)
def test_nothing_that_was_asked_for_is_passed_over_in_silence(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, errors = told(capsys, *arguments)
    assert code == 2 and all(word in errors for word in words), errors
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_no_traceback(tmp_path, capsys):
    run_folders.make_run(tmp_path / "run", n=20, steps=12)
    (tmp_path / "file").write_text("")
    chart = tmp_path / "file" / "chart.png"
    code, errors = told(capsys, "compare", tmp_path / "run", tmp_path / "run", "--chart", chart)
    assert code == 2 and errors.startswith("error: `") and "cannot be used, because" in errors
    assert f"help: make `{tmp_path}` a folder" in errors
    for name, command in (
        ("scores.json", ["report", tmp_path / "run"]),
        ("c.png", ["compare", *[tmp_path / "run"] * 2, "--chart"]),
    ):
        taken = tmp_path / "run" / name if name == "scores.json" else tmp_path / name
        taken.mkdir()
        code, errors = told(capsys, *command, *([taken] if name == "c.png" else []))
        assert code == 2 and errors.startswith(f"error: `{taken}` cannot be used, because") and ".part" not in errors


def test_a_help_says_where_its_commands_lie_when_they_are_not_on_the_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "activate").write_text("")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "grpo-portable")])
    monkeypatch.setenv("PATH", "")
    assert f"(first: . {tmp_path / 'activate'})" in told(capsys, "train")[1].splitlines()
    assert "first:" not in told(capsys, "score", tmp_path)[1]  # names no command
    on_path = tmp_path / "grpo-portable"
    on_path.write_text("")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "first:" not in told(capsys, "train")[1]


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000], ids=["empty", "list", "null", "cut", "deep"])
def test_what_holds_no_facts_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "facts.json").write_text(text)
    with pytest.raises(UsageError, match=r"facts file .* cannot be read"):
        launch.saved_facts(str(tmp_path / "facts.json"))


_NO_TRITON = {"trl": "1.15.0", "triton": "absent"}


@pytest.mark.parametrize(
    ("packages", "model", "trains", "words"),
    [
        (_NO_TRITON, "embedded", True, ["cannot train here", "trl>=1.16,<1.17"]),
        (_NO_TRITON, "embedded", False, None),
        ({"peft": "absent"}, "embedded", False, ["not installed: peft", 'pip install "peft>=']),
        ({"gguf": "absent"}, "model.Q4_1.GGUF", True, ["the package gguf that reads it is not installed", "gguf>="]),
        ({"gguf": "absent"}, "embedded", True, None),
    ],
)
def test_doctor_list_start_and_resume_say_the_same(monkeypatch, packages, model, trains, words):
    """A package that every path needs: the doctor closes them all, and nothing starts; an evaluation needs less."""
    facts = Facts(gpus=(), packages={"torch": "2.13.0+cpu", **packages})
    monkeypatch.setattr(launch, "_probe", lambda: facts)
    monkeypatch.setattr(preflight, "known_files", lambda recipe: None)  # of the model that is only named here
    monkeypatch.setattr(preflight, "may_start", lambda recipe, trains: None)
    recipe = replace(load(launch.catalogue.find("arithmetic-embedded")), model=model)
    starts = (
        lambda: launch.prepare("arithmetic-embedded", auto=True, overrides=[f"model={model}"], trains=trains),
        lambda: preflight.may_go_on(recipe, facts, trains=trains),
    )
    for start in starts:
        with contextlib.nullcontext() if words is None else pytest.raises(PathClosed) as told:
            start()
        assert words is None or all(word in "\n".join(told.value.lines()) for word in words)
    open_ = {path for path, state in diagnose(facts, model).paths.items() if state.open}
    assert open_ == ({"cpu"} if words is None and trains else set())
    if trains and model == "embedded":
        row = next(row for row in listing.rows(facts, None) if row.name == "arithmetic-embedded")
        assert row.fits is (words is None), row
