"""An export, loaded again from its files, answers held-out questions: does it say what the run's tuned model said?

Greedy answers, through the run's own prompt builder, stop rules and token limit, are compared with the saved ones in
generations/tuned.jsonl. Texts may part at a near tie (another number format, another card); answers should not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_portable.answers import judge
from grpo_portable.data import sets
from grpo_portable.errors import ExportError
from grpo_portable.export.gguf_file import family_of
from grpo_portable.models import policy, prompts
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.run.folder import RunFolder, read_lines

ENOUGH = 0.5  # share of equal answers below which an export is called broken


@dataclass(frozen=True)
class Answered:
    """One question: the gold answer, what the run's tuned model said, what the export says (None: no answer read)."""

    id: str
    gold: str
    saved: str | None
    now: str | None
    saved_right: bool
    now_right: bool
    same_text: bool

    @property
    def same(self) -> bool:
        """The same answer; where neither has one, the same text: two kinds of nonsense are not the same."""
        return self.saved == self.now and (self.saved is not None or self.same_text)


@dataclass(frozen=True)
class Check:
    """All questions asked; `how` says what was loaded and how."""

    answers: tuple[Answered, ...]
    how: str

    @property
    def same(self) -> int:
        return sum(a.same for a in self.answers)

    @property
    def same_text(self) -> int:
        return sum(a.same_text for a in self.answers)

    def sentence(self) -> str:
        """The outcome in one sentence."""
        n = len(self.answers)
        was, now = sum(a.saved_right for a in self.answers), sum(a.now_right for a in self.answers)
        return (
            f"{self.same} of {n} answers are the run's own, {self.same_text} of them word for word; "
            f"right were {was} in the run and {now} here"
        )

    def require(self, what: str) -> None:
        """ExportError when most answers are other ones."""
        if self.answers and self.same < ENOUGH * len(self.answers):
            raise ExportError(
                f"the {what} does not answer as the run's tuned model did",
                because=self.sentence(),
                help="do not use it",
            )


def check(run: RunFolder, model: Any, tokenizer: Any, *, count: int, how: str) -> Check:
    """Ask `model` the first `count` questions that the run's tuned model answered."""
    from grpo_portable.rollout import portable

    recipe = run.recipe()
    saved = list(read_lines(run.generations("tuned")))[:count]
    if not saved:
        raise ExportError(
            "there is nothing to compare with", because="generations/tuned.jsonl is empty", help="or say --check 0"
        )
    builder = builder_of(recipe, tokenizer, model)
    asked = [builder.ids(str(record["question"])) for record in saved]
    engine = portable.make(model, tokenizer, rows=len(asked), copy="none")
    sampling = Sampling(
        max_tokens=recipe.max_completion_tokens,
        temperature=0.0,
        stop_ids=builder.stop_ids,
        stop_strings=recipe.stop,
    )
    try:
        engine.sync(model)
        groups = engine.generate(asked, 1, sampling)
    finally:
        engine.close()
    texts = [prompts.completion_text(tokenizer, group[0].token_ids, builder.stop_ids) for group in groups]
    return Check(tuple(_answered(r, text, recipe) for r, text in zip(saved, texts, strict=True)), how)


def builder_of(recipe: Recipe, tokenizer: Any, model: Any) -> prompts.PromptBuilder:
    """The run's prompt builder on this tokenizer, worked examples included."""
    shots: Sequence[Any] = ()
    if recipe.few_shot:
        trained = sets.gather(recipe, trains=False).train  # without what is held out, as the run drew them
        shots = prompts.choose_shots(trained.questions, recipe.few_shot, recipe.seed) if trained else ()
    return prompts.builder(tokenizer, recipe, shots=shots, generation_stop_ids=prompts.generation_stop_ids(model))


def load_gguf(file: Path, config: Any) -> Any:
    """The model in a GGUF file as float32, read by transformers; `config` is the one it was written from."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # the configuration is given: transformers reads neither Llama 3's frequency factors nor every head size from the file
    fields = {key: value for key, value in config.to_dict().items() if key not in ("architectures", "model_type")}
    arch = family_of(config).arch  # Mistral's files are of Llama's kind, and so is what is computed without a window
    given = AutoConfig.for_model(arch, **fields)
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, config=given, dtype=torch.float32, trust_remote_code=False
    )
    return policy.dense_copy(model).eval()


def _answered(record: dict[str, Any], text: str, recipe: Recipe) -> Answered:
    gold, style, before = str(record["gold"]), recipe.answer_style, str(record.get("completion") or "")
    return Answered(
        str(record["id"]),
        gold,
        judge.extracted(before, gold, style),
        judge.extracted(text, gold, style),
        bool(judge.correct(before, gold, style)),
        bool(judge.correct(text, gold, style)),
        text == before,
    )
