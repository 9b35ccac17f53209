"""What the project's code must never do, read from its syntax trees: run code of others, wait for ever, hand anything out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import yaml

import doctor
import grpo_portable
from grpo_portable import recipe
from grpo_portable.errors import RecipeError
from grpo_portable.models import prompts
from grpo_portable.recipe import Recipe

FILES = [f for package in (doctor, grpo_portable) for f in sorted(Path(package.__file__).parent.rglob("*.py"))]  # type: ignore[arg-type]
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
PICKLES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
NAMES_SOMEBODY = {"gethostname", "getfqdn", "getuser", "getlogin", "getpwuid", "node"}
HANDS_OUT = {"push_to_hub", "upload_file", "upload_folder", "create_repo", "create_commit", "HfApi"}
WAITS = {"wait", "join", "communicate", "acquire"}
MEETINGS = {
    ("run/processes.py", "arrival.wait"),  # has arrived: raises what the meeting ended with
    ("grpo_portable/session.py", "join"),
    ("bench/rank.py", "mine.wait"),
}
RUNS_A_PROCESS = {"run", "check_call", "check_output", "call"}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file:line, the called name as written, call) of every call in the project."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield f"{file.parent.name}/{file.name}:{node.lineno}", ast.unparse(node.func), node


CALLS = list(calls())


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def named(*endings: str) -> list[tuple[str, str, ast.Call]]:
    """Calls of `ending` or of `something.ending`."""
    return [(place, name, call) for place, name, call in CALLS if name.rpartition(".")[2] in endings]


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 80 and len(CALLS) > 3000
    assert named("from_pretrained") and named("save_file") and named("load_file")


def test_no_pickle() -> None:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & PICKLES, f"{file}:{node.lineno}"  # type: ignore[attr-defined]
    for place, name, call in named("load"):
        if name.startswith("torch."):
            assert keyword(call, "weights_only") == "True", place
        if name.startswith(("np.", "numpy.")):
            assert keyword(call, "allow_pickle") in (None, "False"), place
    assert not [place for place, name, _ in named("save") if name == "torch.save"]


def test_models_are_read_from_safetensors_and_without_code_of_their_repository() -> None:
    for place, name, call in named("from_pretrained"):
        # which reads what it has just written
        if name.startswith("Auto") and not place.startswith("embedded/build.py"):
            assert keyword(call, "trust_remote_code") == "False", place
        assert keyword(call, "use_safetensors") != "False", place
    for place, name, call in CALLS:
        assert keyword(call, "trust_remote_code") in (None, "False"), f"{place} {name}"
        assert keyword(call, "safe_serialization") in (None, "True"), f"{place} {name}"
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            for key, value in pairs:
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                    assert ast.unparse(value) == "False", f"{file}:{node.lineno}"  # type: ignore[attr-defined]


def test_no_text_is_run() -> None:
    assert not [f"{place} {name}" for place, name, _ in CALLS if name in RUNS_CODE]
    assert not [place for place, name, _ in CALLS if name in ("os.system", "os.popen", "subprocess.getoutput")]
    assert not [place for place, _, call in CALLS if keyword(call, "shell") not in (None, "False")]


def test_yaml_is_safe(tmp_path: Path) -> None:
    assert issubclass(recipe._Loader, yaml.SafeLoader)
    for place, _, call in named("load", "load_all"):
        if ast.unparse(call.func).startswith("yaml."):
            assert keyword(call, "Loader") == "_Loader", place
    assert not named("unsafe_load", "full_load", "unsafe_load_all", "full_load_all")
    mark = tmp_path / "was-run"
    for text in (f"model: !!python/object/apply:os.system ['touch {mark}']", "data: !!python/name:os.system"):
        file = tmp_path / "recipe.yaml"
        file.write_text(text)
        with pytest.raises(RecipeError):
            recipe.load(file)
        value = text.partition(": ")[2]
        assert recipe.parsed([f"model={value}"]) == {"model": value}  # text stays text
        with pytest.raises(RecipeError):
            recipe.parsed([f"steps={value}"])
    assert not mark.exists()


def test_nobody_is_named_and_nothing_is_handed_out() -> None:
    asked = [(place, name) for place, name, _ in named(*NAMES_SOMEBODY)]
    assert not [pair for pair in asked if pair[1].partition(".")[0] in ("socket", "getpass", "os", "pwd", "platform")]
    assert not [f"{place} {name}" for place, name, _ in named(*HANDS_OUT)]
    for place, _, call in CALLS:
        assert keyword(call, "push_to_hub") in (None, "False"), place
        assert keyword(call, "token") is None, place
    for place, name, call in named(
        "write_json", "update_json", "event", "note", "tell_once", "dumps", "append_line", "print"
    ):
        assert "environ" not in ast.unparse(call), f"{place} {name} tells the environment"


def test_every_wait_has_a_limit() -> None:
    for place, name, call in named(*WAITS):
        owner = name.rpartition(".")[0]
        # meetings of ranks, which torch.distributed limits itself
        meeting = (place.partition(":")[0], name) in MEETINGS
        if meeting or owner.rpartition(".")[2] in ("processes", "self"):
            continue
        assert call.args or keyword(call, "timeout"), f"{place} {name}() waits for ever"
    for place, name, call in named(*RUNS_A_PROCESS):
        if name.startswith("subprocess."):
            assert keyword(call, "timeout"), f"{place} {name} waits for ever"
    for place, name, call in named("create_connection", "urlopen"):
        assert len(call.args) > 1 or keyword(call, "timeout"), f"{place} {name} waits for ever"


def test_a_chat_template_reaches_nothing_but_the_conversation() -> None:
    """It comes with a model, and is a program."""
    for text in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}"):
        with pytest.raises(RecipeError, match="unsafe"):
            prompts.builder(tiny.tokenizer(text), Recipe()).text("1 plus 1?")
