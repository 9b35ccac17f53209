"""A recipe: every choice of a run in one flat YAML file, read into a frozen, validated record.

Unknown keys, wrong types and values that do not combine are refused before anything is loaded. `auto` means the plan or
the run settles it; the recipe written into the run folder holds no `auto` any more, so running it again repeats the run.
This module knows nothing of torch, of the machine or of the data's content.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from doctor.diagnosis import PATHS
from grpo_portable import combinations
from grpo_portable.errors import RecipeError

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo")
STYLES = ("gsm8k_marker", "tagged", "boxed", "free")


def _f(
    default: Any,
    doc: str,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    section: str | None = None,
) -> Any:
    """A field with its docs and bounds; `section` is the title of the group of fields that begins with it."""
    metadata = {"doc": doc, "choices": choices, "low": low, "high": high, "section": section}
    if isinstance(default, list):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Recipe:
    """All choices of one run. Field docs are the reference page (`docs/recipes.md` is generated from them)."""

    model: str = _f(
        "auto", "hub id, local folder, GGUF file, or `embedded` for the built-in demonstration model", section="model"
    )
    path: str = _f("auto", "where the run goes: one of the doctor's paths", ("auto", *PATHS))
    chat_template: str = _f(
        "auto",
        "`auto` the tokenizer's own if it has one, `none` plain text, a Jinja file beside the recipe, or its text",
    )
    system_prompt: str = _f("", "system message put before every question; empty for none")
    prompt_template: str = _f("{question}", "user message; `{question}` stands for the question")
    enable_thinking: bool | None = _f(None, "passed to chat templates that know it (Qwen3); null leaves it out")

    data: str = _f(
        "auto",
        "training questions: hub id, JSONL, JSON, CSV, TSV, Parquet file, folder with one a split, or `arithmetic` (built in)",
        section="data",
    )
    data_config: str = _f("", "configuration name of a hub data set (gsm8k: main)")
    data_split: str = _f("train", "split of the training data")
    eval_data: str = _f("auto", "held-out questions: as `data`; `auto` takes the same source's test split")
    eval_config: str = _f(
        "", "configuration of the held-out hub data set, where it is another one than the training data's"
    )
    eval_split: str = _f("test", "split of the held-out data")
    question_column: str = _f("auto", "column of the question; `auto` knows question, problem, prompt, input")
    answer_column: str = _f(
        "auto", "column of the gold answer; `auto` knows answer, expected_answer, solution, gold, target, label"
    )
    answer_style: str = _f("gsm8k_marker", "how the final answer is written and read", STYLES)
    train_limit: int = _f(0, "at most this many training questions (0: all), chosen by seed", low=0)
    eval_limit: int = _f(0, "at most this many held-out questions (0: all), chosen by seed", low=0)
    max_prompt_tokens: int = _f(512, "longer prompts are left out and counted", low=1)
    prompt_percentile: float = _f(
        100.0, "prompts above this percentile of tokenised length are left out and counted", low=1, high=100
    )
    context_tokens: int = _f(
        0,
        "prompt and answer together; the answer gets what the longest kept prompt leaves (0: max_completion_tokens)",
        low=0,
    )
    on_overlap: str = _f(
        "refuse",
        "when held-out questions stand in the training data: `refuse`, or `drop` these rows",
        ("refuse", "drop"),
    )
    few_shot: int = _f(0, "worked examples put before each question, from the training data", low=0, high=32)

    bootstrap_epochs: float = _f(
        0.0,
        "passes over the bootstrap rows; 0 leaves the stage out",
        low=0,
        section="bootstrap (a short SFT in the target format before GRPO)",
    )
    bootstrap_data: str = _f("", "questions with worked answers for the bootstrap; empty takes the training questions")
    bootstrap_limit: int = _f(0, "at most this many rows for the bootstrap (0: all)", low=0)
    bootstrap_learning_rate: float = _f(2e-4, "learning rate of the bootstrap", low=0)
    bootstrap_batch: int = _f(16, "rows in one bootstrap step", low=1)
    bootstrap_probe: int = _f(
        0, "training questions answered as in rollouts; the bootstrap ends once enough keep the format (0: none)", low=0
    )
    bootstrap_probe_every: int = _f(10, "bootstrap steps between two probes", low=1)
    bootstrap_format_share: float = _f(0.9, "share of the probe's answers that is enough", low=0.01, high=1)

    lora_rank: int = _f(32, "rank of the adapter; 0 trains all weights", low=0, section="adapter")
    lora_alpha: float = _f(32.0, "scale numerator of the adapter", low=0)
    lora_dropout: float = _f(
        0.0, "dropout on the adapter's input; not 0 makes sampler and trainer differ", low=0, high=0.99
    )
    lora_targets: str = _f("all-linear", "`all-linear` or a comma-separated list of module names")
    rslora: bool = _f(False, "scale by alpha/sqrt(rank) instead of alpha/rank")
    dora: bool = _f(False, "weight-decomposed adapter (DoRA)")

    steps: int = _f(150, "optimizer steps", low=1, high=10_000_000, section="GRPO")
    prompts_per_step: int = _f(8, "questions in one step", low=1)
    group_size: int = _f(8, "completions of each question (G)", low=2)
    micro_batch: int | str = _f("auto", "completions in one backward pass; `auto`: as memory allows", ("auto",), low=1)
    rollout_rows: int | str = _f("auto", "completions generated at once; `auto`: as memory allows", ("auto",), low=1)
    learning_rate: float = _f(5e-6, "peak learning rate", low=0)
    lr_schedule: str = _f("linear", "shape of the schedule after warm-up", ("linear", "cosine", "constant"))
    warmup_steps: int = _f(5, "steps to reach the peak learning rate", low=0)
    weight_decay: float = _f(0.0, "decoupled weight decay", low=0)
    adam_beta2: float = _f(
        0.99, "second moment's decay; 0.99 follows short runs better than 0.999", low=0, high=0.99999
    )
    optimizer: str = _f("auto", "`adamw`, `adamw_8bit`, or `auto`", ("auto", "adamw", "adamw_8bit"))
    max_grad_norm: float = _f(1.0, "gradients are clipped to this norm", low=0)
    loss: str = _f("dapo", "which loss; what each is averaged over stands in the docs", LOSSES)
    beta: float = _f(0.0, "weight of the KL term against the starting model", low=0)
    epsilon: float = _f(0.2, "lower clip of the ratio", low=0)
    epsilon_high: float | None = _f(None, "upper clip of the ratio; null: as epsilon", low=0)
    num_iterations: int = _f(1, "updates from one batch of rollouts", low=1)
    scale_rewards: str = _f("group", "advantages are divided by the spread of", ("group", "batch", "none"))
    mask_truncated: bool = _f(False, "leave completions that hit the length limit out of the loss")
    gradient_checkpointing: bool | str = _f("auto", "recompute activations in the backward pass", ("auto",))

    rewards: tuple[str, ...] = _f(
        ["correctness", "marker_format"],
        "reward functions by name, `module:function` or `file.py:function`",
        section="rewards",
    )
    reward_weights: tuple[float, ...] = _f([], "one weight a reward; empty: all 1")

    max_completion_tokens: int = _f(
        256, "completions end here at the latest, in training and evaluation alike", low=1, section="rollouts"
    )
    temperature: float = _f(1.0, "sampling temperature of rollouts", low=0.01)
    top_p: float = _f(1.0, "nucleus sampling; 1 is off", low=0.01, high=1)
    top_k: int = _f(0, "draw from the k likeliest tokens; 0 is off", low=0)
    min_p: float = _f(0.0, "leave out tokens below this share of the likeliest; 0 is off", low=0, high=1)
    repetition_penalty: float = _f(1.0, "divides the logits of tokens already written; 1 is off", low=0.1)
    stop: tuple[str, ...] = _f([], "strings that end a completion, beside the model's end token")
    backend: str = _f(
        "auto",
        "who holds the policy and samples from it: `plain` (this project's own engines), `server` (a vLLM that runs "
        "elsewhere), `unsloth`; `auto` takes `server` where vllm_server is given, else `plain`",
        ("auto", "plain", "server", "unsloth"),
    )
    fsdp: bool | str = _f(
        "auto",
        "keep the frozen weights in parts on the run's GPUs (FSDP2); rollouts then come from vllm_server. `auto`: where one "
        "GPU has no room",
        ("auto",),
    )
    vllm_server: str = _f("", "address of a running `vllm serve` that makes the rollouts, as http://host:port")
    vllm_adapters: str = _f(
        "", "folder that the vLLM server sees under the same path, for adapters; empty: shared memory of this machine"
    )
    fp8_scales: str = _f(
        "row", "weights of an FP8 vLLM engine get one scale a row, 128x128 block or tensor", ("row", "block", "tensor")
    )

    eval_samples: int = _f(
        0, "sampled answers a question beside the greedy one; 0 is greedy only", low=0, high=64, section="evaluation"
    )
    eval_temperature: float = _f(1.0, "temperature of the sampled answers", low=0.01)

    seed: int = _f(3407, "seed of everything that draws", low=0, high=2**32 - 1, section="run")
    save_every: int = _f(10, "steps between checkpoints", low=1)
    report_to: tuple[str, ...] = _f(
        [], "trackers beside metrics.jsonl: tensorboard, wandb, trackio", ("tensorboard", "wandb", "trackio")
    )


@cache
def field_types() -> Mapping[str, Any]:
    return typing.get_type_hints(Recipe)


def recipe_from_mapping(raw: Any, origin: str = "recipe") -> Recipe:
    """A validated Recipe from a parsed YAML mapping; RecipeError names the key, and the nearest right one if it is unknown."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{origin} holds {type(raw).__name__}, not `key: value` lines")
    recipe = Recipe(**typed({str(key): value for key, value in raw.items()}, origin))
    check(recipe, origin)
    return recipe


