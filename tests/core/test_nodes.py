"""Several machines: what is written for accelerate and Slurm, read back by accelerate's own loader and by bash."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from machine_cases import CU130, OK, card, failed, machine, torch

from grpo_portable import job, nodes
from grpo_portable.errors import PathClosed, UsageError
from grpo_portable.run import open_run

TWO = nodes.Cluster(nodes=2, gpus=4, hours=3)


def facts(tmp_path: Path, count: int) -> str:
    file = tmp_path / f"facts-{count}.json"
    here = machine(
        *[card("NVIDIA L4", "8.9", 22.0)] * count, **torch("2.13.0+cu130", CU130, OK if count else failed("no GPU"))
    )
    file.write_text(json.dumps(here))
    return str(file)


def launched(tmp_path: Path, **changes: Any) -> str:
    asked: dict[str, Any] = {"count": 2, "gpus": None, "overrides": [], "out": tmp_path / "run", "hours": 24}
    asked |= {"facts_file": facts(tmp_path, 4), "only_print": False}
    return job.launch_nodes("gsm8k-qwen3-0.6b", **{**asked, **changes})


def test_accelerate_reads_the_configuration(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / nodes.CONFIG_FILE
    file.write_text(nodes.accelerate_config(TWO))
    read = load_config_from_file(str(file))
    assert (read.num_machines, read.num_processes, read.distributed_type) == (2, 8, "MULTI_GPU")
    assert not read.use_cpu and read.mixed_precision == "no"


def test_bash_reads_the_script_and_it_asks_for_what_it_starts(tmp_path: Path) -> None:
    text = nodes.slurm_script(TWO, "a run's folder")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    for wanted in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--time=3:00:00"):
        assert f"#SBATCH {wanted}\n" in text
    assert shutil.which("bash") and "RUN='a run'" in text  # quoted, whatever the folder is called


def test_both_files_lie_in_a_run_folder_that_is_ready(tmp_path: Path) -> None:
    """8 questions on two nodes of 4: one question and 8 completions a process."""
    told = launched(tmp_path)
    assert "8 processes on 2 nodes, each with 1 of 8 questions a step" in told
    run = open_run(tmp_path / "run")
    recipe = run.recipe()
    assert recipe.prompts_per_step == 8 and 8 % int(recipe.micro_batch) == 0 and int(recipe.rollout_rows) <= 8
    assert "num_processes: 8" in (run.path / nodes.CONFIG_FILE).read_text()
    assert f"sbatch {run.path / nodes.SCRIPT_FILE}" in told


def test_print_writes_nothing(tmp_path: Path) -> None:
    text = launched(tmp_path, only_print=True)
    assert not (tmp_path / "run").exists()
    assert re.search(r"num_machines: 2\nnum_processes: 8", text) and "#SBATCH --nodes=2" in text


@pytest.mark.parametrize(
    ("changes", "told", "help_"),
    [
        ({"count": 3}, "8 questions cannot be shared by 3 nodes", "prompts_per_step=9"),
        ({"count": 4, "gpus": 4}, "8 questions cannot be shared by 16 processes", "prompts_per_step=16"),
        ({"gpus": 8}, "there is no GPU 4", None),
    ],
)
def test_a_step_that_cannot_be_shared(tmp_path: Path, changes: dict[str, Any], told: str, help_: str | None) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        launched(tmp_path, **changes)
    assert help_ is None or help_ in str(caught.value.help)


def test_without_a_gpu_it_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(PathClosed):
        launched(tmp_path, facts_file=facts(tmp_path, 0))
