"""The format bootstrap: a short SFT (sft.py) on a data set's worked answers before GRPO, on the same adapter and prompts.

A model that never writes the target format earns no reward, and GRPO cannot learn from groups that are all alike. Loss
is on the answer only, its end token included. GRPO goes on from this adapter, and its KL term, if any, is against it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_portable.answers import extractor
from grpo_portable.data.questions import Question
from grpo_portable.data.worked import working
from grpo_portable.errors import DataError
from grpo_portable.models.prompts import Fitted, PromptBuilder, completion_text
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Rollout


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
    from grpo_portable.training.trainer import rollout_mode, rollout_sampling

    sampling = rollout_sampling(recipe, prompts, f"probe {recipe.seed}")
    with rollout_mode(model):
        engine.sync(model)
        groups = engine.generate(asked, 1, sampling)
    texts = [completion_text(prompts.tokenizer, group[0].token_ids, prompts.stop_ids) for group in groups]
    return sum(extractor.has_marker(text, recipe.answer_style) for text in texts) / len(texts)


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