def load(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `key=value` overrides applied. Safe YAML only."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe `{path}` cannot be read", because=str(error)) from error
    try:
        raw = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # a number too long to convert, a date that is none
        raise RecipeError(f"recipe `{path}` is not YAML", because=" ".join(str(error).split())) from error
    except RecursionError as error:
        raise RecipeError(
            f"recipe `{path}` is nested too deeply", help="a recipe is flat `key: value` lines"
        ) from error
    return override(with_template(recipe_from_mapping(raw, f"recipe `{path}`"), path.parent), overrides)


def with_template(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the text of its chat template in place of the file's name; a name is looked for in `folder`.

    The text makes the recipe complete: it can be carried anywhere. A file that is not there is left as it is.
    """
    if recipe.chat_template in ("auto", "none") or is_template(recipe.chat_template):
        return recipe
    file = folder / Path(recipe.chat_template).expanduser()
    if not file.is_file():
        return recipe
    try:
        return replace(recipe, chat_template=file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"chat template `{recipe.chat_template}` cannot be read", because=str(error)) from error


def is_template(text: str) -> bool:
    """Whether a `chat_template` is Jinja text, not a file's name."""
    return "{{" in text or "{%" in text


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with `key=value` settings applied; values are YAML scalars or lists."""
    changed = replace(recipe, **parsed(settings))
    check(changed, "--set")
    return changed


def parsed(settings: Iterable[str], origin: str = "--set") -> dict[str, Any]:
    """The values of `key=value` settings by key, each of its field's type; whether they combine is not looked at.

    Of a list one word or number may stand without its brackets: what is wrong with it is then told at once.

    `origin`: the option they come from.
    """
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise RecipeError(f"`--set {setting}` has no `=`", help="write --set key=value")
        if key not in field_types():
            raise _unknown_key(key, origin)
        is_text = field_types()[key] is str
        try:
            value = yaml.load(text, Loader=_Loader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            if not is_text:
                raise RecipeError(f"the value of `{origin} {setting[:200]}` is not YAML") from error
            value = text  # a template's braces and colons are text
        if get_origin(field_types()[key]) is tuple and _stands_alone(value):
            value = [value]
        values[key] = _typed(key, text if is_text and not isinstance(value, str) else value, origin)
    return values


def _stands_alone(value: Any) -> bool:
    if isinstance(value, str):
        return "," not in value
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def typed(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Values by key, each of its field's type; RecipeError for a key or a value that a recipe cannot have."""
    if unknown := next((key for key in values if key not in field_types()), None):
        raise _unknown_key(unknown, origin)
    return {key: _typed(key, value, origin) for key, value in values.items()}


def to_yaml(recipe: Recipe, header: str = "") -> str:
    """The complete recipe as YAML, every field written out, in the order of the record."""
    body = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(recipe).items()}
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def differences(*recipes: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Field → its values, one a recipe, of the fields that all of them know and that are not alike in all."""
    known = (key for key in recipes[-1] if all(key in recipe for recipe in recipes))
    by_key = {key: tuple(recipe[key] for recipe in recipes) for key in known}
    return {key: values for key, values in by_key.items() if any(value != values[0] for value in values)}


def check(recipe: Recipe, origin: str) -> None:
    """Raise RecipeError for values that do not combine."""
    if recipe.reward_weights and len(recipe.reward_weights) != len(recipe.rewards):
        raise RecipeError(
            f"{origin}: {len(recipe.reward_weights)} reward_weights for {len(recipe.rewards)} rewards",
            help="give one weight a reward, or leave reward_weights empty",
        )
    if not recipe.rewards:
        raise RecipeError(f"{origin}: `rewards` is empty", help="name at least one, for example [correctness]")
    if "{question}" not in recipe.prompt_template:
        raise RecipeError(
            f"{origin}: `prompt_template` has no `{{question}}`", help="write {question} where the question goes"
        )
    if isinstance(recipe.micro_batch, int) and (recipe.prompts_per_step * recipe.group_size) % recipe.micro_batch:
        raise RecipeError(
            f"{origin}: micro_batch {recipe.micro_batch} does not divide the "
            f"{recipe.prompts_per_step * recipe.group_size} completions of a step",
            help="choose a divisor of prompts_per_step x group_size, or `auto`",
        )
    combinations.check(recipe, origin)


class _Dumper(yaml.SafeDumper):
    """Safe YAML that writes a text of several lines as a block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 5e-6 as a number (YAML 1.1 wants 5.0e-6) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(k) for k in keys if keys.count(k) > 1}
        if twice:
            raise RecipeError(f"key `{sorted(twice)[0]}` is given twice")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _unknown_key(key: str, origin: str) -> RecipeError:
    near = difflib.get_close_matches(key, field_types(), n=1)
    return RecipeError(
        f"{origin}: unknown key `{key}`", help=f"did you mean `{near[0]}`?" if near else "see docs/recipes.md"
    )


