"""Reward functions, by the names a recipe gives them. Values and reasons: docs/rewards.md.

Every reward is `fn(prompts, completions, gold, **columns) -> list[float | None]`, one entry a completion, as TRL calls
it. None means "cannot be scored": the sample is left out of its group's statistics. Torch-free.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from grpo_portable.errors import RecipeError
from grpo_portable.rewards import custom, length, tags, verifiable
from grpo_portable.rewards.setting import Reward, Setting

_MAKERS: Mapping[str, Callable[[Setting], Reward]] = {
    "correctness": verifiable.correctness,
    "symbolic_correctness": verifiable.symbolic_correctness,
    "marker_format": verifiable.marker_format,
    "overlong_penalty": length.overlong_penalty,
    **tags.MAKERS,
}
NAMES = tuple(_MAKERS)


def resolve(
    names: Sequence[str], style: str, *, max_completion_tokens: int | None = None, overlong_tokens: int | None = None
) -> list[Reward]:
    """The reward functions of a recipe, in its order, bound to the run's answer style and token limit.

    `overlong_tokens`: over how many tokens before the limit `overlong_penalty` grows; a fifth of the limit when not given.
    RecipeError for a name that is unknown, a module that cannot be imported, or a reward that lacks what it needs.
    """
    setting = Setting(style, max_completion_tokens, overlong_tokens)
    return [_one(name, setting) for name in names]


def _one(name: str, setting: Setting) -> Reward:
    if ":" in name:
        return custom.load(name)
    maker = _MAKERS.get(name)
    if maker is None:
        near = difflib.get_close_matches(name, NAMES, n=1)
        help = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(NAMES)}; your own: module:function"
        raise RecipeError(f"no reward is called `{name}`", help=help)
    return maker(setting)
