"""Several machines: the accelerate configuration and the Slurm script of a run, as text. Pure.

One launcher runs on each node and starts one process a GPU; all of them share the run folder, which must lie on a file system
that every node sees. Slurm takes the supervisor's place: a job that was ended is started again and goes on from its files. The
script holds the run's lock, as a supervisor does.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import yaml

PORT = 29500  # of the first node, where the processes find each other
CONFIG_FILE, SCRIPT_FILE = "accelerate.yaml", "run.slurm"


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `gpus` cards each; `hours` is the job's time limit."""

    nodes: int
    gpus: int
    hours: int = 24

    @property
    def processes(self) -> int:
        return self.nodes * self.gpus


def accelerate_config(cluster: Cluster) -> str:
    """YAML for accelerate's --config_file; rank and address of a node are given by the script, since they are its own."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": cluster.nodes,
        "num_processes": cluster.processes,
        "mixed_precision": "no",  # the run's own recipe says which number format is used where
        "dynamo_config": {"dynamo_backend": "NO"},
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "gpu_ids": "all",
    }
    return yaml.safe_dump(config, sort_keys=False)


def slurm_script(cluster: Cluster, run: str, *, name: str = "grpo-portable") -> str:
    """A batch script for `sbatch`: one launcher a node, started by srun, then the report by the first node.

    `run`: the run folder. The job is put back into the queue when a node is lost, and goes on where it was.
    """
    folder = shlex.quote(run)
    return f"""#!/bin/bash
#SBATCH --job-name={_word(name)}
#SBATCH --nodes={cluster.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={cluster.gpus}
#SBATCH --exclusive
#SBATCH --time={cluster.hours}:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output={_word(run.replace("%", "%%"))}/slurm-%j.log
# --signal: two minutes before the end every process is asked to save and go
set -eu
RUN={folder}
export CUDA_DEVICE_ORDER=PCI_BUS_ID TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_USE_FLASHINFER_SAMPLER=0
# where the first network found is not the one between the nodes:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# one at a time in the run folder, also beside `train --resume`; a file system without locks has no such guard
exec 9>>"$RUN/lock"
if flock --nonblock --conflict-exit-code 75 9; then
  echo "Slurm job $SLURM_JOB_ID" >"$RUN/lock"
elif [ $? -eq 75 ]; then
  echo "$RUN is at work already ($(cat "$RUN/lock"))" >&2
  exit 1
fi
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
rm -f "$RUN/failure.json"
srun --kill-on-bad-exit=1 bash -c '
  exec python -m grpo_portable.ranks --config_file "$0/{CONFIG_FILE}" \\
    --machine_rank "$SLURM_NODEID" --main_process_ip "$1" --main_process_port {PORT} \\
    -m grpo_portable.worker "$0"' "$RUN" "$HEAD"
grpo-portable report "$RUN"
"""


def _word(text: str) -> str:
    """The text as one word of an #SBATCH line, which sbatch reads with a shell's backslashes."""
    return re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", text)
