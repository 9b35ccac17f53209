"""The command `grpo-portable bench`: which measurement its words ask for. Each reads its own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Measure a `rollout`, a `step`, or either on several GPUs (`--gpus`); the exit code."""
    if any(word.startswith("--gpus") for word in arguments):
        from grpo_portable.bench import gpus

        return gpus.main(arguments)
    parser = argparse.ArgumentParser(
        prog="grpo-portable bench", description="Rollout engines, or a whole step, side by side."
    )
    parser.add_argument(
        "what",
        choices=["rollout", "step"],
        help="each says more with `--help`; `--gpus 0,1 --help` of several GPUs",
    )
    if parser.parse_args(arguments[:1]).what == "step":
        from grpo_portable.bench import step

        return step.main(arguments[1:])
    from grpo_portable.bench import rollout

    return rollout.main(arguments[1:])
