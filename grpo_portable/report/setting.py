"""The report's rooms on what ran where: model, data, machine, path, closed paths, events, versions, repeating it, and scope.

Values as they stand in run.json, facts.json, plan.json, events.jsonl and the recipe → markdown lines. Whatever is not recorded
is left out; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from doctor.diagnosis import PATHS
from grpo_portable.data.rows import SUFFIXES
from grpo_portable.errors import clause
from grpo_portable.reach import names_a_file
from grpo_portable.recipe import Recipe
from grpo_portable.report import engine as report_engine
from grpo_portable.report import paths as report_paths
from grpo_portable.report.markdown import block, code, folded, plain, shorten
from grpo_portable.scores import windows

Json = Mapping[str, Any]
MOST_EVENTS = 12
QUIET_EVENTS = ("saved",)
STAGE_WORDS = {
    "base": "evaluation of the base",
    "bootstrap": "bootstrap and its evaluation",
    "train": "training",
    "tuned": "evaluation of the tuned",
}


def setting(recipe: Recipe, run: Json, facts: Json, train_seconds: float | None, trains: bool = True) -> list[str]:
    """Model, data, training, machine, path and time, one bullet each; `trains` is False when a run only evaluates."""
    rows = [
        ("Model", _model(recipe, run, trains)),
        ("Data", _data(recipe, run.get("data") or {}, trains)),
        ("Training", _training(recipe) if trains else ""),
        ("Machine", machine(facts)),
        ("Path", _path(recipe, run, trains)),
        ("Rollout engine", report_engine.line(run)),
        ("Change of path", report_paths.by_stage(run)),
        ("Time", _time(run.get("stages") or {}, train_seconds)),
    ]
    return [f"- **{name}:** {text}" for name, text in rows if text]


def machine(facts: Json) -> str:
    """The machine in one line, from facts.json."""
    host, gpus, driver = facts.get("host") or {}, facts.get("gpus") or [], facts.get("driver") or {}
    cards: dict[str, int] = {}
    for gpu in gpus:
        memory = f" {gpu['total_gib']:.0f} GiB" if isinstance(gpu.get("total_gib"), (int, float)) else ""
        name = f"{gpu.get('name') or 'unknown GPU'}{memory}"
        cards[name] = cards.get(name, 0) + 1
    parts = [plain(f"{n} x {name}" if n > 1 else name) for name, n in cards.items()]
    if facts and not gpus and facts.get("gpus") is not None:
        parts.append("no GPU")
    if driver.get("version"):
        parts.append(f"driver {driver['version']}" + (f" (CUDA {driver['cuda']})" if driver.get("cuda") else ""))
    parts += [str(host[key]) for key in ("os", "arch") if host.get(key)]
    if isinstance(host.get("ram_gib"), (int, float)):
        parts.append(f"{host['ram_gib']:.0f} GiB RAM")
    if host.get("python"):
        parts.append(f"Python {host['python']}")
    return ", ".join(parts)


def prompt(run: Json) -> list[str]:
    """One prompt as the model gets it; [] when none was recorded."""
    found = run.get("prompt") or {}
    if not found.get("example"):
        return []
    stop = ", ".join(code(str(text)) for text in found.get("stop") or [])
    tokens = f", {found['example_tokens']} tokens" if found.get("example_tokens") else ""
    shots = f", {found['few_shot']} worked examples before it" if found.get("few_shot") else ""
    title = f"The prompt, the same in training and evaluation{tokens}{shots}"
    return folded(title, block(str(found["example"])) + (["", f"An answer ends at {stop}."] if stop else []))


def closed_paths(plan: Json, path: str | None, events: Sequence[Json] = ()) -> list[str]:
    """Why no faster path than `path` was taken: one line a wall, then one for each reason of paths that were open."""
    if path not in PATHS:
        return []
    faster = PATHS[: PATHS.index(path)]
    lines, closed = [], set()
    for wall in plan.get("walls") or []:
        closes = [p for p in faster if p in (wall.get("closes") or ())]
        if not closes:
            continue
        closed.update(closes)
        because = (wall.get("because") or [None])[0]
        reason = f", because {_clause(clause(str(because)))}" if because else ""
        lines.append(f"- {_paths(closes, faster)}: {_clause(wall.get('fact'))}{reason} ({code(str(wall.get('code')))})")
    failed, left_out = _given_up(events), _left_out(events)
    alike: dict[str, list[str]] = {}
    for p in faster:
        found = failed.get(p) or (None if p in closed else _not_taken(p, plan, left_out))
        if found:
            alike.setdefault(found, []).append(p)
    return lines + [f"- {_paths(paths, faster)}: {reason}" for reason, paths in alike.items()]


def _not_taken(path: str, plan: Json, left_out: Mapping[str, str]) -> str | None:
    """Why an open path was not even tried, None for one that is not open."""
    state, asked = (plan.get("paths") or {}).get(path) or {}, plan.get("asked")
    if passed := (plan.get("passed") or {}).get(path):
        return _clause(passed)
    if state.get("fits") is False:
        return "open, but the run does not fit into memory there"
    if not state.get("open"):
        return None
    wanted = plain(f"path {asked} was asked for" if asked else "the reason is not recorded")
    return f"open, and not taken: {left_out.get(path) or wanted}"


def _fallbacks(events: Sequence[Json]) -> list[tuple[Json, str, str]]:
    moves = ((e, str(e.get("from")), str(e.get("to"))) for e in events if e.get("kind") == "fallback")
    return [move for move in moves if move[1] != move[2]]


def _given_up(events: Sequence[Json]) -> dict[str, str]:
    """Path → when and of what it failed, of the paths that the run had to leave."""
    return {
        left: f"taken, and left {_when(e).strip()}: {_clause(shorten(str(e.get('error') or e.get('message')), 400))}"
        for e, left, _ in _fallbacks(events)
    }


def _left_out(events: Sequence[Json]) -> dict[str, str]:
    """Path → why a fallback went past it; of a run that did not note it, only after which path's failure."""
    return {
        path: f"left out when {code(left)} failed" + (f", because {_clause(why)}" if why else "")
        for e, left, to in _fallbacks(events)
        for path in _between(left, to)
        for why in [(e.get("passed") or {}).get(path)]
    }


