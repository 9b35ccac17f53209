"""The recipes that come with the project: list them, find one by name, copy one out, and pick one by machine."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from grpo_portable.errors import RecipeError, RunFolderError
from grpo_portable.recipe import Recipe, load

PACKAGE = "grpo_portable_recipes"
EMBEDDED = "arithmetic-embedded"
BY_SIZE = ("gsm8k-qwen3-4b", "gsm8k-qwen3-1.7b", "gsm8k-qwen3-0.6b")  # `--auto` takes the first that fits a GPU path


@dataclass(frozen=True)
class Entry:
    name: str
    file: Path
    purpose: str  # first line of the header comment


def folder() -> Path:
    """Where the recipes lie: `recipes/` beside the package in a checkout, the package grpo_portable_recipes when installed."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file() and (root / "recipes").is_dir():
        return root / "recipes"
    spec = importlib.util.find_spec(PACKAGE)  # a folder of data without code: its place is all there is to it
    if spec is None or not spec.submodule_search_locations:
        raise RecipeError("the recipes are not installed", help="install grpo-portable again, or work from a checkout")
    return Path(next(iter(spec.submodule_search_locations)))


def entries() -> tuple[Entry, ...]:
    return tuple(Entry(f.stem, f, header(f)[0] if header(f) else "") for f in sorted(folder().glob("*.yaml")))


def header(file: Path) -> list[str]:
    """The comment lines at the top of a recipe, without their hash signs."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return lines


def find(name: str) -> Path:
    """The file of a recipe given by path or by name; RecipeError names the nearest one."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise RecipeError(
                f"there is no recipe file `{name}`", help="`grpo-portable recipes` lists those that come along"
            )
        return path
    file = folder() / f"{name}.yaml"
    if file.is_file():
        return file
    near = difflib.get_close_matches(name, [e.name for e in entries()], n=1)
    raise RecipeError(
        f"there is no recipe `{name}`",
        help=f"did you mean `{near[0]}`?" if near else "`grpo-portable recipes` lists them; a file's path works too",
    )


def copy_out(name: str, to: Path) -> None:
    """Write a recipe to a file, and the chat template it names beside it; RunFolderError when the file is there already."""
    source = find(name)
    if to.exists():
        raise RunFolderError(f"`{to}` exists already", help="choose another file")
    named = re.search(r"(?m)^chat_template:\s*(\S+\.jinja)\s*$", source.read_text(encoding="utf-8"))
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if named and (source.parent / named[1]).is_file():
            (to.parent / named[1]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.parent / named[1], to.parent / named[1])
        shutil.copyfile(source, to)
    except OSError as error:
        raise RunFolderError(f"`{to}` cannot be written", because=error.strerror or str(error)) from error


@dataclass(frozen=True)
class Pick:
    name: str
    reason: str


def pick(
    candidates: Iterable[str], fits: Callable[[Recipe], str | None], obtainable: Callable[[str], str | None]
) -> Pick:
    """The first recipe whose model fits a GPU path and can be had; the embedded one when none does.

    `fits` and `obtainable` return None for yes, or the reason why not.
    """
    reason = "no larger recipe is known"
    for name in candidates:
        recipe = load(find(name))
        why_not = fits(recipe) or obtainable(recipe.model)
        if why_not is None:
            return Pick(name, f"{recipe.model} is the largest model that fits here")
        reason = f"{recipe.model}: {why_not}"
    return Pick(EMBEDDED, f"the built-in demonstration model is trained, because no larger one can be had ({reason})")
