"""From a command to a job on several nodes: the run's settled recipe, its accelerate configuration and its Slurm script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_portable import launch
from grpo_portable.cluster import nodes
from grpo_portable.errors import PathClosed, UsageError
from grpo_portable.plan import catalogue
from grpo_portable.recipe import load
from grpo_portable.run.folder import RUNS, write_atomically


def launch_nodes(
    name: str,
    *,
    count: int,
    gpus: int | None,
    overrides: Sequence[str],
    out: Path | None,
    facts_file: str | None,
    hours: int,
    only_print: bool,
) -> str:
    """What to do next, after the run folder with both files was written; with `only_print` their text, and nothing is written.

    `gpus` a node, by default as many as the doctor takes together on this machine, or on that of `facts_file`. UsageError for
    a step that so many processes cannot share, PathClosed where no GPU path is open.
    """
    questions = load(catalogue.find(name), overrides).prompts_per_step
    if questions % count:
        raise UsageError(_cannot_share(questions, count, "nodes"), help=_larger(questions, count))
    share = [*overrides, f"prompts_per_step={questions // count}"]
    prepared = launch.prepare(name, auto=True, overrides=share, facts_file=facts_file, gpus=_first(gpus))
    taken = prepared.diagnosis.plan.gpus
    if prepared.settled.recipe.path == "cpu" or not taken:
        raise PathClosed(
            "there is no GPU to plan for here",
            help="save a node's facts there (`grpo-doctor --save-facts`) and give --facts",
        )
    if gpus is not None and len(taken) < gpus:
        whole = count * gpus
        raise UsageError(_cannot_share(questions, whole, "processes"), help=_larger(questions, whole))
    cluster = nodes.Cluster(count, len(taken), hours)
    recipe = replace(prepared.settled.recipe, prompts_per_step=questions)
    prepared = replace(prepared, settled=replace(prepared.settled, recipe=recipe))
    if only_print:
        place = str(out or RUNS / prepared.name)
        script = nodes.slurm_script(cluster, place, name=prepared.name)
        return f"# {place}/{nodes.CONFIG_FILE}\n{nodes.accelerate_config(cluster)}\n# {place}/{nodes.SCRIPT_FILE}\n{script}"
    folder = launch.new_folder(prepared, out)
    write_atomically(folder.path / nodes.CONFIG_FILE, nodes.accelerate_config(cluster))
    script = nodes.slurm_script(cluster, str(folder.path), name=prepared.name)
    write_atomically(folder.path / nodes.SCRIPT_FILE, script)
    each = questions // cluster.processes
    return (
        f"run folder: {folder.path}\n{cluster.processes} processes on {count} nodes, each with {each} of {questions} questions "
        f"a step; start it with: sbatch {folder.path / nodes.SCRIPT_FILE}"
    )


def _first(gpus: int | None) -> tuple[int, ...] | None:
    return None if gpus is None else tuple(range(gpus))


def _cannot_share(questions: int, whole: int, what: str) -> str:
    return f"a step of {questions} questions cannot be shared by {whole} {what} evenly"


def _larger(questions: int, whole: int) -> str:
    return f"--set prompts_per_step={-(-questions // whole) * whole}"
