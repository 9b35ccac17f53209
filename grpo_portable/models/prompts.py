"""The one prompt builder: a question → the token ids the model sees, the same for training, bootstrap and evaluation.

With a chat template the question becomes messages (system, worked examples, user) and the template writes the text; without one
it is plain text. `stop_ids` and `completion_text` are here too, so that both sides also agree on where an answer ends.
Torch-free: works on a tokenizer object and imports nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_portable.answers.extractor import START_WORKING
from grpo_portable.data.questions import Question
from grpo_portable.data.worked import target
from grpo_portable.errors import DataError, RecipeError
from grpo_portable.recipe import Recipe, is_template

LITTLE_ROOM = 1024  # tokens an answer to a contest problem should have at least
_MARK = "TEXT-STANDS-HERE"  # stands for an assistant's text, or a question, when a template is looked at


@dataclass(frozen=True)
class PromptBuilder:
    """Turns questions into prompts. `template` is Jinja text, None for plain text; `shots` are worked examples."""

    tokenizer: Any
    template: str | None
    system_prompt: str
    prompt_template: str
    enable_thinking: bool | None
    shots: tuple[Question, ...]
    generation_stop_ids: tuple[int, ...]
    style: str = "gsm8k_marker"
    folded: str | None = None  # why the system text stands in the user's turn, None when it has a turn of its own

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation that ends with the question."""
        turns = []
        for shot in self.shots:
            turns.append({"role": "user", "content": self._asked(shot.question)})
            turns.append({"role": "assistant", "content": target(shot, self.style)})
        turns.append({"role": "user", "content": self._asked(question)})
        if self.system_prompt and self.folded is not None:
            turns[0]["content"] = f"{self.system_prompt}\n\n{turns[0]['content']}"
        elif self.system_prompt:
            turns.insert(0, {"role": "system", "content": self.system_prompt})
        return turns

    def text(self, question: str) -> str:
        """The whole prompt as text, as far as the point where the model goes on."""
        if self.template is not None:
            return self._rendered(self.messages(question), generation_prompt=True)
        parts = [self.system_prompt] if self.system_prompt else []
        parts += [self._asked(shot.question) + target(shot, self.style) for shot in self.shots]
        return "\n\n".join([*parts, self._asked(question)])

    def ids(self, question: str) -> tuple[int, ...]:
        """The prompt's token ids (P,). A chat template writes its own start token; plain text gets the tokenizer's."""
        ids = self.tokenizer(self.text(question), add_special_tokens=self.template is None)["input_ids"]
        if self.template is None and ids and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers close every text; the model would take the answer as already given
        return tuple(ids)

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends an answer: the one the template puts after an assistant's text, else the end token."""
        if self.template is not None:
            turns = [{"role": "user", "content": self._asked("?")}, {"role": "assistant", "content": _MARK}]
            tail = self._rendered(turns, generation_prompt=False).rpartition(_MARK)[2]
            ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
            if ids and ids[0] in self.tokenizer.all_special_ids:
                return ids[0]
        return self.tokenizer.eos_token_id

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion: the tokenizer's end token, the template's, the generation config's."""
        wanted = (self.tokenizer.eos_token_id, self.turn_end_id, *self.generation_stop_ids)
        return tuple(dict.fromkeys(i for i in wanted if i is not None))

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the prompt itself ends with the tag that opens the reasoning, so that a completion starts inside it."""
        return self.text("?").rstrip().endswith(START_WORKING)

    def target_ids(self, question: Question) -> tuple[int, ...]:
        """The token ids of the worked answer, end token included: what the bootstrap teaches after `ids`."""
        text = target(question, self.style, opened=self.opens_reasoning)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return (*ids, self.turn_end_id) if self.turn_end_id is not None else tuple(ids)

    def describe(self, question: str) -> dict[str, Any]:
        """How prompts are built, with one rendered example, for the report."""
        return {
            "chat_template": self.template is not None,
            "few_shot": len(self.shots),
            "system_in_user_turn": self.folded,
            "stop": [self.tokenizer.decode([i]) for i in self.stop_ids],
            "example": self.text(question),
            "example_tokens": len(self.ids(question)),
        }

    def _asked(self, question: str) -> str:
        return self.prompt_template.replace("{question}", question)

    def _rendered(self, turns: list[dict[str, str]], *, generation_prompt: bool) -> str:
        known = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt, chat_template=self.template, **known
            )
        # a template is a program of the model's author or the user: whatever it raises, the cause is the template
        except Exception as error:
            raise RecipeError(
                "the chat template cannot write this conversation",
                because=next(iter(str(error).splitlines()), type(error).__name__),
                help="leave system_prompt empty if the template has no system role, or set chat_template to `none` or a file",
            ) from error


@dataclass(frozen=True)
class Fitted:
    """Questions with their prompts, and how many were left out: over the limit, or above the percentile."""

    questions: tuple[Question, ...]
    prompts: tuple[tuple[int, ...], ...]
    over_length: int
    over_percentile: int


def builder(
    tokenizer: Any, recipe: Recipe, *, shots: Sequence[Question] = (), generation_stop_ids: Sequence[int] = ()
) -> PromptBuilder:
    """The prompt builder of a recipe. RecipeError when its chat template is missing or cannot be used."""
    if recipe.chat_template == "none":
        template = None
    elif recipe.chat_template == "auto":
        template = tokenizer.chat_template
        if isinstance(template, Mapping):  # some tokenizers name several
            template = template.get("default") or next(iter(template.values()), None)
    elif is_template(recipe.chat_template):
        template = recipe.chat_template
    else:
        template = _template_file(recipe.chat_template)
    if tokenizer.eos_token_id is None and not generation_stop_ids:
        raise RecipeError("the tokenizer names no end token", because="a completion could never end")
    made = PromptBuilder(
        tokenizer,
        template,
        recipe.system_prompt,
        recipe.prompt_template,
        recipe.enable_thinking,
        tuple(shots),
        tuple(generation_stop_ids),
        recipe.answer_style,
    )
    made = _folded_if_needed(made)
    if template is not None and _MARK not in made.text(_MARK):
        raise RecipeError(
            "the chat template leaves the question out",
            because=f"of a user's turn that holds a question it makes {made.text(_MARK)[:120]!r}",
            help="set chat_template to `auto`, `none` or another Jinja file",
        )
    return made


def _folded_if_needed(made: PromptBuilder) -> PromptBuilder:
    """The builder with its system text in the first user turn, where the template refuses a system turn or drops it."""
    if made.template is None or not made.system_prompt:
        return made
    try:
        if " ".join(made.system_prompt.split()) in " ".join(made.text("?").split()):
            return made
        because = "the chat template leaves a system message out"
    except RecipeError as error:
        because = f"the chat template refuses a system message ({error.because})"
    folded = replace(made, folded=because)
    try:
        folded.text("?")
    except RecipeError:
        return made  # the template fails either way: its own error is told when it is used
    return folded


def fit(questions: Sequence[Question], builder: PromptBuilder, *, max_tokens: int, percentile: float = 100.0) -> Fitted:
    """Leave out prompts longer than `max_tokens`, and those above the percentile of length of the rest.

    DataError when nothing is left.
    """
    pairs = [(q, builder.ids(q.question)) for q in questions]
    short = [pair for pair in pairs if 0 < len(pair[1]) <= max_tokens]
    lengths = sorted(len(ids) for _, ids in short)
    limit = lengths[max(0, math.ceil(percentile / 100 * len(lengths)) - 1)] if lengths else max_tokens
    kept = [pair for pair in short if len(pair[1]) <= limit]
    if not kept:
        shortest = min((len(ids) for _, ids in pairs), default=0)
        raise DataError(
            f"all {len(pairs)} prompts are longer than max_prompt_tokens {max_tokens}",
            because=f"the shortest has {shortest} tokens",
            help=f"set max_prompt_tokens to {shortest} or more",
        )
    return Fitted(
        tuple(q for q, _ in kept),
        tuple(ids for _, ids in kept),
        len(pairs) - len(short),
        len(short) - len(kept),
    )


def answer_room(recipe: Recipe, fitted: Fitted) -> int:
    """Tokens an answer may have: max_completion_tokens, or with context_tokens what the longest kept prompt leaves of it.

    DataError when nothing is left.
    """
    if not recipe.context_tokens:
        return recipe.max_completion_tokens
    longest = max(len(ids) for ids in fitted.prompts)
    room = min(recipe.max_completion_tokens, recipe.context_tokens - longest)
    if room < 1:
        raise DataError(
            f"the longest prompt has {longest} tokens of the {recipe.context_tokens} of context_tokens",
            because="nothing is left for an answer",
            help="raise context_tokens, or lower max_prompt_tokens or prompt_percentile",
        )
    return room


def choose_shots(questions: Sequence[Question], count: int, seed: int) -> tuple[Question, ...]:
    """The worked examples of a run, drawn by `seed`; they must then be left out of the training questions."""
    return tuple(random.Random(f"shots {seed}").sample(list(questions), count))


def completion_text(tokenizer: Any, ids: Sequence[int], stop_ids: Sequence[int]) -> str:
    """A completion as text without the end tokens at its end; special tokens inside it stay to be seen."""
    end = len(ids)
    while end and ids[end - 1] in stop_ids:
        end -= 1
    return tokenizer.decode(list(ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def generation_stop_ids(model: Any) -> tuple[int, ...]:
    """The end tokens a model's generation config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if named is None else (named,) if isinstance(named, int) else tuple(named)


def _template_file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"chat template `{name}` cannot be read", because=str(error), help="`auto`, `none`, or a Jinja file"
        ) from error
