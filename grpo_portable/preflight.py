"""What a start is refused for before anything is loaded or written, judged alike by a plan, a start, a resume and the list.

Looks at files and asks for the hub; says nothing itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from doctor.diagnosis import PATHS
from doctor.facts import Facts
from doctor.walls import machine_walls
from doctor.walls_model import Model
from doctor.walls_stack import for_evaluation
from grpo_portable import reach
from grpo_portable.data import sets
from grpo_portable.data.rows import SUFFIXES
from grpo_portable.errors import DataError, GrpoPortableError, PathClosed, RecipeError
from grpo_portable.plan.settle import first_help
from grpo_portable.recipe import Recipe, is_template
from grpo_portable.run import folder as run_folder


def known_rewards(recipe: Recipe) -> None:
    """RecipeError for a reward's name that is not known; a reward of one's own is looked for when the run starts."""
    from grpo_portable import rewards

    for name in recipe.rewards:
        if ":" not in name and name not in rewards.NAMES:
            rewards.resolve([name], recipe.answer_style)


def known_template(recipe: Recipe) -> None:
    """RecipeError for a chat template that is no file."""
    if recipe.chat_template not in ("auto", "none") and not is_template(recipe.chat_template):
        raise RecipeError(
            f"chat template `{recipe.chat_template}` cannot be used",
            because="it is neither Jinja text nor a file in the working directory or beside the recipe",
            help="`auto`, `none`, or a Jinja file",
        )


def known_files(recipe: Recipe) -> None:
    """DataError or ModelError for a file or folder that is not there, or holds no model, before libraries are loaded."""
    for source in (recipe.data, recipe.eval_data, recipe.bootstrap_data):
        if reach.names_a_file(source, SUFFIXES) and not reach.is_there(source):
            raise DataError(
                f"data file `{source}` is not there", help="check the path; hub data sets are named owner/name"
            )
    if recipe.model not in reach.BUILT_IN:
        reach.located(recipe.model)


def may_start(recipe: Recipe, *, trains: bool = True) -> str | None:
    """That the run stays offline, None where it does not. Raises what a start is refused for (`_looked_at`)."""
    offline, _ = _looked_at(recipe, trains=trains)
    return offline


def may_go_on(recipe: Recipe, facts: Facts, *, trains: bool = True) -> str | None:
    """`may_start` of a run that was planned before, maybe with other packages: PathClosed where every path is closed now."""
    for wall in machine_walls(facts if trains else for_evaluation(facts), Model(recipe.model)):
        if set(wall.closes) >= set(PATHS):
            raise PathClosed(wall.fact, because=wall.because[-1], help=first_help(wall))
    return may_start(recipe, trains=trains)


def outlook(recipe: Recipe, place: Path) -> tuple[GrpoPortableError | None, tuple[str, ...]]:
    """What a start of a training in the folder `place` would be refused for now, None for nothing, and what it would note."""
    try:
        offline, notes = _looked_at(recipe)
        run_folder.may_create(place)
    except GrpoPortableError as error:
        return error, ()
    return None, (*([offline] if offline else []), *notes)


def lacking() -> Callable[[Recipe], str | None]:
    """Why a training could not have its rewards, model or questions, None for a yes; the hub is asked once for all recipes."""
    hub = functools.cache(reach.hub)

    def why_not(recipe: Recipe) -> str | None:
        try:
            _whole_rewards(recipe)
            reach.require(recipe.model, _sources(recipe), hub)
        except GrpoPortableError as error:
            return error.fact + (f" ({error.because})" if error.because else "")
        return None

    return why_not


def _looked_at(recipe: Recipe, *, trains: bool = True) -> tuple[str | None, tuple[str, ...]]:
    """(that the run stays offline, None where it does not; notes on the questions) of a plan that is about to start.

    Raises what a start is refused for: a reward that lacks its package, a model or questions that are neither here nor to be
    had, or that cannot be used.
    """
    if trains:
        _whole_rewards(recipe)
    offline = reach.require(recipe.model, _sources(recipe, trains=trains))
    if offline:
        reach.stay_offline()
        offline = f"the hub is out of reach ({offline}): model and data are this machine's own copies"
    return offline, _look_at_questions(recipe, trains=trains)


def _whole_rewards(recipe: Recipe) -> None:
    """RecipeError for a reward of ours that lacks what it needs, such as a package."""
    from grpo_portable import rewards

    ours = [name for name in recipe.rewards if ":" not in name]
    rewards.resolve(ours, recipe.answer_style, max_completion_tokens=recipe.max_completion_tokens)


def _look_at_questions(recipe: Recipe, *, trains: bool = True) -> tuple[str, ...]:
    """Notes on the questions that lie here (a hub's may be gigabytes). DataError for ones that cannot be used."""
    parts = sets.parts(recipe, trains=trains)
    here = [part for part, source in parts.items() if source in reach.BUILT_IN or reach.is_there(source)]
    if len(here) < len(parts):
        found = {part: sets.load(recipe, part) for part in here}
        if "train" in found:
            sets.enough(recipe, found["train"], trains=trains)
        return sets.notes(recipe, found)
    asked = sets.gather(recipe, trains=trains)
    return (*sets.notes(recipe, asked.by_part()), *asked.told)


def _sources(recipe: Recipe, *, trains: bool = True) -> tuple[str, ...]:
    """Where the questions of a run come from, each once."""
    return tuple(dict.fromkeys(s for s in sets.parts(recipe, trains=trains).values() if s not in ("", "auto")))
