"""The command as a program: exit codes, what stands on which stream, speed, and a bare clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import doctor_samples as samples
import pytest
import spent

from doctor import __version__, cli
from doctor.diagnosis import PATHS, Wall
from doctor.facts import facts_to_json

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts_to_json(samples.facts())))
    return file


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    raw = facts_to_json(samples.facts())
    raw["packages"] = {"torch": "absent", "vllm": "absent"}
    raw["probes"] = {}
    file = tmp_path / "no-torch.json"
    file.write_text(json.dumps(raw))
    return file


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(args)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def program(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "doctor", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- exit codes and streams ----------------------------------------------------------------------------------------


def test_open_path_is_zero_and_json_is_alone(saved: Path) -> None:
    done = program("--facts", str(saved), "--json", "--model", "Qwen/Qwen3-4B")
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert set(answer) == {"schema", "plan", "walls", "paths", "after_fix", "facts"}
    assert list(answer["paths"]) == list(PATHS) and answer["paths"][answer["plan"]["path"]]["open"]
    assert answer["facts"]["driver"] == {"version": "570.86", "cuda": "12.8"}


def test_no_path_is_one(no_torch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--facts", str(no_torch))
    assert code == 1 and out.startswith("no path is open") and err == ""
    assert "pip install" in out and "Then this machine can take" in out


@pytest.mark.parametrize(("path", "code"), [("fp8-vllm", 1), ("bf16-hf", 0), ("cpu", 0)])
def test_require(saved: Path, capsys: pytest.CaptureFixture[str], path: str, code: int) -> None:
    assert run(capsys, "--facts", str(saved), "--require", path)[0] == code


@pytest.mark.parametrize(("walls", "strict", "code"), [
    ((samples.NO_VLLM,), True, 0), ((samples.NO_VLLM, samples.SMALL_SHM), True, 1), ((samples.SMALL_SHM,), False, 0),
])  # fmt: skip
def test_strict_counts_warnings_only(walls: tuple[Wall, ...], strict: bool, code: int) -> None:
    assert cli.exit_code(samples.diagnosis(walls=walls), None, strict) == code


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nonsense"], "--nonsense"),
        (["--require", "bf16-fh"], "did you mean bf16-hf?"),
        (["--require", "x"], "fp8-vllm, bf16-vllm"),
        (["--prove", "warp"], "'warp' is no path"),
        (["--model", "./nomodel"], "model `./nomodel` is not there"),
        (["--model", "none.gguf"], "model `none.gguf` is not there"),
        (["--model", "FOLDER"], "holds no model, because there is no config.json in it"),
        (["--what-if", "RTX 4090", "--model", "./nomodel"], "model `./nomodel` is not there"),
        (["--facts", "/no/such/file.json"], "No such file"),
        (["--facts", "FOLDER"], "directory"),
        (["--facts", "BAD"], "not JSON"),
        (["--facts", "LIST"], "one JSON object"),
        (["--facts", "SCHEMA"], "99"),
        (["--facts", "OTHER"], "no facts file"),
        (["--facts", "TYPES"], "`gpus` must be a list"),
        (["--facts", "BINARY"], "not JSON"),
        (["--facts", "DEEP"], "not JSON"),
        (["--facts", "GOOD", "--prove"], "--prove tries this machine"),
        (["--facts", "GOOD", "--save-facts", "/no/such/folder/x.json"], "cannot be written"),
        (["--facts", "GOOD", "--group-size", "0"], "--group-size: must be a whole number from 1 to"),
        (["--facts", "GOOD", "--lora-rank", "9" * 5000], "--lora-rank: must be a whole number from 1 to"),
        (["--timeout", "never"], "--timeout: must be a number from 0.1 to 3600"),
        (["--timeout", "nan"], "--timeout: must be a number from 0.1 to 3600"),
        (["--explain", ""], "no wall is called ''"),
        (["--what-if", ""], "names no card"),
        (["--json", "--markdown"], "not allowed with"),
        (["--pip-args"], "--install-plan"),
        (["--explain", "NOT-A-WALL"], "no wall is called"),
    ],
)
def test_usage_is_two_with_one_clear_line(
    args: list[str], words: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents: dict[str, Any] = {
        "BAD": b"{", "LIST": b"[]", "OTHER": b'{"steps": 3}',
        "SCHEMA": b'{"schema": 99}', "TYPES": b'{"gpus": 3}', "BINARY": b"\xff\xfe\x00\x81",
        "DEEP": b"[" * 100_000,
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    places = {name: str(tmp_path / name) for name in contents} | {"GOOD": str(saved), "FOLDER": str(tmp_path)}
    code, out, err = run(capsys, *[places.get(a, a) for a in args])
    assert code == 2 and out == "" and err.startswith("grpo-doctor: error: ")
    assert len(err.strip().splitlines()) == 1 and words in err, err


def test_its_own_failure_is_three(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("what nobody foresaw at /home/ada")

    monkeypatch.setattr(cli, "_judged", broken)
    code, out, err = run(capsys, "--facts", str(saved))
    assert (
        code == 3
        and out == ""
        and "the doctor itself failed" in err
        and "ada" not in err
        and len(err.splitlines()) == 1
    )
    assert "Traceback" in run(capsys, "--facts", str(saved), "-v")[2]


def test_a_closed_pipe_is_no_failure(saved: Path) -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m doctor --facts "{saved}" -v | head -n 1',
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for flag, words in (("--version", f"grpo-doctor {__version__}"), ("--help", "exit codes")):
        with pytest.raises(SystemExit) as left:
            cli.main([flag])
        assert left.value.code == 0 and words in capsys.readouterr().out


# ---- facts in and out ----------------------------------------------------------------------------------------------


def test_saved_facts_replay_to_the_same_answer(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again, answer = tmp_path / "again.json", tmp_path / "answer.json"
    _, first, _ = run(capsys, "--facts", str(saved), "--json", "--save-facts", str(again))
    answer.write_text(first)
    assert run(capsys, "--facts", str(again), "--json")[1] == first
    assert run(capsys, "--facts", str(answer), "--json")[1] == first  # a saved answer carries its facts


def test_facts_from_stdin_with_a_byte_order_mark(saved: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "doctor", "--facts", "-", "--json"],
        cwd=ROOT,
        input=saved.read_text(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["schema"] == 1
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + saved.read_bytes())
    assert program("--facts", str(marked), "--json").returncode == 0


def test_an_empty_object_is_an_unknown_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.json").write_text("{}")
    code, out, _ = run(capsys, "--facts", str(tmp_path / "empty.json"), "--json")
    assert code in (0, 1) and json.loads(out)["facts"]["gpus"] is None


# ---- looks ---------------------------------------------------------------------------------------------------------


def test_text_fits_and_has_no_colour_in_a_pipe(saved: Path) -> None:
    done = program("--facts", str(saved), "--model", "Qwen/Qwen3-4B", "-v")
    assert "\x1b" not in done.stdout and done.stdout.endswith("\n")
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and max(map(len, line.split())) < 60]
    assert long == []


@pytest.mark.parametrize(
    ("env", "tty", "colour"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_colour_only_where_wanted(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], tty: bool, colour: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    class Stream:
        def isatty(self) -> bool:
            return tty

    assert cli._colour(Stream()) is colour  # type: ignore[arg-type]


def test_an_ascii_terminal_gets_question_marks_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"host": {"os": "Лінукс ✓"}}), encoding="utf-8")
    done = program("--facts", str(tmp_path / "f.json"), PYTHONIOENCODING="ascii")
    assert done.returncode in (0, 1) and "?" in done.stdout and done.stderr == ""


def test_markdown(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--facts", str(saved), "--markdown")
    assert out.startswith("### grpo-doctor: ") and "| `cpu` |" in out


def test_every_wall_is_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = run(capsys, "--list-walls", "--json")
    codes = json.loads(listed)
    assert codes and all(title for title in codes.values())
    code, shown, _ = run(capsys, "--explain", next(iter(codes)).lower())
    assert code == 0 and next(iter(codes)) in shown
    assert run(capsys, "--list-walls")[1].splitlines()[0].startswith(next(iter(codes)))


# ---- speed and a bare clone ----------------------------------------------------------------------------------------


def test_replay_takes_less_than_half_a_second(saved: Path) -> None:
    def replay() -> None:
        program("--facts", str(saved), "--json", "--model", "Qwen/Qwen3-4B")

    assert min(spent.by(replay) for _ in range(2)) < 0.5


def bare(folder: Path, *args: str, packaging: bool = True) -> subprocess.CompletedProcess[str]:
    """The clone run by a Python with no site-packages but, if asked, `packaging`."""
    if packaging:
        import packaging as installed

        (folder / "packaging").symlink_to(Path(installed.__file__).parent)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-S", "-m", "doctor", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def test_bare_clone_answers_with_the_standard_library_and_packaging(tmp_path: Path) -> None:
    with spent.at_most(1):
        done = bare(tmp_path, "--json")
    answer = json.loads(done.stdout)
    assert done.stderr == "" and answer["facts"]["packages"]["torch"] == "absent"
    assert done.returncode == 1 and answer["plan"]["path"] is None and answer["after_fix"]


def test_bare_clone_without_packaging_says_so(tmp_path: Path, saved: Path) -> None:
    done = bare(tmp_path, "--facts", str(saved), packaging=False)
    assert done.returncode == 3 and done.stdout == ""
    assert (
        done.stderr
        == "grpo-doctor: error: the package `packaging` is missing; install it with: pip install packaging\n"
    )


# ---- pages ---------------------------------------------------------------------------------------------------------


def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--what-if", "RTX 4090", "--model", "Qwen/Qwen3-4B")
    assert code == 0 and "4090" in out and err == ""
    assert json.loads(run(capsys, "--what-if", "RTX 4090", "--model", "Qwen/Qwen3-4B", "--json")[1])
    code, out, err = run(capsys, "--what-if", "RTX 4091")
    assert code == 2 and out == "" and len(err.splitlines()) == 1


def test_install_plan(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--facts", str(saved), "--install-plan")
    assert code == 0 and "pip install" in out and "uv" in out
    assert json.loads(run(capsys, "--facts", str(saved), "--install-plan", "--json")[1])
    _, words, _ = run(capsys, "--facts", str(saved), "--install-plan", "--pip-args")
    assert words.startswith("torch==") and len(words.splitlines()) == 1
