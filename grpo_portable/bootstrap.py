"""The format bootstrap: a short SFT on a data set's worked answers before GRPO, on the same adapter and the same prompts.

A model that never writes the target format earns no reward, and GRPO cannot learn from groups that are all alike. Loss
is on the answer only, its end token included. GRPO goes on from this adapter, and its KL term, if any, is against it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable import answers, checkpoint, policy
from grpo_portable.data import Question
from grpo_portable.errors import DataError
from grpo_portable.guards import StopSignal, require_finite
from grpo_portable.processes import ALONE, Processes
from grpo_portable.prompts import Fitted, PromptBuilder, completion_text
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Rollout
from grpo_portable.worked import working


@dataclass(frozen=True)
class Rows:
    """Token ids and labels (-100 on the prompt), and how many rows were left out: answer too long, or without working."""

    examples: tuple[dict[str, list[int]], ...]
    over_length: int
    no_working: int = 0


@dataclass(frozen=True)
class Taught:
    """Steps taken of those planned, and the share of the last probe's answers that kept the format (None: not probed)."""

    steps: int
    planned: int
    format_share: float | None


def format_share(
    engine: Rollout, model: Any, prompts: PromptBuilder, asked: Sequence[Sequence[int]], recipe: Recipe
) -> float:
    """The share of answers to the prompts `asked` that keep the format, by the policy as it is now.

    They are drawn as rollouts draw them: a policy whose greedy answers all keep the format may still draw none that does,
    where single tokens of the format have not become likely enough, and GRPO learns from what is drawn.
    """
    from grpo_portable.trainer import rollout_mode, rollout_sampling

    sampling = rollout_sampling(recipe, prompts, f"probe {recipe.seed}")
    with rollout_mode(model):
        engine.sync(model)
        groups = engine.generate(asked, 1, sampling)
    texts = [completion_text(prompts.tokenizer, group[0].token_ids, prompts.stop_ids) for group in groups]
    return sum(answers.has_marker(text, recipe.answer_style) for text in texts) / len(texts)


def probe_prompts(fitted: Fitted, recipe: Recipe) -> list[tuple[int, ...]]:
    """The prompts of the probe: the last `bootstrap_probe` in the order in which `rows` takes them from the front."""
    order = list(range(len(fitted.questions)))
    random.Random(f"bootstrap {recipe.seed}").shuffle(order)
    return [fitted.prompts[i] for i in order[-recipe.bootstrap_probe :]]


def rows(questions: Sequence[Question], prompts: PromptBuilder, recipe: Recipe) -> Rows:
    """The bootstrap's examples, at most `bootstrap_limit`, drawn by seed. DataError when none is short enough.

    An answer longer than `max_completion_tokens` is left out, since the model would learn to be cut off, and so is one without
    working, since it would learn to guess.
    """
    order = list(questions)
    random.Random(f"bootstrap {recipe.seed}").shuffle(order)
    examples: list[dict[str, list[int]]] = []
    over = bare = 0
    for question in order:
        if recipe.bootstrap_limit and len(examples) == recipe.bootstrap_limit:
            break
        if not working(question):
            bare += 1
            continue
        target = prompts.target_ids(question)
        if len(target) > recipe.max_completion_tokens:
            over += 1
            continue
        prompt = prompts.ids(question.question)
        examples.append({"input_ids": [*prompt, *target], "labels": [-100] * len(prompt) + list(target)})
    if not examples and bare:
        raise DataError(
            "the bootstrap has nothing to learn from",
            because=f"{bare} of the {len(order)} answers have no working, only an answer",
            help="name a set with worked answers: bootstrap_data: openai/gsm8k, or set bootstrap_epochs to 0",
        )
    if not examples:
        raise DataError(
            f"all {over} worked answers are longer than max_completion_tokens {recipe.max_completion_tokens}",
            help="set max_completion_tokens higher, or bootstrap_epochs to 0",
        )
    return Rows(tuple(examples), over, bare)


