"""Rewards of one's own: `module:function` or `path/to/file.py:function` in a recipe."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from grpo_portable.errors import RecipeError
from grpo_portable.rewards.setting import Reward


def load(name: str) -> Reward:
    """The function that `module:function` names. Modules are looked for in the working directory too.

    RecipeError says which part failed: the form, the import, the attribute, or that it cannot be called.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise RecipeError(
            f"reward `{name}` is not of the form module:function", help="for example my_rewards:short_answers"
        )
    module = _file(name, Path(where)) if where.endswith(".py") else _module(name, where)
    function = getattr(module, attribute, None)
    if function is None:
        raise RecipeError(f"reward `{name}` is not there", because=f"`{where}` has no `{attribute}`")
    if not callable(function):
        raise RecipeError(f"reward `{name}` is not a function", because=f"it is of type {type(function).__name__}")
    return function


def _module(name: str, where: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # a console script does not look where it was started
        sys.path.insert(0, here)
    try:
        with _import_errors(name):
            return importlib.import_module(where)
    finally:
        if added:
            sys.path.remove(here)


def _file(name: str, file: Path) -> ModuleType:
    # no other module is called so
    name_here = f"reward_file_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    if name_here in sys.modules:  # another reward of the same file: what it loaded, a model perhaps, is there once
        return sys.modules[name_here]
    spec = importlib.util.spec_from_file_location(name_here, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise RecipeError(f"reward `{name}` is not there", because=f"there is no file `{file}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_here] = module  # dataclasses and pickle look there for what a class belongs to
    try:
        with _import_errors(name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name_here]
        raise
    return module


@contextlib.contextmanager
def _import_errors(name: str) -> Iterator[None]:
    """Inside, whatever the user's code raises while it is imported is a RecipeError, a call of sys.exit too."""
    try:
        yield
    except KeyboardInterrupt:  # a wish to stop
        raise
    except BaseException as error:
        raise RecipeError(f"reward `{name}` cannot be imported", because=f"{type(error).__name__}: {error}") from error