def _between(left: str, to: str) -> tuple[str, ...]:
    """The paths below one and above another; each may carry its backend's name."""
    upper, lower = left.partition(" ")[0], to.partition(" ")[0]
    return PATHS[PATHS.index(upper) + 1 : PATHS.index(lower)] if {upper, lower} <= set(PATHS) else ()


def events(found: Sequence[Json]) -> list[str]:
    """Faults, retries, fallbacks and skipped rows, oldest first; the same kind with the same message is told once."""
    told: dict[tuple[str, str], list[Json]] = {}
    for event in found:
        if event.get("kind") not in QUIET_EVENTS:
            told.setdefault((str(event.get("kind")), str(event.get("message"))), []).append(event)
    if not told:
        return ["None: no fault, no retry, no fallback."]
    lines = []
    for (kind, message), same in list(told.items())[:MOST_EVENTS]:
        first = same[0]
        move = (
            f" {code(str(first['from']))} → {code(str(first['to']))}" if first.get("from") and first.get("to") else ""
        )
        times = f" ({len(same)} times)" if len(same) > 1 else ""
        error = _clause(first.get("error"))
        cause = f" ({code(shorten(str(first['error']), 300))})" if error and error not in _clause(message) else ""
        lines.append(f"- **{plain(kind)}**{move}{_when(first)}: {_clause(shorten(message, 400))}{cause}{times}")
    if len(told) > MOST_EVENTS:
        lines.append(f"- and {len(told) - MOST_EVENTS} more in `events.jsonl`")
    return lines


