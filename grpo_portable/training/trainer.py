"""GRPO: TRL's trainer with our rollouts, order of questions, guards, metrics and checkpoints.

TRL owns rewards → advantages → loss → optimizer. This subclass replaces where completions come from
(`_generate_single_turn`), which questions a step sees (a pure function of seed and step, so that a resumed run sees the
same groups), how a step is cut into micro-batches (by length, without the padding of the longest row), and what is
written to disk. Written against TRL 1.15 and 1.16.

Of several processes each takes B/n whole groups; rewards, guards, the wish to stop and metrics are of all of them.

Legend: B prompts a step, G completions a prompt, N = B*G rows, m rows a micro-batch, A = N/m micro-batches, P, T tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from grpo_portable.errors import EngineError
from grpo_portable.models import policy
from grpo_portable.models.prompts import Fitted, PromptBuilder, completion_text
from grpo_portable.models.shard import is_spread
from grpo_portable.recipe import Recipe
from grpo_portable.rewards.advantages import group_advantages, total
from grpo_portable.rewards.faults import FaultCounter, guarded
from grpo_portable.rollout.protocol import Completion, Resting, Rollout, Sampling
from grpo_portable.run.folder import RunFolder, append_line, read_lines
from grpo_portable.run.processes import ALONE, Processes
from grpo_portable.run.progress import summary
from grpo_portable.run.pulse import Tick
from grpo_portable.supervision.phase import Phase
from grpo_portable.training import checkpoint, metrics, record
from grpo_portable.training.batches import Steps, micro_batches, questions_of
from grpo_portable.training.correction import Gap, SamplerCorrection
from grpo_portable.training.guards import NonFiniteGuard, StopSignal, first_not_finite
from grpo_portable.training.plateau import Plateau
from grpo_portable.training.saving import Saving, UpdateMark
from grpo_portable.training.trl_trainer import GRPOTrainer, Silent
from grpo_portable.updates.quick import QuickUpdates


class GrpoTrainer(QuickUpdates, Saving, SamplerCorrection, Silent, GRPOTrainer):
    """Trains `model` in place by `start`; `save_now` writes a checkpoint from which another process can start.

    `correct_sampler`: the engine samples from other weights than the policy's (an FP8 copy, vLLM's own), so the loss is
    weighted by importance ratios between sampler and trainer. KL (beta > 0) is against the adapter as it was given.
    """

    args: GRPOConfig
    optimizer: Any
    lr_scheduler: Any
    _buffered_inputs: Any

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        arguments: GRPOConfig,
        *,
        data: Fitted,
        prompts: PromptBuilder,
        rewards: Sequence[Callable[..., list[float | None]]],
        engine: Rollout,
        run: RunFolder,
        stop: StopSignal,
        correct_sampler: bool = False,
        faults: FaultCounter | None = None,
        processes: Processes = ALONE,
    ) -> None:
        from datasets import Dataset

        self.faults, self.processes = faults or FaultCounter(), processes

        self.recipe, self.engine, self.run, self.stop, self.prompts = recipe, engine, run, stop, prompts
        self.checkpoints, self._tick = run.checkpoints, Tick(run)
        self.own_layers = recipe.backend == "unsloth"
        texts = [prompts.text(q.question) for q in data.questions]
        self._ids_of = dict(zip(texts, data.prompts, strict=True))
        self._rows = [
            {"prompt": text, "gold": q.gold, "question": q.question, "id": q.id}
            for text, q in zip(texts, data.questions, strict=True)
        ]
        with policy.adapter_untouched(model):
            super().__init__(
                model=model,
                args=arguments,
                reward_funcs=[guarded(fn, self.faults.record) for fn in rewards],
                train_dataset=Dataset.from_list(self._rows[:1]),  # only looked at for its type: `Steps` is the data
                processing_class=prompts.tokenizer,
                callbacks=[UpdateMark(self), _StepCallback(self)],
            )
        self.remove_callback(PrinterCallback)
        self.eos_token_ids = list(prompts.stop_ids)
        self.correct_sampler, self.gap = correct_sampler, Gap()
        self.guard = NonFiniteGuard(scaled=arguments.fp16)
        self.plateau = Plateau(bootstrapped=recipe.bootstrap_epochs > 0)
        # TRL's own of a micro-batch: the KL by metrics.jsonl, all of them by a tracker
        self._metrics_are_read = recipe.beta != 0 or bool(recipe.report_to)
        self._meets_in_passes = self._metrics_are_read or is_spread(model)
        self._rollout_in_buffer: int | None = None
        # between the optimizer's step and the end of it, weights and step number do not match
        self._weights_move = False
        self._finished: list[bool] = []
        self._rewards: list[list[float]] = []
        self._line: dict[str, Any] = {}
        self._loss_sum = torch.zeros((), device=self.accelerator.device)
        self._seconds_before, self._began, self._step_began = 0.0, time.perf_counter(), time.perf_counter()

    # --- which questions, which completions

    def get_train_dataloader(self) -> Any:
        return Steps(self._rows_of, self._first_step, self.recipe.steps, self.args.gradient_accumulation_steps)

    _first_step = 0

    def _rows_of(self, step: int) -> list[dict[str, Any]]:
        """This process's rows of the rollout that `step` learns from: B/world questions, each G times in a row."""
        recipe = self.recipe
        rollout = step // recipe.num_iterations
        chosen = questions_of(rollout, count=len(self._rows), per_rollout=recipe.prompts_per_step, seed=recipe.seed)
        local = len(chosen) // self.processes.count
        mine = chosen[self.processes.rank * local :][:local]
        return [self._rows[i] for i in mine for _ in range(recipe.group_size)]

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [list(self._ids_of[text]) for text in prompts], None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sync the engine with the policy and let it write G completions of each prompt; every prompt is given once."""
        step = self.state.global_step
        rollout = step // self.recipe.num_iterations
        self.run.heartbeat(Phase.ROLLOUT, f"rollout of step {step + 1}")
        began = time.perf_counter()
        groups = self._groups(prompt_ids[::num_generations], num_generations, self._sampling(rollout))
        flat = [completion for group in groups for completion in group]
        if len(flat) != len(prompt_ids):
            raise EngineError(
                f"engine {self.engine.name} gave {len(flat)} completions where {len(prompt_ids)} were asked for"
            )
        self._note_rollout(flat, time.perf_counter() - began)
        self.run.heartbeat(Phase.UPDATE, f"update of step {step + 1}")
        end = self.prompts.stop_ids[0]
        return [list(c.token_ids) or [end] for c in flat], [list(c.logprobs) or [0.0] for c in flat]

    def _groups(self, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[Completion]]:
        """`count` completions of each prompt by the policy as it is now.

        A wish to stop ends it with KeyboardInterrupt, in all processes when one has heard it: they meet after their rollouts.
        """
        model = self.model  # what accelerate would find inside its wrapper after a walk through all modules
        groups: list[list[Completion]] = []
        try:
            with rollout_mode(model):
                self.engine.sync(model)  # of several processes all take part in it
                with self.stop.allowed():
                    groups = self.engine.generate(prompts, count, sampling)
                    if isinstance(self.engine, Resting):
                        self.engine.rest()
        except KeyboardInterrupt:
            if self.processes.count == 1:
                raise
        if self.processes.count > 1 and self.processes.any(self.stop.wanted):
            self.stop.wanted = True
            raise KeyboardInterrupt
        return groups

    def _sampling(self, rollout: int) -> Sampling:
        return rollout_sampling(
            self.recipe, self.prompts, f"rollout {self.recipe.seed} {rollout} {self.processes.rank}"
        )

    def _note_rollout(self, rows: Sequence[Completion], seconds: float) -> None:
        """The rollout's part of the metrics line. Entropy is estimated by the mean of -log p of the drawn tokens."""
        self._finished = [row.finish_reason != "length" for row in rows]
        mine = {
            "rows": len(rows),
            "finished": sum(self._finished),
            "tokens": sum(len(row.token_ids) for row in rows),
            "log_probability": sum(math.fsum(row.logprobs) for row in rows),
        }
        parts = self.processes.gather((mine, seconds))
        whole = {name: sum(part[name] for part, _ in parts) for name in mine}
        slowest = max(took for _, took in parts)
        self._line |= {
            "rollout_s": slowest,
            "completion_tokens": whole["tokens"] / whole["rows"],
            "truncated": 1 - whole["finished"] / whole["rows"],
            "entropy": -whole["log_probability"] / max(1, whole["tokens"]),
            "tokens_per_s": whole["tokens"] / max(slowest, 1e-9),
        }

    # --- rewards, advantages, micro-batches

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """(N, number of rewards). A sample for which any reward has no number is left out of its group: its row is NaN."""
        tokenizer, stop_ids = self.prompts.tokenizer, self.prompts.stop_ids
        texts = [completion_text(tokenizer, ids, stop_ids) for ids in completion_ids_list]
        step = self.state.global_step + 1
        self.run.heartbeat(Phase.REWARDS, f"rewards of step {step}")
        rewards = super()._calculate_rewards(inputs, prompts, texts, completion_ids_list)
        for told in self.faults.end_step(len(texts), self.processes.gather):
            self.run.event("reward", f"step {step}: {told}; these completions were left out of their groups", step=step)
        self.run.heartbeat(Phase.UPDATE, f"update of step {step}")
        rewards[rewards.isnan().any(dim=1)] = torch.nan
        self._rewards = rewards.tolist()
        return rewards

    def _exact_advantages(self, local: torch.Tensor) -> torch.Tensor:
        """This process's advantages (N,), without the rounding by which a float32 mean of equal rewards misses them."""
        recipe, group = self.recipe, self.recipe.group_size
        totals = total(list(zip(*self._rewards, strict=True)), recipe.reward_weights or None)
        advantages = group_advantages(totals, group, recipe.scale_rewards)
        groups = [advantages[i : i + group] for i in range(0, len(advantages), group)]
        self._line["zero_spread"] = sum(not any(values) for values in groups) / len(groups)
        mine = advantages[self.processes.rank * len(local) :][: len(local)]
        return torch.tensor(mine, dtype=local.dtype, device=local.device)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        batch["advantages"] = self._exact_advantages(batch["advantages"])
        if self.recipe.mask_truncated:
            # here and not in TRL, which takes a completion that ended at a stop string for a truncated one
            kept = torch.tensor(self._finished, device=batch["completion_mask"].device)
            batch["completion_mask"] = batch["completion_mask"] * kept.unsqueeze(1)
            batch["num_items_in_batch"] = self.accelerator.gather(batch["completion_mask"].sum()).sum()
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        accumulation = self.args.gradient_accumulation_steps
        rollout = self._step // (accumulation * self.num_iterations)
        if self._rollout_in_buffer != rollout:
            batch = self._generate_and_score_completions(generation_batch)
            # bnpo is averaged within a micro-batch, so its composition matters there and nowhere else
            by_length = self.recipe.loss != "bnpo"
            self._buffered_inputs = micro_batches(batch, accumulation, by_length=by_length)
            self._rollout_in_buffer = rollout
        return self._buffered_inputs[self._step % accumulation]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()  # whatever its own flag says: a wrapper of several processes is in training when it is made
        self._tick()
        micro_batch = self._prepare_inputs(inputs)
        idle = self._is_idle(micro_batch)
        with self._unheard():
            loss = self._idle_step() if idle else super().training_step(model, inputs, num_items_in_batch)
        self._loss_sum += loss
        return loss

    def _is_idle(self, micro_batch: Mapping[str, Any]) -> bool:
        """Whether loss and gradient are exactly zero, no row has an advantage (its group's rewards are all the same), and no
        other process waits for this pass.
        """
        if self.processes.count > 1 and (self._meets_in_passes or self.accelerator.sync_gradients):
            return False
        return self.beta == 0 and not bool(micro_batch["advantages"].any())

    @contextlib.contextmanager
    def _unheard(self) -> Iterator[None]:
        """Inside, what TRL gathers of all processes is of this one, if nobody reads it: its own metrics of a micro-batch.

        For them all would wait for the slowest half a dozen times in each micro-batch; so they meet once a step.
        """
        if self.processes.count == 1 or self._metrics_are_read:
            yield
            return
        own: Any = self.accelerator
        own.gather, own.reduce = (lambda tensor: tensor), (lambda tensor, **_: tensor)
        try:
            yield
        finally:
            del own.gather, own.reduce

    def _idle_step(self) -> torch.Tensor:
        """What a forward and backward pass over idle rows would do, without them."""
        for parameter in self.trained().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._step += 1
        return torch.zeros((), device=self.accelerator.device)

    # --- guards

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """The gradient's norm before clipping. A gradient that is not finite is dropped, so that no weight moves."""
        recipe = self.recipe
        self.gap = Gap.of_all(self.processes.gather(self.take_gap()))
        if (recipe.top_p, recipe.top_k, recipe.min_p, recipe.repetition_penalty) == (1, 0, 0, 1):
            # else the sampler's distribution is another one on purpose
            self.gap.require_close(self.engine.name, self.state.global_step + 1)
        self.accelerator.unscale_gradients()
        named = list(self.trained().items())
        gradients = [p.grad for _, p in named if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        bad = None
        if not bool(torch.isfinite(norm)):
            bad = f"the gradient of {first_not_finite((n, p.grad) for n, p in named) or 'all weights together'}"
        elif not bool(torch.isfinite(self._loss_sum)):
            bad = "the loss"
        bad = next((told for told in self.processes.gather(bad) if told), None)
        if bad is not None and self.guard.in_a_row == 0 and self.accelerator.scaler is None:
            self.save_if_whole()  # should more follow, a lower path goes on from the last good step
        self._line["skipped"] = self.guard.see(bad, self.state.global_step + 1)
        if bad is not None:
            self._drop_update(bad)
        elif self.args.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_([p for _, p in named], self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _drop_update(self, bad: str) -> None:
        step = self.state.global_step + 1
        if self.accelerator.scaler is None:  # the scaler of float16 drops the update by itself and must see why
            for parameter in self.trained().values():
                parameter.grad = None
        if self.processes.is_main:
            self.run.event("nonfinite", f"the update of step {step} was skipped: {bad} is not finite", step=step)

    # --- metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self._loss_sum = self.accelerator.gather(self._loss_sum.unsqueeze(0)).mean()
            memory = max(self.processes.gather(metrics.memory_gib()))
            if self.processes.is_main:
                self._write_line(logs, memory)
            self._line = {}
            self._loss_sum = torch.zeros_like(self._loss_sum)
        super().log(logs, start_time)
        self.state.log_history.clear()  # metrics.jsonl is the history; this copy would grow in every checkpoint

    def _write_line(self, logs: Mapping[str, Any], memory: float) -> None:
        line = metrics.line(
            self.state.global_step,
            seconds=self.seconds(),
            step_s=time.perf_counter() - self._step_began,
            loss=float(self._loss_sum),
            own=self._line | self.gap.metrics(),
            logged=logs,
            trl=self._metrics["train"],
            reward_names=self.reward_func_names,
            memory=memory,
        )
        append_line(self.run.metrics_file, line)
        if told := self.plateau.see(line):
            self.run.event("plateau", told, step=line["step"])
        print(summary(line, self.recipe.steps), flush=True)

    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self._seconds_before + time.perf_counter() - self._began

    # --- checkpoints

    def start(self, saved: checkpoint.Checkpoint | None = None) -> None:
        """Train from the beginning, or from a checkpoint: same weights, optimizer, schedule, generators, questions to come.

        Metrics of steps that will be made again are dropped from metrics.jsonl.
        """
        if self.processes.is_main:
            metrics.cut(self.run, saved.step if saved else 0)
            self._see_lines(range(1, saved.step + 1 if saved else 1))
        if saved is None:
            self.train()
            return
        self._first_step = saved.step
        self._seconds_before = saved.state()["seconds"]
        if saved.step >= self.recipe.steps:  # the end was reached, only the adapter was not saved
            self.restore(saved)
        else:
            self.go_on(saved)

    def _see_lines(self, steps: range) -> None:
        """Take the lines of the steps made so far into account, and tell of those that something else has damaged."""
        lines = list(read_lines(self.run.metrics_file))
        for line in lines:
            self.plateau.see(line)
        there = {line.get("step") for line in lines}
        if gone := [step for step in steps if step not in there]:
            record.tell_once(
                self.run, "resume", f"metrics.jsonl has lost the lines of {len(gone)} steps, from step {gone[0]} on"
            )

    def _settle_lines(self) -> None:
        if self.run.metrics_file.exists():
            with self.run.metrics_file.open("rb") as written:
                os.fsync(written.fileno())

    def _note_replaced(self, replaced: dict[str, int]) -> None:
        if self.processes.is_main:
            self.run.update_json("run.json", few_kernels=replaced)

    def _own_state(self) -> dict[str, Any]:
        return {"seconds": self.seconds()}

    def _may_go_on_from(self, step: int) -> bool:
        return step % self.recipe.num_iterations == 0  # a half-used rollout is lost


class _StepCallback(TrainerCallback):
    """When to save: every `save_every` steps, after minutes, and at a wish to stop; but only between two rollouts: a half-used
    one is lost.
    """

    def __init__(self, trainer: GrpoTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._began = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._step_began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        recipe, stop = self.trainer.recipe, self.trainer.stop
        stopping = self.trainer.processes.any(stop.wanted)
        stop.wanted = stop.wanted or stopping
        good = self.trainer.guard.in_a_row == 0  # a skipped update is tried again on a lower path
        between = state.global_step % recipe.num_iterations == 0
        since = state.global_step // recipe.num_iterations % max(1, recipe.save_every // recipe.num_iterations)
        last = state.global_step >= recipe.steps
        due = since == 0 or self.trainer.overdue()
        if last or (between and (stopping or (due and good))):
            control.should_save = True
        if stopping:
            control.should_training_stop = True


def rollout_sampling(recipe: Recipe, prompts: PromptBuilder, seed: str) -> Sampling:
    """How completions are drawn in rollouts, and wherever answers must be what rollouts would give; `seed` any text."""
    return Sampling(
        max_tokens=recipe.max_completion_tokens,
        temperature=recipe.temperature,
        top_p=recipe.top_p,
        top_k=recipe.top_k,
        min_p=recipe.min_p,
        repetition_penalty=recipe.repetition_penalty,
        stop_ids=prompts.stop_ids,
        stop_strings=recipe.stop,
        seed=random.Random(seed).getrandbits(31),
    )


@contextlib.contextmanager
def rollout_mode(model: Any) -> Iterator[None]:
    """Inside, no gradients and no dropout, adapters' included; after it the model trains or not as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