def bootstrap(
    model: Any,
    prompts: PromptBuilder,
    examples: Sequence[dict[str, list[int]]],
    recipe: Recipe,
    *,
    output_dir: Path,
    dtype: str,
    cpu: bool,
    checkpoints: Path,
    saved: checkpoint.Checkpoint | None = None,
    on_step: Callable[[int, int, dict[str, float]], None] = lambda step, steps, logs: None,
    probe: Callable[[int], float] | None = None,
    processes: Processes = ALONE,
    stop: StopSignal | None = None,
) -> Taught:
    """Train `model`'s adapter in place by TRL's SFTTrainer, on from `saved` if there is one. `on_step` hears step, steps, loss.

    `probe(step)` gives the share of answers that keep the format; once that is `bootstrap_format_share` the stage ends, at
    once when it is so from the start. Whatever ends it early, the steps made are saved in the folder `checkpoints`. Several
    `processes` share each batch evenly, and end together when one of them was asked to `stop`.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from grpo_portable.arguments import optimizer
    from grpo_portable.batches import ShuffledSteps
    from grpo_portable.layout import PaddedRight
    from grpo_portable.quick_updates import QuickUpdates
    from grpo_portable.saving import Saving, UpdateMark

    class Quiet(QuickUpdates, Saving, SFTTrainer):
        own_layers = recipe.backend == "unsloth"

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            """Steps as random as the default's; within one, micro-batches of like length."""
            lengths = [len(example["input_ids"]) for example in examples]
            return ShuffledSteps(lengths, batch, recipe.seed)  # `batch` is of all processes

        def compute_loss(self, model: Any, *args: Any, **named: Any) -> Any:
            return super().compute_loss(PaddedRight(model), *args, **named)

        def _send_telemetry(self) -> None:
            """TRL reports each run to the hub; this project reports nothing."""

    class Listener(TrainerCallback):
        share: float | None = None

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                on_step(state.global_step, state.max_steps, logs)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if probe is not None and state.global_step % recipe.bootstrap_probe_every == 0:
                self.share = probe(state.global_step)
                control.should_training_stop |= self.share >= recipe.bootstrap_format_share
            control.should_save |= trainer.overdue()
            if stop is not None and processes.count > 1 and processes.any(stop.wanted):
                stop.wanted = control.should_save = control.should_training_stop = True  # in all, after the same step

    batch = min(recipe.bootstrap_batch, len(examples))
    batch = max(processes.count, batch - batch % processes.count)  # the same number of rows in each process
    mine = batch // processes.count
    micro_batch = max(d for d in range(1, min(int(recipe.micro_batch), mine) + 1) if mine % d == 0)
    steps = max(1, math.ceil(recipe.bootstrap_epochs * len(examples) / batch))
    arguments = SFTConfig(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=mine // micro_batch,
        learning_rate=recipe.bootstrap_learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(steps // 10, 20),
        weight_decay=0.01,
        max_grad_norm=recipe.max_grad_norm,
        optim=optimizer(recipe, dtype=dtype, cpu=cpu),
        seed=recipe.seed,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        use_cpu=cpu,
        ddp_find_unused_parameters=False,
        gradient_checkpointing=recipe.gradient_checkpointing is True,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recipe.gradient_checkpointing is True else None,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    listener = Listener()
    if saved is None and probe is not None and (share := probe(0)) >= recipe.bootstrap_format_share:
        return Taught(0, steps, share)
    with policy.adapter_untouched(model):
        trainer = Quiet(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(list(examples)),
            processing_class=prompts.tokenizer,
            callbacks=[listener],
        )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(UpdateMark(trainer))
    trainer.checkpoints = checkpoints
    together = stop.deferred() if stop is not None and processes.count > 1 else contextlib.nullcontext()
    try:
        with together:
            if saved is None:
                trainer.train()
            elif saved.step < steps:
                trainer.go_on(saved)
            else:
                trainer.restore(saved)
        if stop is not None and processes.count > 1 and stop.wanted and trainer.state.global_step < steps:
            raise KeyboardInterrupt
    except BaseException:  # an error or a stop: what was taught so far is kept
        with contextlib.suppress(Exception):  # a card that failed may not give its weights; its error is the news
            trainer.save_if_whole()
        raise
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    model.eval()
    require_finite(policy.trainable(model).items(), "the bootstrapped adapter")
    return Taught(trainer.state.global_step, steps, listener.share)
