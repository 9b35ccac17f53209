"""Files and names that pages and docstrings speak of are there, and are written with their package.

A file is looked for from the root, from grpo_portable/, beside the file that speaks of it, and on a page in the folders that
its line or the heading above names; a page may call a test by its name alone. Names are read alike:
`training.batches.questions_of`.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = [ROOT, ROOT / "grpo_portable"]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [
    file for room in ("doctor", "grpo_portable", "tests", "reports") for file in sorted((ROOT / room).rglob("*.py"))
]
TESTS = {file.name for file in (ROOT / "tests").rglob("*.py")}
FILE = re.compile(r"(?<![\w/.~-])(?:[\w-]+/)*\w+\.py\b")
NAME = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`")
FOLDER = re.compile(r"(?<![\w/])(\w+)/(?!\w)")
ENDINGS = {"json", "jsonl", "log", "md", "py", "sh", "toml", "txt", "yaml"}
NOT_OURS = (  # how files and names of others begin, examples, and objects of which an attribute is meant
    *(
        "aten.",
        "convert_hf_to_gguf.py",
        "datasets.",
        "flashinfer/",
        "sys.",
        "torch.",
        "torch/",
        "unsloth/",
        "unsloth_zoo/",
    ),
    *("vllm/", "a.b", "file.py", "folder/", "my_rewards.py", "path/to/", "something."),
    *("engine.", "model."),
)


def spoken() -> Iterator[tuple[Path, str, list[Path]]]:
    """Each file that speaks, a text of it, and the folders in which what it speaks of may lie."""
    for page in PAGES:
        heading = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            heading = line if line.startswith("#") else heading
            yield page, line, [*HOMES, *(home / name for name in FOLDER.findall(heading + line) for home in HOMES)]
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, ast.get_docstring(node) or "", [*HOMES, file.parent]


def lost(text: str, places: Iterable[Path]) -> list[str]:
    """What a text names and is in none of these folders."""
    files = [f for f in FILE.findall(text) if f not in TESTS and not any((place / f).exists() for place in places)]
    names = [n for n in NAME.findall(text) if n.rpartition(".")[2] not in ENDINGS]
    found = [*files, *(n for n in names if not any(reaches(place, n.split(".")) for place in places))]
    return [name for name in found if not name.startswith(NOT_OURS)]


def reaches(folder: Path, words: list[str]) -> bool:
    """Do the words lead from a folder to a package, a module, or a name that a module binds, of a class too?"""
    for count in range(len(words), 0, -1):
        place, rest = folder.joinpath(*words[:count]), words[count:]
        module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if module.exists():
            return not rest or ".".join(rest[:2]) in bound(module)
    return False


@functools.cache
def bound(module: Path) -> set[str]:
    """The names of a module, and those of its classes as `Class.name`."""
    return set(names_of(ast.parse(module.read_text(encoding="utf-8")).body))


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in names_of(node.body))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        else:  # assignments, also below `if` and `try`
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def test_what_is_spoken_of_is_there():
    assert [(str(file.relative_to(ROOT)), name) for file, text, places in spoken() for name in lost(text, places)] == []


@pytest.mark.parametrize(
    "text",
    [
        "`ladder.EXIT`",
        "`saved.missing`",
        "`run.saved.absent`",
        "`supervision.phase.Phase.DANCING`",
        "`somewhere.read(text)`",
        "layout.py",
        "training/none.py",
        "doctor/layout.py",
    ],
)
def test_what_is_not_there_is_seen(text):
    assert len(lost(text, HOMES)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`supervision.ladder.EXIT`, `run.saved.missing`, `supervision.phase.Phase.UPDATE`, `doctor.memory`, `torch.compile`",
        "`training.trainer.GrpoTrainer._generate_single_turn`, `answers.extract(text)`, `run.json`",
        "doctor/memory.py, training/layout.py, grpo_portable/training/layout.py, test_names.py, vllm/platforms/cuda.py",
    ],
)
def test_what_is_there_is_found(text):
    assert lost(text, HOMES) == []
