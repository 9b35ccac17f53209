"""A recipe's three sets of questions: trained on, held out, and those of the bootstrap; none may stand in two. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from grpo_portable.answers.symbolic import SymbolicChecker
from grpo_portable.data import questions
from grpo_portable.data.sources import recognise
from grpo_portable.errors import DataError
from grpo_portable.recipe import Recipe

SYMBOLIC = "symbolic_correctness"
SPARE = 4  # rows read for each bootstrap row wanted: many worked answers are too long


@dataclass(frozen=True)
class Gathered:
    """`train` is None when a run only evaluates, `bootstrap` when it is taken from `train`. `told`: for the events."""

    train: questions.Loaded | None
    held_out: questions.Loaded
    bootstrap: questions.Loaded | None
    told: tuple[str, ...]

    def by_part(self) -> dict[str, questions.Loaded]:
        """The sets there are, by the names of `parts`."""
        found = {"eval": self.held_out, "train": self.train, "bootstrap": self.bootstrap}
        return {part: loaded for part, loaded in found.items() if loaded is not None}


def parts(recipe: Recipe, *, trains: bool) -> dict[str, str]:
    """Part → source of what a run reads. One that only evaluates reads questions to train on for its worked examples alone."""
    wanted = ["eval"]
    if trains or recipe.few_shot > 0:
        wanted.append("train")
    if trains and recipe.bootstrap_epochs > 0 and recipe.bootstrap_data:
        wanted.append("bootstrap")
    return {part: _place(recipe, part).source for part in wanted}


def gather(recipe: Recipe, *, trains: bool) -> Gathered:
    """The questions of a run. DataError when a set cannot be had, or a held-out question is trained on and that is refused."""
    if SYMBOLIC in recipe.rewards:
        with SymbolicChecker() as checker:
            checker.require()
    wanted, held_out = parts(recipe, trains=trains), load(recipe, "eval")
    if "train" not in wanted:
        return Gathered(None, held_out, None, ())
    told: list[str] = []
    trained = _apart(load(recipe, "train"), held_out.questions, recipe, "training", told)
    taught = None
    if "bootstrap" in wanted:
        taught = _apart(load(recipe, "bootstrap"), held_out.questions, recipe, "bootstrap", told)
    count = enough(recipe, trained, trains=trains)
    if trains and count < recipe.prompts_per_step:
        told.append(
            f"a step asks {recipe.prompts_per_step} questions and only {count} can be trained on: it asks some several times"
        )
    return Gathered(trained, held_out, taught, tuple(told))


def enough(recipe: Recipe, trained: questions.Loaded, *, trains: bool) -> int:
    """How many of the training questions are left beside the worked examples. DataError for too few."""
    count = len(trained.questions)
    left = count - recipe.few_shot
    if left < trains:
        raise DataError(
            f"few_shot {recipe.few_shot} wants more worked examples than there are",
            because=f"{shown(recipe.data)} ({recipe.data_split}) has {count} usable training questions"
            + (", and none would be left to train on" if left == 0 else ""),
            help=f"few_shot of at most {count - trains}, or more training questions",
        )
    return left


def notes(recipe: Recipe, loaded: Mapping[str, questions.Loaded]) -> tuple[str, ...]:
    """Of each part, the sentence on the rows that cannot be used."""
    return tuple(filter(None, (unusable(recipe, part, its) for part, its in loaded.items())))


def unusable(recipe: Recipe, part: str, loaded: questions.Loaded) -> str | None:
    """The sentence that names the rows of a part that cannot be used, None where all can."""
    if not loaded.skipped:
        return None
    source, _, split, _ = _place(recipe, part)
    first = "; ".join(f"row {row}: {reason}" for row, reason in loaded.skipped[:3])
    rows = f"{len(loaded.skipped):,} of {loaded.total:,} rows of {shown(source)} ({split})"
    return f"{rows} cannot be used and are left out: {first}"


def shown(source: str) -> str:
    """A source's name as files of a run may hold it: of a path only the last part."""
    return Path(source).name if Path(source).expanduser().exists() else source


def load(recipe: Recipe, part: str) -> questions.Loaded:
    """The questions of one part: train, eval or bootstrap."""
    source, config, split, limit = _place(recipe, part)
    # else the columns are another set's
    named = source == recipe.data or (part == "eval" and recognise(source) is None)
    return questions.load_questions(
        source,
        config=config,
        split=split,
        question_column=recipe.question_column if named else "auto",
        answer_column=recipe.answer_column if named else "auto",
        style=recipe.answer_style,
        limit=limit,
        seed=recipe.seed,
        symbolic=SYMBOLIC in recipe.rewards,
    )


class _Place(NamedTuple):
    source: str
    config: str
    split: str
    limit: int


def _place(recipe: Recipe, part: str) -> _Place:
    """Where the questions of one part lie, and how many are taken."""
    if part == "train":
        return _Place(recipe.data, recipe.data_config, recipe.data_split, recipe.train_limit)
    if part == "eval":
        return _Place(recipe.eval_data, _eval_config(recipe), recipe.eval_split, recipe.eval_limit)
    taught = recipe.bootstrap_data
    return _Place(taught, "", _usual_split(taught), SPARE * recipe.bootstrap_limit)


def _eval_config(recipe: Recipe) -> str:
    return recipe.eval_config or (recipe.data_config if recipe.eval_data == recipe.data else "")


def _usual_split(source: str) -> str:
    known = recognise(source)
    return known.split if known else "train"


def _one_set(recipe: Recipe) -> bool:
    """Whether training and held-out questions are read from one file, or from one split."""
    same_split = recipe.eval_split == recipe.data_split and _eval_config(recipe) == recipe.data_config
    return recipe.eval_data == recipe.data and (same_split or Path(recipe.data).expanduser().is_file())


def _apart(
    loaded: questions.Loaded, held_out: Sequence[questions.Question], recipe: Recipe, name: str, told: list[str]
) -> questions.Loaded:
    """The set without held-out questions; DataError when there are some and the recipe wants that to be an error."""
    both = shown(recipe.data) if name == "training" and _one_set(recipe) else None
    if recipe.on_overlap == "refuse":
        questions.refuse_overlap(loaded.questions, held_out, both)
        return loaded
    texts = {questions.normalised(q.question) for q in held_out}
    kept = tuple(q for q in loaded.questions if questions.normalised(q.question) not in texts)
    if len(kept) < len(loaded.questions):
        told.append(f"{len(loaded.questions) - len(kept)} {name} questions are also held out, and were left out")
    if not kept:
        questions.refuse_overlap(loaded.questions, held_out, both)
    return replace(loaded, questions=kept)
