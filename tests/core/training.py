"""Makes a GrpoTrainer over a tiny random model, for the tests of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny

from grpo_portable.data.questions import Question
from grpo_portable.models import policy, prompts
from grpo_portable.recipe import Recipe
from grpo_portable.run import folder as run
from grpo_portable.training import checkpoint
from grpo_portable.training.guards import StopSignal

RECIPE = replace(
    Recipe(),
    model="tiny",
    path="cpu",
    steps=4,
    prompts_per_step=3,
    group_size=4,
    micro_batch=4,
    rollout_rows=64,
    max_completion_tokens=10,
    learning_rate=1e-2,
    warmup_steps=1,
    lora_rank=4,
    lora_alpha=8.0,
    gradient_checkpointing=False,
    save_every=2,
    seed=5,
)
QUESTIONS = tuple(
    Question(f"train-{i}", row["question"][: 5 + i % 4], row["answer"].rsplit(" ", 1)[-1], row["answer"])
    for i, row in enumerate(tiny.rows(10))
)


def make(
    folder: Path,
    *,
    rewards: Sequence[Callable[..., list]] = (tiny.digits,),
    model: Any = None,
    engine: Any = None,
    stop: StopSignal | None = None,
    adapter: bool = True,
    faults: Any = None,
    processes: Any = None,
    shard: bool = False,
    **changes: Any,
) -> Any:
    """A trainer in `folder`, ready to train; `changes` are fields of the recipe."""
    from transformers import set_seed

    from grpo_portable.rollout import portable
    from grpo_portable.run import processes as meeting
    from grpo_portable.training import trainer
    from grpo_portable.training.arguments import training_arguments

    recipe = replace(RECIPE, **changes)
    run_folder = run.RunFolder(folder) if (folder / "recipe.yaml").exists() else run.create(folder, recipe)
    base = model if model is not None else tiny.model()
    set_seed(recipe.seed)
    model = policy.add_adapter(base, recipe) if adapter else base
    if shard:
        import torch

        from grpo_portable.models import shard as room

        room.spread(model, torch.device("cpu"))
    builder = prompts.builder(tiny.tokenizer(), recipe, generation_stop_ids=prompts.generation_stop_ids(base))
    return trainer.GrpoTrainer(
        model,
        recipe,
        training_arguments(
            recipe, output_dir=folder, dtype="float32", cpu=True, world=processes.count if processes else 1
        ),
        data=prompts.fit(QUESTIONS, builder, max_tokens=recipe.max_prompt_tokens),
        prompts=builder,
        rewards=rewards,
        engine=engine or portable.make(model, builder.tokenizer, rows=int(recipe.rollout_rows)),
        run=run_folder,
        stop=stop or StopSignal(),
        faults=faults,
        processes=processes or meeting.ALONE,
    )


def resume(folder: Path, **options: Any) -> Any:
    """A new trainer in the same folder, trained on from the newest checkpoint."""
    made = make(folder, **options)
    saved = checkpoint.newest(made.run.checkpoints)
    assert saved is not None
    made.start(saved)
    return made


def weights(made: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in policy.trainable(made.model).items()}


def gradients(made: Any) -> dict[str, Any]:
    """The gradient of the first step, before clipping, as the optimizer would see it; no weight is changed."""
    seen: dict[str, Any] = {}

    import torch

    def keep(model: Any) -> Any:
        seen.update({n: p.grad.clone() for n, p in policy.trainable(made.model).items() if p.grad is not None})
        made.control.should_training_stop = True
        return torch.tensor(0.0)

    made._clip_grad_norm = keep
    made.train()
    return seen
