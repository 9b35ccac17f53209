"""Who may import whom, read from the syntax trees; and what a bare `import grpo_portable` or `--help` brings in."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import spent

import doctor
import grpo_portable

ROOM, DOCTOR = Path(grpo_portable.__file__).parent, Path(doctor.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))
NOT_WITHOUT_TRAINING = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy", "matplotlib", "vllm"}


@dataclass(frozen=True)
class Layer:
    """Modules that may import each other, and those of the layers named in `below`; `asks`: rooms of the doctor."""

    modules: str
    below: str = ""
    asks: str = ""


# Lowest first: a layer names only layers above it in this table. A module that is in none, or an import that is not
# named, is a failure; a new one is a decision, and is made here and in ARCHITECTURE.md.
LAYERS = {
    "errors": Layer("errors"),
    "words": Layer("quiet scores scores.verdict"),
    "phase": Layer("supervision supervision.phase"),
    "statistics": Layer("scores.stats scores.windows"),
    "answers": Layer(
        "answers answers.numbers answers.markup answers.phrases answers.extractor answers.symbolic answers.judge",
        "errors",
    ),
    "recipe": Layer("recipe combinations", "errors", "diagnosis"),
    "ladder": Layer("supervision.ladder supervision.ranks_command", "errors phase", asks="diagnosis memory spread"),
    "run": Layer(
        "run run.folder run.forms run.manifest run.saved run.unfinished run.edited run.progress run.pulse run.processes "
        "run.deadline run.stops",
        "errors words phase recipe",
        "privacy",
    ),
    "reach": Layer("reach", "errors", "shape_files"),
    "embedded": Layer("embedded embedded.problems embedded.templates embedded.build", "errors"),
    "data": Layer("data data.sources data.rows data.questions data.sets data.worked", "errors answers recipe embedded"),
    "rewards": Layer(
        "rewards rewards.setting rewards.verifiable rewards.tags rewards.length rewards.custom rewards.faults "
        "rewards.advantages",
        "errors answers",
    ),
    "policy": Layer(
        "models models.policy models.prompts models.pretokenizers models.shard",
        "errors answers recipe run reach embedded data",
    ),
    "protocol": Layer("rollout rollout.protocol rollout.requests rollout.stops", "errors"),
    "portable": Layer(
        "rollout.portable rollout.reference rollout.decoder rollout.schedule rollout.family rollout.forward "
        "rollout.attention rollout.kv rollout.graphs rollout.sampler rollout.fused rollout.trial rollout.kernels "
        "rollout.skinny rollout.weights rollout.delta rollout.fp8 rollout.packed rollout.upload rollout.booking",
        "errors protocol",
    ),
    "paths": Layer("rollout.available rollout.vllm_settings", "errors recipe", "diagnosis memory shapes"),
    "vllm": Layer(
        "rollout.vllm rollout.vllm_adapter rollout.scratch rollout.finished rollout.contained",
        "errors recipe embedded protocol portable paths",
        "shape_files",
    ),
    "server": Layer(
        "rollout.server rollout.served rollout.server_request rollout.server_client",
        "errors recipe run policy protocol vllm",
    ),
    "updates": Layer("updates updates.agreement updates.lora_product updates.few_kernels updates.walks", "portable"),
    "engines": Layer(
        "engines fast supervision.failure",
        "errors phase recipe ladder run policy protocol portable paths vllm server",
        "diagnosis privacy memory shapes",
    ),
    "training": Layer(
        "training training.trainer training.trl_trainer training.arguments training.batches training.layout "
        "training.metrics training.guards training.correction training.checkpoint training.saving training.bootstrap "
        "training.sft training.record training.plateau updates.quick evaluate",
        "errors answers phase recipe ladder run data rewards policy protocol updates engines",
        "memory",
    ),
    "worker": Layer(
        "worker session ranks", "errors words phase recipe ladder run data rewards policy protocol engines training"
    ),
    "report": Layer(
        "scores.scoring report report.page report.engine report.paths report.results report.setting report.training "
        "report.markdown report.charts report.compare report.side_by_side",
        "errors words statistics answers recipe run reach data",
        "diagnosis",
    ),
    "export": Layer(
        "export export.merge export.recheck export.card export.gguf_file export.gguf_tokens",
        "errors words answers recipe run reach data policy protocol portable report",
    ),
    "plan": Layer(
        "plan plan.catalogue plan.planning plan.settle plan.gpus plan.announce plan.listing",
        "errors recipe paths",
        "facts diagnosis readings shapes memory speed speed_cpu spread plan together walls walls_model walls_several render",
    ),
    "preflight": Layer(
        "preflight", "errors recipe run reach data rewards plan", "facts diagnosis walls walls_model walls_stack"
    ),
    "supervisor": Layer("supervision.supervisor", "errors recipe ladder run", "privacy spread"),
    "launch": Layer(
        "launch eval_task cluster cluster.job cluster.nodes",
        "errors recipe run reach data paths report plan preflight supervisor",
        "facts diagnosis plan probes walls_stack",
    ),
    "bench": Layer(
        "bench bench.cli bench.shapes bench.rollout bench.policy bench.step bench.side bench.checkpoint bench.memory "
        "bench.gpus bench.rank bench.child",
        "errors words recipe ladder run embedded rewards policy protocol portable vllm training worker plan launch",
        "diagnosis shapes shape_files memory child probes_host",
    ),
    "cli": Layer("cli __main__ recipe_page", "errors recipe run report export plan launch bench"),
}
EXCEPTIONS = {  # (module, what it may import beside its layer)
    ("combinations", "doctor.walls_model"),  # which models overflow in float16 is one list, known by name alone
    ("rollout.portable", "doctor.probes_host"),  # what is free on a CPU is asked at the moment weights are copied
}
SPANNING = {  # packages whose modules lie in several layers, lowest first; every other package lies in one
    "scores": "words statistics report",
    "supervision": "phase ladder engines supervisor",
    "rollout": "protocol portable paths vllm server",
    "updates": "updates training",
}
LAYER_OF = {module: name for name, layer in LAYERS.items() for module in layer.modules.split()}


def modules(file: Path) -> set[str]:
    """Everything a file imports anywhere, also by a string; `from a import b` as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)}
    return found


