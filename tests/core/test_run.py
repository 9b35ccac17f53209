"""The run folder survives what a crash leaves behind."""

import gzip
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import run_folders

from grpo_portable import cli
from grpo_portable.errors import RunFolderError
from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import RunFolder, append_line, create, open_run, read_lines, write_atomically


def test_a_folder_with_a_run_is_refused(tmp_path):
    create(tmp_path / "run", Recipe())
    with pytest.raises(RunFolderError) as caught:
        create(tmp_path / "run", Recipe())
    assert "--resume" in caught.value.lines()[1]


def test_of_several_that_begin_in_one_folder_at_once_one_has_it(tmp_path):
    script = (
        "import sys, pathlib; from grpo_portable import recipe\n"
        "from grpo_portable.errors import RunFolderError; from grpo_portable.run.folder import create\n"
        "made = recipe.Recipe(seed=int(sys.argv[2]))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "try: create(pathlib.Path(sys.argv[1]), made); print('mine')\n"
        "except RunFolderError as error: print(error)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    began = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run"), str(seed)], **pipes)
        for seed in (1, 2, 3)
    ]
    for process in began:
        assert process.stdout.readline() == "ready\n"
    for process in began:
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0].strip() for process in began]
    assert sum(line == "mine" for line in told) == 1
    assert sum("already holds a run" in line for line in told) == 2
    assert open_run(tmp_path / "run").recipe().seed == told.index("mine") + 1


@pytest.mark.parametrize("name", ["plain", "two words", "it's", 'a "b" $c', "größe;x"])
def test_a_run_is_one_word_of_the_commands_a_reader_pastes(name):
    assert shlex.split(f"report {RunFolder(Path(name)).word}/recipe.yaml") == ["report", f"{name}/recipe.yaml"]
    assert RunFolder(Path("runs/a-1")).word == "runs/a-1"


def test_a_folder_without_a_run_cannot_be_opened(tmp_path):
    with pytest.raises(RunFolderError):
        open_run(tmp_path)


def test_an_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as caught:
        create(tmp_path / "file" / "run", Recipe())
    assert "cannot be written" in caught.value.lines()[0]


def test_a_torn_line_is_passed_over_and_closed(tmp_path):
    file = tmp_path / "m.jsonl"
    append_line(file, {"step": 1})
    with file.open("ab") as out:
        out.write(b'{"step": 2, "rew')  # the process died here
    append_line(file, {"step": 3})
    assert [r["step"] for r in read_lines(file)] == [1, 3]


def test_published_answers_are_read_compressed(tmp_path):
    (tmp_path / "base.jsonl.gz").write_bytes(gzip.compress(b'{"id": "1"}\n{"id": "2"}\n'))
    assert [r["id"] for r in read_lines(tmp_path / "base.jsonl")] == ["1", "2"]


@pytest.mark.parametrize(
    "damage",
    [
        {"path": "bf16-hg"},
        {"path": None},
        {"micro_batch": "four"},
        {"rollout_rows": 0},
        {"backend": ["plain"]},
        {"gpus": True},
        {"gpus": ["0"]},
        {"processes": 0},
        {"processes": "two"},
    ],
    ids=str,
)
def test_a_rung_that_can_be_none_is_one_clear_error(tmp_path, damage):
    run = create(tmp_path / "run", Recipe(path="bf16-hf", micro_batch=8, rollout_rows=64))
    rung = {"path": "qlora-hf", "micro_batch": 4, "rollout_rows": 64, "backend": "plain", "gpus": [0], "processes": 1}
    run.write_json("rung.json", {**rung, "of_another_version": 1})
    assert run.rung() == rung and run.recipe().path == "qlora-hf"
    run.write_json("rung.json", {**rung, **damage})
    for read in (run.rung, run.recipe):
        with pytest.raises(RunFolderError, match=r"`rung\.json` in run .* cannot be read") as caught:
            read()
        assert "remove it and use --resume" in caught.value.lines()[1]


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_torn_compressed_answers_are_one_clear_error(tmp_path, damage):
    packed = bytearray(gzip.compress(b"".join(b'{"id": "%d"}\n' % i for i in range(100))))
    packed[-8] ^= 1  # of the checksum
    whole = {"cut": packed[:-12], "flipped": packed, "no gzip": b"version https://git-lfs.github.com/spec/v1\n"}
    (tmp_path / "base.jsonl.gz").write_bytes(whole[damage])
    with pytest.raises(RunFolderError, match=r"base\.jsonl\.gz` cannot be read"):
        list(read_lines(tmp_path / "base.jsonl"))


def test_a_json_file_is_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_atomically(file, "old")

    def die(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(OSError):
        write_atomically(file, "new")
    assert file.read_text() == "old"


def test_the_rung_changes_what_runs_and_not_what_was_settled(tmp_path):
    run = create(tmp_path / "run", Recipe(path="bf16-hf", micro_batch=8, rollout_rows=64))
    run.write_json("rung.json", {"path": "qlora-hf", "micro_batch": 4, "rollout_rows": 64})
    assert (run.recipe().path, run.recipe().micro_batch) == ("qlora-hf", 4)
    assert "path: bf16-hf" in run.recipe_file.read_text()


def test_numbers_that_are_no_json_never_reach_a_file(tmp_path):
    run = create(tmp_path / "run", Recipe())
    with pytest.raises(ValueError):
        run.write_json("scores.json", {"accuracy": float("nan")})
    assert not (tmp_path / "run" / "scores.json").exists()


JSON_FILES = ("run.json", "rung.json", "plan.json", "task.json", "facts.json", "failure.json", "heartbeat")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    "text",
    [b"", b'{"path": "cp', b"\xff\x00\xfe", b"null", b"[1]", b"5", b"[" * 50_000, b'{"x": NaN}', b'{"x": 1e999}'],
)
def test_a_file_of_the_run_that_holds_no_object_is_named(tmp_path, name, text):
    run = create(tmp_path / "run", Recipe())
    (run.path / name).write_bytes(text)
    with pytest.raises(RunFolderError, match=f"`{name}`"):
        run.read_json(name)


