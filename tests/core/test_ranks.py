"""The launcher's words: what a rung says, and nothing the user configured for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_portable import ranks
from grpo_portable.cluster import nodes
from grpo_portable.supervision import ranks_command
from grpo_portable.supervision.ladder import Rung

OTHERS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "gpu_ids": "0,1",
    "use_cpu": False,
}


@pytest.mark.parametrize("gpus", [(5,), (5, 6)])
def test_what_accelerate_was_configured_for_elsewhere_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...]
) -> None:
    from accelerate.commands import launch

    file = tmp_path / "default_config.yaml"
    file.write_text(yaml.safe_dump(OTHERS))
    monkeypatch.setattr(launch, "default_config_file", str(file))
    command = ranks_command.of(Rung("bf16-hf", 1, 1, gpus=gpus, processes=len(gpus)), ["some.module", "its-word"])
    words = ranks.settled(command[command.index("grpo_portable.ranks") + 1 :])
    assert (words.num_processes, words.mixed_precision, words.training_script) == (len(gpus), "no", "some.module")
    assert words.gpu_ids is None and not words.use_fsdp and not words.use_deepspeed


def test_the_configuration_of_a_job_counts(tmp_path: Path) -> None:
    file = tmp_path / nodes.CONFIG_FILE
    file.write_text(nodes.accelerate_config(nodes.Cluster(nodes=2, gpus=4)))
    words = ranks.settled(["--config_file", str(file), "--machine_rank", "1", "-m", "some.module"])
    assert (words.num_machines, words.num_processes, words.gpu_ids) == (2, 8, "all")
