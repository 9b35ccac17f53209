"""TRL's SFTTrainer for the bootstrap, with our order of rows, probes of the format, stops and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.run.processes import ALONE, Processes
from grpo_portable.training import checkpoint
from grpo_portable.training.batches import ShuffledSteps
from grpo_portable.training.bootstrap import Taught
from grpo_portable.training.guards import StopSignal, require_finite
from grpo_portable.training.layout import PaddedRight
from grpo_portable.training.saving import Saving, UpdateMark
from grpo_portable.training.trl_trainer import Silent
from grpo_portable.updates.quick import QuickUpdates


class SftTrainer(QuickUpdates, Saving, Silent, SFTTrainer):
    """Teaches `examples` to `model`'s adapter in place by `teach`. `on_step` hears step, steps and what TRL logs.

    `probe(step)` gives the share of answers that keep the format. Several `processes` share each batch evenly, and end together
    when one of them was asked to `stop`.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        arguments: SFTConfig,
        *,
        examples: Sequence[dict[str, list[int]]],
        tokenizer: Any,
        checkpoints: Path,
        stop: StopSignal,
        on_step: Callable[[int, int, dict[str, float]], None] = lambda step, steps, logs: None,
        probe: Callable[[int], float] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.recipe, self.checkpoints, self.stop, self.processes = recipe, checkpoints, stop, processes
        self.own_layers = recipe.backend == "unsloth"
        self.on_step, self.probe = on_step, probe
        self.share: float | None = None  # the last probe's
        self._lengths = [len(example["input_ids"]) for example in examples]
        with policy.adapter_untouched(model):
            super().__init__(
                model=model,
                args=arguments,
                train_dataset=Dataset.from_list(list(examples)),
                processing_class=tokenizer,
                callbacks=[_StepCallback(self), UpdateMark(self)],  # a step is whole once its probe was made
            )
        self.remove_callback(PrinterCallback)

    def teach(self, saved: checkpoint.Checkpoint | None = None) -> Taught:
        """Train from the beginning or on from `saved`, until all steps are made or the format is kept, perhaps from the start.

        Whatever ends it early, the steps made are saved. KeyboardInterrupt when one of several processes was asked to stop.
        """
        steps = self.args.max_steps
        if saved is None and self.keeps_format(0):
            return Taught(0, steps, self.share)
        together = self.stop.deferred() if self.processes.count > 1 else contextlib.nullcontext()
        try:
            with together:
                self._train_from(saved)
            if self.processes.count > 1 and self.stop.wanted and self.state.global_step < steps:
                raise KeyboardInterrupt
        except BaseException:  # an error or a stop: what was taught so far is kept
            with contextlib.suppress(Exception):  # a card that failed may not give its weights; its error is the news
                self.save_if_whole()
            raise
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.model.eval()
        require_finite(policy.trainable(self.model).items(), "the bootstrapped adapter")
        return Taught(self.state.global_step, steps, self.share)

    def _train_from(self, saved: checkpoint.Checkpoint | None) -> None:
        if saved is None:
            self.train()
        elif saved.step < self.args.max_steps:
            self.go_on(saved)
        else:
            self.restore(saved)

    def keeps_format(self, step: int) -> bool:
        """Whether the probe, if there is one, finds enough answers that keep the format."""
        if self.probe is None:
            return False
        self.share = share = self.probe(step)
        return share >= self.recipe.bootstrap_format_share

    # --- what TRL and transformers call

    def _get_train_sampler(self, train_dataset: Any = None) -> ShuffledSteps:
        """Steps as random as the default's; within one, micro-batches of like length."""
        mine = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return ShuffledSteps(self._lengths, mine * self.processes.count, self.recipe.seed)

    def compute_loss(self, model: Any, *args: Any, **named: Any) -> Any:
        return super().compute_loss(PaddedRight(model), *args, **named)


class _StepCallback(TrainerCallback):
    """After a step: tell of it, probe when it is time, save when that is overdue, and stop when any process was asked to."""

    def __init__(self, trainer: SftTrainer) -> None:
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.trainer.on_step(state.global_step, state.max_steps, logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, stop, processes = self.trainer, self.trainer.stop, self.trainer.processes
        if state.global_step % trainer.recipe.bootstrap_probe_every == 0:
            control.should_training_stop |= trainer.keeps_format(state.global_step)
        control.should_save |= trainer.overdue()
        if processes.count > 1 and processes.any(stop.wanted):
            stop.wanted = control.should_save = control.should_training_stop = True  # in all, after the same step