def _typed(key: str, value: Any, origin: str) -> Any:
    metadata = next(f.metadata for f in fields(Recipe) if f.name == key)
    converted = _convert(field_types()[key], value)
    if converted is _WRONG:
        is_list = get_origin(field_types()[key]) is tuple
        raise RecipeError(
            f"{origin}: `{key}` must be {describe(field_types()[key])}, not {value!r}",
            help=f"a list stands in brackets: [{value}]" if is_list and isinstance(value, str) else None,
        )
    for item in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(item, str):
            _check_text(key, item, origin, metadata["choices"])
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            _check_number(key, item, origin, metadata["low"], metadata["high"])
    return converted


def _check_text(key: str, text: str, origin: str, choices: tuple[str, ...] | None) -> None:
    if choices and text not in choices:
        near = difflib.get_close_matches(text.lower(), choices, n=1, cutoff=0.7)  # a GPU is no slip for `cpu`
        raise RecipeError(
            f"{origin}: `{key}` cannot be {text!r}",
            help=(f"did you mean `{near[0]}`? " if near else "") + f"one of: {', '.join(choices)}",
        )
    if not text.strip() and getattr(Recipe(), key) != "" and key != "stop":
        raise RecipeError(
            f"{origin}: `{key}` is empty", help=f"leave the key out for its default, {getattr(Recipe(), key)!r}"
        )
    if key == "stop" and not text:
        raise RecipeError(
            f"{origin}: `stop` holds an empty text", help="it would end every completion before it starts"
        )


