"""What the files of a run folder hold, where it is read back: their JSON is held to this before anybody uses a value. Pure.

A form is a `Kind` of value, a list [form], or an object {name: form} that may lack names and have others; "*" is any name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.errors import RecipeError
from grpo_portable.recipe import typed


@dataclass(frozen=True)
class Kind:
    """Values that are `words`, told by `holds`."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class OrNull:
    form: Any


@dataclass(frozen=True)
class Needs:
    """An object of the form `needs` that has all of its names; `may` are others'."""

    needs: Mapping[str, Any]
    may: Mapping[str, Any]


def _of_recipe(key: str) -> Kind:
    def holds(value: Any) -> bool:
        try:
            return bool(typed({key: value}, key))
        except RecipeError:
            return False

    return Kind(f"as a recipe may have {key}", holds)


TEXT = Kind("text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
COUNT = Kind("a whole number from 0 on", lambda value: type(value) is int and value >= 0)
SOME = Kind("a whole number from 1 on", lambda value: COUNT.holds(value) and value > 0)
ANY: Mapping[str, Any] = {}  # any object
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
ID = Kind("text or a whole number", lambda value: TEXT.holds(value) or COUNT.holds(value))
EVALUATE = Kind('"evaluate"', lambda value: value == "evaluate")

RECIPE_VALUES = "recipe_values"  # in run.json: what recipe.yaml held when the run was last started
_BEAT = {"phase": TEXT, "doing": TEXT}
_OPEN = OrNull({"open": FLAG, "fits": OrNull(FLAG)})
_WALL = {"closes": OrNull([TEXT]), "because": OrNull([TEXT])}
FILES: Mapping[str, Any] = {
    "run.json": {
        "planned_memory": OrNull({"ledger_gib": {"*": NUMBER}}),
        "total_parameters": OrNull(COUNT),
        "versions": {},
        "prompt": {"stop": OrNull([TEXT])},
        "data": {"*": dict.fromkeys(("used", "skipped", "over_length", "over_percentile"), COUNT)},
        "stages": {"*": {"seconds": NUMBER, "paths": [Needs({"path": TEXT, "from": COUNT}, {})]}},
        "engine_details": OrNull({"start_s": OrNull(NUMBER)}),
        "held_gib": {"*": OrNull(NUMBER)},
        "peak_memory_gib": OrNull(NUMBER),
        RECIPE_VALUES: OrNull({}),
    },
    "rung.json": {
        **{key: _of_recipe(key) for key in ("path", "micro_batch", "rollout_rows", "backend")},
        "gpus": [COUNT],
        "processes": SOME,
    },
    "plan.json": {
        "facts": OrNull({"gpus": OrNull([{}])}),
        "plan": OrNull({"gpus": OrNull([COUNT])}),
        "paths": OrNull({"*": _OPEN}),
        "walls": OrNull([_WALL]),
        "passed": OrNull({"*": TEXT}),
    },
    "facts.json": {
        **dict.fromkeys(("host", "driver", "packages"), OrNull({})),
        "gpus": OrNull([{}]),
    },
    "task.json": {"only": EVALUATE, "adapter": OrNull(TEXT), "base_too": FLAG},
    "failure.json": {
        **_BEAT,
        "kind": TEXT,
        "fact": TEXT,
        "because": OrNull(TEXT),
        "help": OrNull(TEXT),
        "rank": COUNT,
    },
    "heartbeat": {**_BEAT, "pid": COUNT, "stage": TEXT, "total": COUNT},
    # a line each
    "metrics.jsonl": Needs(
        {"step": COUNT}, dict.fromkeys(("seconds", "reward", "tokens_per_s", "memory_gib"), OrNull(NUMBER))
    ),
    "events.jsonl": Needs({"kind": TEXT, "message": TEXT}, {"step": COUNT, "passed": {"*": TEXT}}),
    "generations": Needs({"id": ID}, {"sample": COUNT}),
}


def form_of(file: Path) -> Any:
    """The form of a file, or of its lines; any object where none is known."""
    name = "generations" if file.parent.name == "generations" else file.name.partition("-")[0]  # heartbeat-1
    return FILES.get(name, ANY)


def read(text: bytes, form: Any = ANY) -> dict[str, Any]:
    """The object in a JSON text. ValueError says what in it is not of its form, or why it is no JSON."""
    try:
        found = json.loads(text, parse_float=_float, parse_constant=_float, parse_int=_int)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__}, no object")
    if misfit := _misfit(found, form):
        raise ValueError(misfit)
    return found


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"it holds {text[:20]}, no number that JSON may hold")
    return number


def _int(text: str) -> int:
    _float(text)  # one that no float holds cannot be reckoned with
    return int(text)


def _misfit(value: Any, form: Any, where: str = "") -> str | None:
    """What in a JSON value is not of its form, None where all is."""
    if isinstance(form, OrNull):
        return None if value is None else _misfit(value, form.form, where)
    if isinstance(form, Needs):
        lacking = next((name for name in form.needs if isinstance(value, dict) and name not in value), None)
        return f"`{_at(where, lacking)}` is not there" if lacking else _misfit(value, {**form.may, **form.needs}, where)
    wanted, fits = _wanted(form)
    if not fits(value):
        return f"`{where}` must be {wanted}, not {json.dumps(value)[:60]}"
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(form, dict):
        parts = [(_at(where, name), part, form.get(name, form.get("*"))) for name, part in value.items()]
    elif isinstance(form, list):
        parts = [(f"{where}[{index}]", part, form[0]) for index, part in enumerate(value)]
    found = (_misfit(part, its, place) for place, part, its in parts if its is not None)
    return next(filter(None, found), None)


def _at(where: str, name: str) -> str:
    return f"{where}.{name}".lstrip(".")


def _wanted(form: Any) -> tuple[str, Callable[[Any], bool]]:
    if isinstance(form, Kind):
        return form.words, form.holds
    kind = type(form)
    return ("an object" if kind is dict else "a list"), lambda value: isinstance(value, kind)
