"""docs/recipes.md from the recipes and from Recipe's field docs: `python -m grpo_portable.recipe_page` writes it again.

python -m grpo_portable.recipe_page            write docs/recipes.md
python -m grpo_portable.recipe_page --check    exit 1 when it is not up to date
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from grpo_portable.plan import catalogue
from grpo_portable.recipe import Recipe, describe, field_types
from grpo_portable.report.markdown import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"


def page() -> str:
    """The text of docs/recipes.md."""
    lines = [
        "# Recipes",
        "",
        "<!-- Made by `python -m grpo_portable.recipe_page` from recipes/*.yaml and grpo_portable/recipe.py; change those. -->",
        "",
        "A recipe is one flat YAML file with every choice of a run. `grpo-portable recipes` lists those that come along and",
        "says which fit this machine; `grpo-portable recipes NAME` prints one, `--copy FILE` writes it out to be changed.",
        "Single fields are changed with `--set key=value`. The run folder keeps the recipe as it ran, every field written out.",
        "",
        *table(["recipe", "for what", "machine"], [_recipe_row(entry) for entry in catalogue.entries()]),
        "",
        "# Fields",
        "",
        "`auto` means that the plan settles it: path, sizes and optimizer by what the machine has. An unknown key, a value of",
        "the wrong kind and values that do not combine are refused before anything is loaded.",
    ]
    for title, found in _sections():
        rows = [[f"`{f.name}`", describe(field_types()[f.name]), _default(f), _doc(f)] for f in found]
        lines += ["", f"## {title}", "", *table(["field", "kind", "default", "meaning"], rows)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with --check compare it; the exit code."""
    text = page()
    if "--check" in arguments:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is up to date" if current else f"{PAGE.name} is old: python -m grpo_portable.recipe_page")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


def _sections() -> Iterator[tuple[str, list[Field]]]:
    """The fields in the record's order, in the groups that they head."""
    all_fields = fields(Recipe)
    heads = [place for place, f in enumerate(all_fields) if f.metadata["section"]]
    for first, end in itertools.pairwise([*heads, len(all_fields)]):
        yield all_fields[first].metadata["section"], list(all_fields[first:end])


def _recipe_row(entry: catalogue.Entry) -> list[str]:
    machine = next(line for line in catalogue.header(entry.file) if line.startswith("Machine:"))
    return [f"[`{entry.name}`](../recipes/{entry.file.name})", entry.purpose, machine.partition(":")[2].strip()]


def _default(found: Field[Any]) -> str:
    value = list(found.default_factory()) if found.default_factory is not MISSING else found.default
    shown = {True: "true", False: "false", None: "null", "": "empty"}
    if isinstance(value, (bool, type(None))) or value == "":
        return shown[value]
    return f"`[{', '.join(value)}]`" if isinstance(value, list) else f"`{value}`"


def _doc(found: Field[Any]) -> str:
    text, choices = found.metadata["doc"], found.metadata["choices"]
    low, high = found.metadata["low"], found.metadata["high"]
    more = []
    if choices and choices != ("auto",):
        more.append("one of " + ", ".join(f"`{choice}`" for choice in choices))
    if low is not None and high is not None:
        more.append(f"{low} to {high}")
    elif low:
        more.append(f"at least {low}")
    return text[0].upper() + text[1:] + (f" ({'; '.join(more)})" if more else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
