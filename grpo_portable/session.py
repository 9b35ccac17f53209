"""What the stages of a run share, and how it is made: questions, model, prompts, adapter and engine of its recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_portable.combinations import samples_elsewhere
from grpo_portable.data import questions, sets
from grpo_portable.engines import PathSettings, open_engine, path_settings, share_weights
from grpo_portable.models import policy, prompts, shard
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Resting, Rollout, Ticking
from grpo_portable.run import pulse
from grpo_portable.run.folder import RunFolder
from grpo_portable.run.processes import Processes, here, join
from grpo_portable.supervision.phase import Phase
from grpo_portable.training import record
from grpo_portable.training.guards import StopSignal

if TYPE_CHECKING:
    from grpo_portable.fast import Shared


@dataclass
class Session:
    """What the stages share. `train` is None when the run only evaluates."""

    run: RunFolder
    recipe: Recipe
    settings: PathSettings
    device: Any
    loaded: policy.Loaded
    model: Any
    builder: prompts.PromptBuilder
    train: prompts.Fitted | None
    taught: tuple[questions.Question, ...] | None  # of the bootstrap, where it has a set of its own
    held_out: prompts.Fitted
    engine: Rollout
    stop: StopSignal
    processes: Processes

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"


def prepare(run: RunFolder, task: dict[str, Any], stop: StopSignal) -> Session:
    """Load model and data, build the prompts, put the adapter on, open the engine, and write down what was done."""
    recipe, only_evaluate = run.recipe(), task.get("only") == "evaluate"
    run.heartbeat(Phase.STARTING, "reading the questions")
    processes = replace(join(cpu=recipe.path == "cpu"), tick=pulse.Tick(run))
    settings = path_settings(recipe.path, bfloat16=_computes_in_bfloat16(), backend=_backend(recipe, only_evaluate))
    device = _device(recipe)
    asked = _questions(run, recipe, only_evaluate)
    run.heartbeat(Phase.STARTING, f"loading {recipe.model}")
    spread = recipe.fsdp is True and processes.count > 1  # block by block, once the adapter is on
    shared = share_weights(settings, recipe, run=run)
    with pulse.while_bytes_move(run):  # the first time it is downloaded
        loaded = shared.loaded if shared else _load(recipe, settings, "cpu" if spread else device, only_evaluate)
    builder, train, held_out = _prompts(run, recipe, loaded, asked, only_evaluate)
    recipe = _with_answer_room(run, recipe, train or held_out)
    model, recipe = _policy(recipe, task, loaded, shared)
    if spread:
        run.heartbeat(Phase.STARTING, "spreading the weights over the GPUs")
        shard.spread(model, device)
    record.setting(run, recipe, settings, loaded, model, builder, held_out)
    record.data_used(run, recipe, "eval", asked.held_out, held_out)
    if train is not None and asked.train is not None:
        record.data_used(run, recipe, "train", asked.train, train)
    engine = _engine(run, recipe, settings, loaded, model, shared)
    record.note(run, processes=processes.count)
    processes.wait()  # an engine may take minutes to start
    taught = None if asked.bootstrap is None else asked.bootstrap.questions
    return Session(
        run, recipe, settings, device, loaded, model, builder, train, taught, held_out, engine, stop, processes
    )


def _questions(run: RunFolder, recipe: Recipe, only_evaluate: bool) -> sets.Gathered:
    with pulse.while_bytes_move(run):
        asked = sets.gather(recipe, trains=not only_evaluate)
    for told in asked.told:
        record.tell_once(run, "data", told)
    return asked


def _load(recipe: Recipe, settings: PathSettings, device: Any, only_evaluate: bool) -> policy.Loaded:
    full_precision = recipe.lora_rank == 0 and not only_evaluate  # all weights are trained: they are their own masters
    dtype = "float32" if full_precision else settings.dtype
    return policy.load(recipe.model, dtype=dtype, quantization=settings.quantization, device=device)


def _prompts(
    run: RunFolder, recipe: Recipe, loaded: policy.Loaded, asked: sets.Gathered, only_evaluate: bool
) -> tuple[prompts.PromptBuilder, prompts.Fitted | None, prompts.Fitted]:
    """What builds a prompt; the questions to train on, None when the run only evaluates; and those held out."""
    shots = prompts.choose_shots(asked.train.questions, recipe.few_shot, recipe.seed) if asked.train else ()
    stop_ids = prompts.generation_stop_ids(loaded.model)
    builder = prompts.builder(loaded.tokenizer, recipe, shots=shots, generation_stop_ids=stop_ids)
    if builder.folded:
        record.tell_once(run, "prompt", f"the system text stands in the user's turn: {builder.folded}")
    train = None if only_evaluate or asked.train is None else _fit(asked.train, builder, recipe, shots, "train")
    return builder, train, _fit(asked.held_out, builder, recipe, (), "eval")


def _policy(recipe: Recipe, task: dict[str, Any], loaded: policy.Loaded, shared: Shared | None) -> tuple[Any, Recipe]:
    """The model with the adapter that is trained or asked, if any, and the recipe for its trainers."""
    from transformers import set_seed  # after Unsloth, which patches what is imported after it

    set_seed(recipe.seed)  # the adapter's first values
    if shared:
        return shared.adapted(recipe)
    if task.get("adapter"):
        return policy.load_adapter(loaded.model, Path(task["adapter"]).expanduser()), recipe
    return (loaded.model if task.get("only") == "evaluate" else policy.add_adapter(loaded.model, recipe)), recipe


def _engine(
    run: RunFolder, recipe: Recipe, settings: PathSettings, loaded: policy.Loaded, model: Any, shared: Shared | None
) -> Rollout:
    run.heartbeat(Phase.STARTING, "starting the engine")
    engine = open_engine(settings, model, loaded.tokenizer, recipe, run=run, shared=shared)
    if isinstance(engine, Ticking):
        engine.tick = pulse.Tick(run)
    record.note(run, engine=engine.name, engine_details=engine.describe() if isinstance(engine, Resting) else None)
    return engine


def _with_answer_room(run: RunFolder, recipe: Recipe, fitted: prompts.Fitted) -> Recipe:
    """The recipe with the answers' length settled by the prompts' (context_tokens); the run's own recipe says so too."""
    room = prompts.answer_room(recipe, fitted)
    if recipe.context_tokens and room < prompts.LITTLE_ROOM:
        record.tell_once(
            run,
            "data",
            f"answers have room for {room} tokens only: with less than {prompts.LITTLE_ROOM:,} many are cut off and their "
            "rewards are equal and bad; raise context_tokens and max_completion_tokens, or lower prompt_percentile",
        )
    if room != recipe.max_completion_tokens and here().is_main:
        run.settle(max_completion_tokens=room)
    return replace(recipe, max_completion_tokens=room)


def _fit(
    loaded: questions.Loaded,
    builder: prompts.PromptBuilder,
    recipe: Recipe,
    shots: tuple[questions.Question, ...],
    part: str,
) -> prompts.Fitted:
    used = {shot.id for shot in shots}
    return prompts.fit(
        [q for q in loaded.questions if q.id not in used],
        builder,
        max_tokens=recipe.max_prompt_tokens,
        percentile=recipe.prompt_percentile if part == "train" else 100.0,
    )


def _device(recipe: Recipe) -> Any:
    import torch

    return torch.device("cpu") if recipe.path == "cpu" else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def _backend(recipe: Recipe, only_evaluate: bool) -> str:
    """The recipe's backend; nothing is gained by weights that are shared with nobody who learns."""
    if samples_elsewhere(recipe):
        return "server"
    return "unsloth" if recipe.backend == "unsloth" and not only_evaluate else "plain"


def _computes_in_bfloat16() -> bool:
    """By compute capability: asked itself, torch also counts emulation."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
