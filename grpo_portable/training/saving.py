"""Checkpoints of a transformers Trainer in this project's form: when one may be written, and how training goes on from it.

Between the optimizer's step and the end of a step, weights and step number do not match; a checkpoint then would be of no step.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grpo_portable.models import policy
from grpo_portable.training import checkpoint
from grpo_portable.training.guards import require_finite

OVERDUE_S = 300.0  # what a killed worker may cost at most, where a step takes less


class Saving:
    """To be put before a Trainer's class. `checkpoints` is the folder of its checkpoints."""

    checkpoints: Path
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    _resumed: checkpoint.Checkpoint | None = None
    _weights_move = False
    _saved_at = 0.0

    def overdue(self) -> bool:
        """Whether the last checkpoint is so old that one should be written whatever the step."""
        return time.monotonic() - self._saved_at > OVERDUE_S

    def save_now(self) -> checkpoint.Checkpoint:
        """Write a checkpoint of the step that was finished last. NonFiniteError rather than one with a bad number in it."""
        weights = {name: p.detach() for name, p in policy.trainable(self.model).items()}
        require_finite(weights.items(), f"the checkpoint of step {self.state.global_step}")
        scaler = self.accelerator.scaler
        self._saved_at = time.monotonic()
        self._settle_lines()
        return checkpoint.write(
            self.checkpoints,
            self.state.global_step,
            weights=weights,
            optimizer=self.optimizer.state_dict(),
            state={
                "schedule": self.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                **self._own_state(),
            },
            trainer_state=json.dumps(dataclasses.asdict(self.state)),
        )

    def save_if_whole(self) -> None:
        """A checkpoint of the last finished step, unless there is one, its update was cut in two or it is no place to go on."""
        step = self.state.global_step
        if not self.accelerator.is_main_process or self._weights_move or not step or not self._may_go_on_from(step):
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # where memory ran out, looking at the weights must not do so again
        newest = checkpoint.newest(self.checkpoints)
        if newest is None or newest.step < step:
            self.save_now()

    def go_on(self, saved: checkpoint.Checkpoint) -> None:
        """Train on from a checkpoint: same weights, optimizer, schedule, generators."""
        self._resumed = saved
        self.train(resume_from_checkpoint=str(saved.folder))  # type: ignore[attr-defined]

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Put the weights and the step number of a checkpoint back."""
        self._resumed = saved
        self._load_from_checkpoint(str(saved.folder))
        self.state.global_step = saved.step

    def _settle_lines(self) -> None:
        """Bring to the disk what a subclass writes step by step: a checkpoint counts on it, also after a power failure."""

    def _own_state(self) -> dict[str, Any]:
        """Numbers of a subclass that belong into state.json."""
        return {}

    def _may_go_on_from(self, step: int) -> bool:
        return True

    # --- what transformers calls

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.accelerator.is_main_process:
            self.save_now()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        assert self._resumed is not None  # only `go_on` and `restore` come this way
        saved = self._resumed.weights()
        for name, parameter in policy.trainable(self.model).items():
            parameter.data.copy_(saved[name])

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if self._resumed is not None:
            self.optimizer.load_state_dict(checkpoint.optimizer_state(self._resumed))
            self.lr_scheduler.load_state_dict(self._resumed.state()["schedule"])

    def _load_scaler(self, checkpoint_folder: str | None) -> None:
        if self._resumed is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self._resumed.state()["scaler"])

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if self._resumed is not None:
            checkpoint.restore_random_states(self._resumed)


class UpdateMark(TrainerCallback):
    """Tells a `Saving` trainer when training begins, and while an update is being made."""

    def __init__(self, trainer: Saving) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._saved_at = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._weights_move = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._weights_move = False