def _check_number(key: str, number: float, origin: str, low: float | None, high: float | None) -> None:
    finite = number == number and abs(number) != float("inf")  # nan differs from itself
    if finite and (low is None or number >= low) and (high is None or number <= high):
        return
    bounds = f"at least {low}" + (f" and at most {high}" if high is not None else "") if finite else "finite"
    raise RecipeError(f"{origin}: `{key}` must be {bounds}, not {number!r}")


_WRONG = object()


def _convert(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (types.UnionType, typing.Union):
        options = [_convert(option, value) for option in get_args(kind)]
        return next((o for o in options if o is not _WRONG), _WRONG)
    if kind is type(None):
        return None if value is None else _WRONG
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            return _WRONG
        items = [_convert(get_args(kind)[0], item) for item in value]
        return _WRONG if _WRONG in items else tuple(items)
    if kind is bool:
        return value if isinstance(value, bool) else _WRONG
    if isinstance(value, bool):
        return _WRONG
    if kind is float:
        try:
            return float(value) if isinstance(value, (int, float)) else _WRONG
        except OverflowError:  # a whole number beyond float is as infinite as 1e999
            return float("inf")
    return value if isinstance(value, kind) else _WRONG


def describe(kind: Any) -> str:
    """A field's type in words: `a whole number`, `text or null`."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(describe(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {describe(get_args(kind)[0]).removeprefix('a ')}s"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}[kind]
