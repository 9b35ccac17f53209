"""Several machines: what is written for accelerate and Slurm, read back by accelerate's own loader and by bash."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine_cases import CU130, OK, card, failed, machine, torch

from grpo_portable.cluster import job, nodes
from grpo_portable.errors import PathClosed, RunFolderError, UsageError
from grpo_portable.recipe import Recipe
from grpo_portable.run.folder import RunFolder, create, open_run
from grpo_portable.supervision import supervisor

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


@pytest.mark.parametrize(
    ("run", "name", "log"),
    [
        ("runs/one", "one", "runs/one/slurm-%j.log"),
        ("a run's folder", "my run", "a run's folder/slurm-%j.log"),
        ('with "quotes" #1', "a#b", 'with "quotes" #1/slurm-%j.log'),
        ("100%j", "x", "100%%j/slurm-%j.log"),  # sbatch's own escape
    ],
)
def test_sbatch_reads_whole_names(run: str, name: str, log: str) -> None:
    """It reads an #SBATCH line as a shell reads words."""
    lines = nodes.slurm_script(TWO, run, name=name).splitlines()
    words = [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line[8:], comments=True)]
    assert f"--output={log}" in words and f"--job-name={name}" in words
    assert all(word.startswith("--") for word in words)


@pytest.fixture
def job_of(tmp_path: Path) -> Callable[[RunFolder], subprocess.Popen[str]]:
    """Starts the batch script of a run as Slurm would; its srun writes `begun` and waits for `go`."""
    srun = 'touch "${@: -2:1}/begun"; while ! [ -e "${@: -2:1}/go" ]; do sleep 0.05; done'
    (tmp_path / "bin").mkdir()
    for name, does in {"srun": srun, "scontrol": "echo first", "grpo-portable": "true"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def start(run: RunFolder) -> subprocess.Popen[str]:
        words = ["bash", "-c", nodes.slurm_script(TWO, str(run.path))]
        return subprocess.Popen(words, env=os.environ | slurm, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_a_job_at_work_holds_its_run(job_of: Callable[[RunFolder], subprocess.Popen[str]], tmp_path: Path) -> None:
    run = create(tmp_path / "a run", Recipe())
    job = job_of(run)
    end = time.monotonic() + 30
    while not (run.path / "begun").exists() and time.monotonic() < end:
        time.sleep(0.02)
    with pytest.raises(RunFolderError, match=r"is at work already \(Slurm job 77\)"), supervisor.alone(run):
        pass
    (run.path / "go").touch()
    assert job.wait(30) == 0
    with supervisor.alone(run):
        pass


@pytest.mark.skipif(not shutil.which("flock"), reason="flock is not installed")
def test_a_job_leaves_a_run_at_work_alone(job_of: Callable[[RunFolder], subprocess.Popen[str]], tmp_path: Path) -> None:
    run = create(tmp_path / "run", Recipe())
    (run.path / "failure.json").write_text("{}")
    with supervisor.alone(run):
        job = job_of(run)
        _, said = job.communicate(timeout=30)
    assert job.returncode == 1 and f"is at work already (process {os.getpid()})" in said
    assert (run.path / "failure.json").exists() and not (run.path / "begun").exists()


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