@pytest.mark.parametrize(
    ("damage", "because"),
    [
        ({"data": 3}, "`data` must be an object, not 3"),
        ({"data": {"eval": "x"}}, '`data.eval` must be an object, not "x"'),
        ({"data": {"eval": {"used": "all"}}}, '`data.eval.used` must be a whole number from 0 on, not "all"'),
        ({"stages": None}, "`stages` must be an object, not null"),
        ({"stages": {"train": {"seconds": [1]}}}, "`stages.train.seconds` must be a number"),
        ({"stages": {"train": {"paths": ["cpu"]}}}, '`stages.train.paths[0]` must be an object, not "cpu"'),
        ({"stages": {"train": {"paths": [{"path": 1, "from": 0}]}}}, "`stages.train.paths[0].path` must be text"),
        ({"peak_memory_gib": "8"}, "`peak_memory_gib` must be a number"),
        ({"recipe_values": []}, "`recipe_values` must be an object"),
        ({"stages": {"train": {"paths": [{"path": "cpu"}]}}}, "`stages.train.paths[0].from` is not there"),
        ({"prompt": {"stop": 5}}, "`prompt.stop` must be a list"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_in_the_record_is_one_clear_error(tmp_path, damage, because):
    run = create(tmp_path / "run", Recipe())
    run.write_json("run.json", {"planned_memory": None, "held_gib": {"policy": None}, "of_another_version": [1]})
    run.update_json("run.json", **damage)
    for read in (lambda: run.read_json("run.json"), lambda: run.update_json("run.json", path="cpu")):
        with pytest.raises(RunFolderError, match=r"`run\.json` in run .* cannot be read") as caught:
            read()
        assert because in caught.value.because and "--resume" in caught.value.help


def test_the_files_that_are_published_are_of_their_form():
    runs = [RunFolder(file.parent) for file in sorted(Path(__file__).parents[2].glob("reports/**/run.json"))]
    assert len(runs) > 5 and all(
        run.read_json(name) for run in runs for name in ("run.json", "plan.json", "facts.json")
    )
    for run in runs:
        lines = run.metrics_file.read_text().splitlines() if run.metrics_file.exists() else []
        assert len(list(read_lines(run.metrics_file))) == len(lines)


@pytest.mark.parametrize(
    ("name", "value", "because"),
    [
        ("plan.json", {"plan": [0]}, "`plan` must be an object, not [0]"),
        ("plan.json", {"facts": {"gpus": [1]}}, "`facts.gpus[0]` must be an object, not 1"),
        ("plan.json", {"paths": {"cpu": {"open": "yes"}}}, '`paths.cpu.open` must be true or false, not "yes"'),
        ("plan.json", {"walls": [{"closes": 1}]}, "`walls[0].closes` must be a list, not 1"),
        ("task.json", {"only": ["evaluate"]}, '`only` must be "evaluate", not ["evaluate"]'),
        ("task.json", {"only": "evaluate", "adapter": 3}, "`adapter` must be text, not 3"),
    ],
    ids=str,
)
def test_every_command_says_what_is_wrong_in_a_file_of_the_run(tmp_path, capsys, name, value, because):
    sets = {"model": "embedded", "data": "arithmetic", "eval_data": "arithmetic", "rollout_rows": 4}
    run = run_folders.make_run(tmp_path / "run", n=4, steps=2, micro_batch=1, **sets)
    run.write_json(name, value)
    for command in (
        "report",
        "train --resume --out",
        *(["eval --resume --base-too --out"] if name == "task.json" else []),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command.split(), str(run.path)])
        told = " ".join(capsys.readouterr().err.split())
        assert ended.value.code == 2 and f"`{name}` in run" in told and because in told and "help: put it back" in told


@pytest.mark.parametrize(
    ("name", "whole", "others"),
    [
        (
            "metrics.jsonl",
            {"step": 1, "reward": None},
            [{"step": "1"}, {"step": True}, {}, {"step": 2, "reward": "high"}],
        ),
        ("events.jsonl", {"kind": "data", "message": "m"}, [{"kind": ["data"], "message": "m"}, {"kind": "data"}]),
        (
            "generations/base.jsonl",
            {"id": "a", "sample": 0},
            [{"id": ["a"]}, {"id": None}, {}, {"id": "a", "sample": "0"}],
        ),
    ],
)
def test_a_line_of_another_form_is_passed_over_as_a_torn_one_is(tmp_path, name, whole, others):
    run = create(tmp_path / "run", Recipe())
    for line in (*others, whole):
        append_line(run.path / name, line)
    assert list(read_lines(run.path / name)) == [whole]


def test_half_a_surrogate_pair_is_written_and_read_back(tmp_path):
    run = create(tmp_path / "run", Recipe())
    append_line(run.metrics_file, {"step": 1, "question": "a\ud800b"})
    run.write_json("run.json", {"model": "a\udcffb"})
    assert list(read_lines(run.metrics_file)) == [{"step": 1, "question": "a\ud800b"}]
    assert run.read_json("run.json") == {"model": "a\udcffb"}
