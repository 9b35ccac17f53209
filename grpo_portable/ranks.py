"""Starts a worker through accelerate: `python -m grpo_portable.ranks <the words of accelerate launch>`.

One process runs in this interpreter, in the environment accelerate builds for it: its own launcher would import torch only
to start a second interpreter that imports it again. Several are started and watched by accelerate's launcher (torch's elastic
agent), which ends the others when one dies: SIGTERM first, SIGKILL half a minute later.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Run the module that the words name, in as many processes as they say; returns when all have ended.

    Several processes: 1 when any of them failed, after a line about the first to fail, which
    `supervision.ladder.classify` reads.
    """
    words = settled(arguments)
    if words.num_processes == 1 and words.num_machines == 1:
        return _here(words)
    return _several(words)


def settled(arguments: Sequence[str]) -> Any:
    """The words as accelerate's launcher reads them, and its defaults for what they leave out.

    What `accelerate config` keeps in the user's home for other programs is none of these: it would choose other GPUs and wrap
    the model. A file that the words name (`--config_file`, of a job on several machines) counts.
    """
    from accelerate.commands import launch

    launch.default_config_file = ""
    words = launch.launch_command_parser().parse_args(list(arguments))
    return launch._validate_launch_command(words)[0]


def _here(words: Any) -> int:
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    _, environment = prepare_simple_launcher_cmd_env(words)
    os.environ.update(environment)
    sys.argv = [words.training_script, *words.training_script_args]
    runpy.run_module(words.training_script, run_name="__main__", alter_sys=True)
    return 0


def _several(words: Any) -> int:
    from accelerate.commands.launch import multi_gpu_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if words.cpu:  # accelerate would start one process and leave the others to MPI
        os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        multi_gpu_launcher(words)
    except ChildFailedError as error:
        print(_told(error.failures), file=sys.stderr, flush=True)
        return 1
    return 0


def _told(failures: Any) -> str:
    """How the first process to fail ended. Those the agent ended after it died of SIGTERM, or later of SIGKILL."""
    ended = sorted(failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp))
    rank, failure = ended[0]
    code = failure.exitcode
    how = f"died with {signal.Signals(-code)!r}" if code < 0 else f"returned non-zero exit status {code}"
    return f"rank {rank} {how}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