def names_in(package: Path) -> set[str]:
    """The modules of a package without its own name: `recipe`, `rollout`, `rollout.vllm`."""
    found = (file.relative_to(package).with_suffix("").parts for file in package.rglob("*.py"))
    return {".".join(parts).removesuffix(".__init__") for parts in found} - {"__init__"}


def imported(file: Path, package: Path) -> set[str]:
    """The modules of a package that a file imports."""
    there, found = names_in(package), set()
    for name in modules(file):
        first, *parts = name.split(".")
        while first == package.name and parts and ".".join(parts) not in there:
            parts.pop()  # a name within a module
        if first == package.name and parts:
            found.add(".".join(parts))
    return found


def not_allowed(module: str, file: Path) -> set[str]:
    """What a file imports and the table does not name for its module: of grpo_portable, and of the doctor."""
    layer = LAYERS[LAYER_OF[module]]
    near = {LAYER_OF[module], *layer.below.split()}
    wrong = {name for name in imported(file, ROOM) if LAYER_OF.get(name) not in near}
    wrong |= {f"doctor.{room}" for room in imported(file, DOCTOR) - set(layer.asks.split())}
    return {name for name in wrong if (module, name) not in EXCEPTIONS}


def file_of(module: str) -> Path:
    path = ROOM.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_module_has_one_layer_and_every_layer_looks_down():
    assert sorted(m for layer in LAYERS.values() for m in layer.modules.split()) == sorted(names_in(ROOM))
    for place, (name, layer) in enumerate(LAYERS.items()):
        assert set(layer.below.split()) <= set(list(LAYERS)[:place]), name
        assert set(layer.asks.split()) <= names_in(DOCTOR), name


def test_a_package_lies_in_one_layer_but_for_those_named():
    layers: dict[str, dict[str, None]] = {}
    for module, layer in LAYER_OF.items():
        layers.setdefault(module.split(".")[0], {})[layer] = None
    assert {package: " ".join(found) for package, found in layers.items() if len(found) > 1} == SPANNING


@pytest.mark.parametrize("module", sorted(LAYER_OF))
def test_imports_point_one_way(module):
    assert not not_allowed(module, file_of(module)), f"not among what the layer `{LAYER_OF[module]}` may import"


def test_the_table_holds_nothing_that_nobody_needs():
    used = {name: set[str]() for name in LAYERS}
    for module, name in LAYER_OF.items():
        used[name] |= {LAYER_OF[m] for m in imported(file_of(module), ROOM)} | imported(file_of(module), DOCTOR)
    for name, layer in LAYERS.items():
        assert {*layer.below.split(), *layer.asks.split()} <= used[name], name
    for module, name in EXCEPTIONS:
        assert name in {f"doctor.{room}" for room in imported(file_of(module), DOCTOR)} | imported(
            file_of(module), ROOM
        )


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("data.questions", "from grpo_portable.models import policy"),
        ("data.questions", "import grpo_portable.training.trl_trainer"),
        ("data.questions", "from grpo_portable.rollout.portable import PortableRollout"),
        ("data.questions", "from grpo_portable.rollout import vllm"),
        ("data.questions", "from doctor.plan import diagnose"),
        ("rewards.length", "from grpo_portable.updates.few_kernels import few_kernels"),
        ("rewards.length", "def late():\n    from doctor import probes"),
        ("launch", "importlib.import_module('grpo_portable.worker')"),
        ("rollout.sampler", "from doctor.memory import GIB"),
        ("supervision.supervisor", "from grpo_portable import launch"),
        ("models.policy", "from grpo_portable.rollout.delta import active"),
        ("report.page", "from grpo_portable.plan.planning import plan"),
    ],
)
def test_an_import_that_is_not_in_the_table_is_seen(module, line, tmp_path):
    file = tmp_path / "module.py"
    file.write_text(line, encoding="utf-8")
    assert len(not_allowed(module, file)) == 1


@pytest.mark.parametrize(
    ("engine", "where"), [("vllm", "rollout/vllm.py"), ("unsloth", "fast.py"), ("triton", "rollout/kernels.py")]
)
def test_an_optional_engine_is_imported_in_one_file(engine, where):
    users = {str(f.relative_to(ROOM)) for f in FILES if any(m.split(".")[0] == engine for m in modules(f))}
    assert users <= {where}


def test_the_doctor_is_never_reached_back_from():
    for file in DOCTOR.rglob("*.py"):
        assert not any(m.split(".")[0] == "grpo_portable" for m in modules(file)), file


@pytest.mark.parametrize(
    "code",
    [
        "import grpo_portable, doctor",
        "import grpo_portable.cli, grpo_portable.launch",
        "import grpo_portable.recipe, grpo_portable.run.folder; from grpo_portable.supervision import ladder, supervisor",
        "import grpo_portable.answers.extractor, grpo_portable.report.page; from grpo_portable.scores import scoring, stats",
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
