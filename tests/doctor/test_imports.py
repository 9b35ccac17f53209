"""Who may import what: the doctor lives on the standard library and packaging, heavy things only in child processes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import doctor

ROOM = Path(doctor.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))
TRIALS = ROOM / "trials"
HEAVY = {
    "torch",
    "vllm",
    "unsloth",
    "bitsandbytes",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "numpy",
    "triton",
}
# The judgement is pure: facts in, conclusions out. No process, no network, no environment, no clock.
PURE = [
    *sorted(ROOM.glob("walls*.py")), *sorted(ROOM.glob("causes_*.py")), *sorted(ROOM.glob("pages*.py")),
    *(ROOM / f"{name}.py" for name in (
        "facts", "diagnosis", "versions", "readings", "releases", "locks", "plan", "explain", "install_lines", "memory",
    )),
]  # fmt: skip
IMPURE = {
    "os",
    "subprocess",
    "socket",
    "urllib",
    "http",
    "shutil",
    "time",
    "datetime",
    "random",
    "threading",
    "pathlib",
    "importlib",
}


def imported(file: Path, *, top_only: bool = False) -> set[str]:
    """First names of all modules a file imports, anywhere or at its top level only."""
    tree = ast.parse(file.read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOM)))
def test_imports(file: Path) -> None:
    names = imported(file)
    assert "grpo_portable" not in names
    if TRIALS in file.parents:
        assert not imported(file, top_only=True) & (HEAVY | {"pynvml"}), "heavy imports belong inside the function"
    else:
        assert not names & (HEAVY | {"pynvml"})
    third = names - set(sys.stdlib_module_names) - {"doctor", "packaging", "rich", "IPython", "pynvml"} - HEAVY
    assert third == set()


@pytest.mark.parametrize("file", PURE, ids=lambda f: f.name)
def test_the_judgement_is_pure(file: Path) -> None:
    assert not imported(file) & IMPURE
    calls = {
        n.func.id
        for n in ast.walk(ast.parse(file.read_text()))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert not calls & {"open", "exec", "eval", "input", "__import__"}


@pytest.mark.parametrize(
    ("file", "allowed"),
    [
        ("versions.py", set()),
        ("facts.py", set()),
        ("diagnosis.py", {"doctor.facts"}),
        ("cards.py", set()),
        ("readings.py", {"doctor.cards", "doctor.facts", "doctor.versions"}),
        ("releases.py", set()),
        ("pages.py", set()),
    ],
)
def test_the_lower_rooms_know_nothing_of_the_upper(file: str, allowed: set[str]) -> None:
    tree = ast.parse((ROOM / file).read_text())
    found = {
        n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("doctor")
    }
    assert found <= allowed


def test_a_diagnosis_loads_nothing_heavy() -> None:
    code = (
        "import json, sys; from doctor.facts import facts_from_json; from doctor.plan import diagnose; "
        "diagnose(facts_from_json({'gpus': [], 'packages': {'torch': '2.13.0+cpu'}}), 'Qwen/Qwen3-4B'); "
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & (HEAVY | {"rich", "pynvml", "grpo_portable", "yaml"})


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOM)))
def test_importing_does_no_work(file: Path) -> None:
    """At the top of a module stand definitions, constants and, in __main__ guards, the one call."""
    for node in ast.parse(file.read_text()).body:
        assert not isinstance(node, (ast.For, ast.While, ast.With, ast.Try)), f"{file.name}:{node.lineno}"
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"{file.name}:{node.lineno}"
