"""Who may import whom, read from the syntax trees; and what a bare `import grpo_portable` or `--help` brings in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import spent

import grpo_portable

ROOM = Path(grpo_portable.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))
LEVELS = {  # a file may import its own level and those below it
    6: {"cli"},
    7: {"__main__"},
    5: {"launch", "listing", "bench", "bench_step", "bench_side", "bench_checkpoint", "recipe_page", "job"}
    | {"bench_gpus", "bench_rank"},
    4: {"supervise", "planning", "worker", "announce", "settle", "catalogue", "progress"},
    3: {"trainer", "bootstrap", "evaluate", "engines", "record", "failure", "report", "compare", "export"},
}
LEVEL_OF = {name: level for level, names in LEVELS.items() for name in names}
# progress has the one wording of a step, ladder the exit codes: both are records that every level may read
SHARED = {"progress", "ladder", "run", "recipe", "errors"}
NOT_WITHOUT_TRAINING = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy", "matplotlib", "vllm"}


def modules(file: Path, *, top_only: bool = False) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    nodes = ast.walk(tree) if not top_only else (n for n in tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def own(file: Path) -> set[str]:
    """The rooms of grpo_portable a file imports, by their first name."""
    return {m.split(".")[1] for m in modules(file) if m.startswith("grpo_portable.")}


def room_of(file: Path) -> str:
    return file.relative_to(ROOM).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOM)))
def test_imports_point_one_way(file):
    mine = LEVEL_OF.get(room_of(file), 2)
    above = {m for m in own(file) if LEVEL_OF.get(m, 2) > mine and m not in SHARED}
    assert not above, f"{room_of(file)} reaches up to {above}"


@pytest.mark.parametrize("name", ["run", "recipe", "errors", "answers", "numbers", "stats"])
def test_the_lowest_rooms_know_no_other_engine_or_stage(name):
    assert own(ROOM / f"{name}.py") <= {
        "errors",
        "recipe",
        "combinations",
        "run",
        "numbers",
        "phrases",
        "markup",
        "answers",
    }


@pytest.mark.parametrize(
    ("engine", "where"), [("vllm", "rollout/vllm.py"), ("unsloth", "fast.py"), ("triton", "rollout/kernels.py")]
)
def test_an_optional_engine_is_imported_in_one_file(engine, where):
    users = {str(f.relative_to(ROOM)) for f in FILES if any(m.split(".")[0] == engine for m in modules(f))}
    assert users <= {where}


def test_the_doctor_is_never_reached_back_from():
    import doctor

    for file in Path(doctor.__file__).parent.rglob("*.py"):
        assert not any(m.split(".")[0] == "grpo_portable" for m in modules(file)), file


@pytest.mark.parametrize(
    "code",
    [
        "import grpo_portable, doctor",
        "import grpo_portable.cli, grpo_portable.launch",
        "import grpo_portable.recipe, grpo_portable.run, grpo_portable.supervise, grpo_portable.ladder",
        "import grpo_portable.answers, grpo_portable.stats, grpo_portable.scoring, grpo_portable.report",
        "import grpo_portable.rollout.protocol, grpo_portable.rollout.available",
    ],
)
def test_torch_free_rooms_bring_in_nothing_heavy(code):
    code += f"; import sys; print(*sorted({NOT_WITHOUT_TRAINING!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_is_quick():
    command = [sys.executable, "-m", "grpo_portable.cli", "--help"]
    assert 0 < spent.by(lambda: subprocess.run(command, capture_output=True, check=True)) < 1.0