def _when(event: Json) -> str:
    """Of a step, or, of a worker that ended, between two."""
    step = event.get("step")
    if not isinstance(step, int):
        return ""
    if event.get("kind") not in ("retry", "fallback"):
        return f" at step {step}"
    return f" after step {step}" if step else " before the first step"


def versions(run: Json, facts: Json) -> str:
    """Versions of what ran, one line; those of facts.json when the run did not record its own."""
    found = run.get("versions") or {k: v for k, v in (facts.get("packages") or {}).items() if v and v != "absent"}
    return " · ".join(f"{name} {version}" for name, version in found.items() if version)


def repeat(recipe: Recipe, run: Json, trains: bool = True) -> list[str]:
    """Commands that repeat the run, and that read its saved files again."""
    again = "train recipe.yaml" if trains else f"eval --model {_short_source(recipe.model)} --recipe recipe.yaml"
    files = [s for s in dict.fromkeys((recipe.data, recipe.eval_data)) if names_a_file(s, SUFFIXES)]
    but = f" but for the data it names: {', '.join(map(_short_source, files))}" if files else ""
    lines = ["```sh", f"# recipe.yaml of this folder is complete{but}", f"grpo-portable {again} --out again"]
    lines += ["# this page once more, from the saved files alone", "grpo-portable report .", "```", ""]
    if run.get("command"):
        lines.append(f"It was started as {code(str(run['command']))}, seed {recipe.seed}.")
    else:
        lines.append(f"Seed {recipe.seed}.")
    return lines


def scope(recipe: Recipe, run: Json, scores: Json, steps: int) -> list[str]:
    """What was not tested, so that nobody reads more into the delta than is there."""
    evaluated, total = scores.get("n") or 0, ((run.get("data") or {}).get("eval") or {}).get("total")
    part = f" ({evaluated:,} of its {total:,} questions)" if isinstance(total, int) and total > evaluated > 0 else ""
    name = eval_name(recipe)
    lines = []
    if steps:
        lines.append(
            f"One training run with one seed ({recipe.seed}). The interval is over questions: it says how the delta would vary "
            "with other questions, not with another seed."
        )
    lines.append(f"One data set, {name}{part}; nothing else was asked, so what was unlearnt elsewhere is not known.")
    if recipe.model != "embedded":
        lines.append(
            "Whether the base model saw these questions in its own training is not known; both models share it."
        )
    if "gsm8k" in name.lower():
        lines.append(
            "Some GSM8K golds are known to be wrong; they hit both models alike, so the delta suffers less than the level."
        )
    if not (scores.get("sampled") or {}).get("stages"):
        lines.append("Greedy answers only; sampled answers were not evaluated.")
    lines.append(
        f"Strict reads the style {code(recipe.answer_style)}; lenient takes an answer in any format, else the last number. "
        "Both are rules, not judgement: a right number reached by wrong reasoning counts as right."
    )
    return [f"- {line}" for line in lines]


def eval_name(recipe: Recipe) -> str:
    """The held-out data in words, without the folders of this machine."""
    source = recipe.eval_data if recipe.eval_data != "auto" else recipe.data
    return plain(_short_source(source))


def _short_source(source: str) -> str:
    return source.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] if source.startswith(("/", "~", ".")) else source


def _model(recipe: Recipe, run: Json, trains: bool) -> str:
    name = plain(_short_source(str(run.get("base_model") or run.get("model") or recipe.model)))
    total, trained = run.get("total_parameters"), run.get("trainable_parameters")
    if not trains:
        return f"{name}, {_count(total)} parameters" if isinstance(total, int) else name
    if recipe.lora_rank == 0:
        kind = "all weights trained"
    else:
        kind = f"{'DoRA' if recipe.dora else 'LoRA'} rank {recipe.lora_rank}{' (rsLoRA)' if recipe.rslora else ''}"
    if isinstance(total, int) and isinstance(trained, int) and total > 0:
        # the record counts the adapter with it
        own = total - trained if recipe.lora_rank and total > trained else total
        return f"{name}, {_count(own)} parameters; {kind}, {trained:,} trained ({100 * trained / own:.2f} %)"
    return f"{name}; {kind}"


def _data(recipe: Recipe, data: Json, trains: bool) -> str:
    def part(source: str, split: str, found: Json) -> str:
        skipped = {k.replace("_", " "): found[k] for k in ("skipped", "over_length", "over_percentile") if found.get(k)}
        left_out = "".join(f", {n:,} {word}" for word, n in skipped.items())
        used = f": {found['used']:,} questions{left_out}" if isinstance(found.get("used"), int) else ""
        return f"{plain(_short_source(source))} ({split}{used})"

    train = part(recipe.data, recipe.data_split, data.get("train") or {})
    held_out = part(recipe.eval_data, recipe.eval_split, data.get("eval") or {})
    return f"trained on {train}, held out {held_out}" if trains else held_out


def _training(recipe: Recipe) -> str:
    epochs = "epoch" if recipe.bootstrap_epochs == 1 else "epochs"
    bootstrap = f"bootstrap of {recipe.bootstrap_epochs:g} {epochs}, then " if recipe.bootstrap_epochs else ""
    return (
        f"{bootstrap}{recipe.steps} steps of {recipe.prompts_per_step} questions x {recipe.group_size} completions, "
        f"loss {recipe.loss}, learning rate {recipe.learning_rate:g}, rewards {plain(' + '.join(recipe.rewards))}"
    )


def _path(recipe: Recipe, run: Json, trains: bool = True) -> str:
    path = run.get("path") or recipe.path
    parts = [code(str(path))]
    engine, backend = run.get("engine"), run.get("backend")
    if engine:
        parts.append(
            f"rollouts by the {plain(str(engine))} engine" + (f", updates by {plain(str(backend))}" if backend else "")
        )
    parts += [plain(str(run[key])) for key in ("dtype", "quantization") if run.get(key)]
    if isinstance(run.get("peak_memory_gib"), (int, float)):
        planned = _planned_gib(run.get("planned_memory") or {}, str(path)) if trains else None
        beside = "" if planned is None else f" ({planned:.2f} planned)"
        parts.append(f"peak memory {run['peak_memory_gib']:.2f} GiB{beside}")
    return ", ".join(parts)


def _planned_gib(planned: Json, path: str) -> float | None:
    """What was planned for the path that ran; on a card without the context, which the measured peak (torch's) leaves out."""
    if planned.get("path") != path:
        return None
    parts = planned.get("ledger_gib") or {}
    return sum(gib for name, gib in parts.items() if path == "cpu" or name != "context") or None


def _time(stages: Json, train_seconds: float | None) -> str:
    seconds = {name: stage.get("seconds") for name, stage in stages.items() if isinstance(stage, Mapping)}
    if train_seconds:
        seconds["train"] = train_seconds
    told = [f"{STAGE_WORDS.get(k, k)} {duration(v)}" for k, v in seconds.items() if isinstance(v, (int, float))]
    return ", ".join(told)


def training_seconds(run: Json, steps: Sequence[windows.Step]) -> float | None:
    """Seconds of the whole training; where they are not written, of its steps. None where nothing was trained."""
    written = ((run.get("stages") or {}).get("train") or {}).get("seconds")
    return written or sum(windows.series(steps, "step_s")[1]) or None


def duration(seconds: float) -> str:
    """`48 s`, `12 min 5 s`, `3 h 7 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _count(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if n >= size:
            return f"{n / size:.{2 if n < 10 * size else 0}f} {unit}"
    return f"{n:,}"


def _paths(closes: Sequence[str], faster: Sequence[str]) -> str:
    if len(closes) == len(faster) and len(closes) > 2:
        return f"all {len(closes)} faster paths"
    return ", ".join(code(p) for p in closes)


def _clause(text: Any) -> str:
    """Text as part of a sentence: one line, no full stop at its end."""
    return plain(str(text or "")).rstrip(".")
