"""The reference engine: transformers' own `generate`. Slow, and right for every model transformers runs.

It is what the portable engine is tested against, and what takes over for a model that the portable engine does not know.
Truncation is done by transformers' own processors and the draw is written anew, so the two share nothing but the noise: with
the same seeds they draw the same tokens, but where rounding decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from grpo_portable.errors import EngineError
from grpo_portable.rollout.protocol import Completion, Sampling, TokenIds, silent
from grpo_portable.rollout.requests import check, noises, seeded
from grpo_portable.rollout.sampler import uniform
from grpo_portable.rollout.stops import StopStrings


class ReferenceRollout:
    """An engine bound to one policy, whose module it runs as it stands. `because` says why it was chosen over another."""

    name = "reference"

    def __init__(self, policy: Any, tokenizer: Any, *, rows: int, because: str | None = None) -> None:
        self.policy, self.tokenizer, self.rows, self.because = policy, tokenizer, rows, because
        self.tick = silent

    def sync(self, policy: Any) -> None:
        self.policy = policy

    def close(self) -> None:
        self.policy = None

    @torch.no_grad()
    def generate(self, prompts: Sequence[TokenIds], n: int, sampling: Sampling) -> list[list[Completion]]:
        if self.policy is None:
            raise EngineError("this engine was closed")
        model = getattr(self.policy, "module", self.policy)
        vocab = model.get_input_embeddings().weight.shape[0]
        context = getattr(model.config, "max_position_embeddings", 1 << 30)
        check(prompts, n, sampling, context, vocab)
        drawn = n if sampling.temperature > 0 else 1
        asked = [prompt for prompt in prompts for _ in range(drawn)]
        noise = self._noise(sampling, len(prompts), drawn)
        made: dict[int, Completion] = {}
        lengths = [len(p) for p in asked]
        # where the context ends some sooner, a batch's rows must end together: the model may have no position beyond it
        alike = sampling.repetition_penalty != 1 or max(lengths, default=0) + sampling.max_tokens > context
        with _at_rest(model):
            for batch in _batches(lengths, self.rows, alike=alike):
                of_batch = [noise[i] for i in batch] if noise else None
                room = min(sampling.max_tokens, context - max(lengths[i] for i in batch))
                within = replace(sampling, max_tokens=room)
                made |= zip(batch, self._run(model, [asked[i] for i in batch], of_batch, within), strict=True)
        return [[made[i + k] for k in range(drawn)] * (n // drawn) for i in range(0, len(asked), drawn)]

    def _noise(self, sampling: Sampling, prompts: int, drawn: int) -> list[tuple[int, int]] | None:
        """What each completion's noise is made of, None where nothing is drawn."""
        if sampling.temperature == 0:
            return None
        return noises(seeded(sampling), prompts, drawn)

    def _run(
        self, model: Any, prompts: list[TokenIds], noise: list[tuple[int, int]] | None, sampling: Sampling
    ) -> list[Completion]:
        device, width = model.get_input_embeddings().weight.device, max(map(len, prompts))
        pad = self._pad(sampling)
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        numbers = None if noise is None else torch.from_numpy(uniform(noise, sampling.max_tokens)).to(device)
        chooser = _Chooser(_processors(sampling), numbers, self.tick)
        strings = StopStrings(sampling.stop_strings, self.tokenizer) if sampling.stop_strings else None
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=_config(model, sampling, pad, model.get_input_embeddings().num_embeddings),
            logits_processor=[chooser],
            stopping_criteria=[] if strings is None else [_AtStrings(strings, width)],
        )
        tokens, logprobs = out[:, width:].tolist(), torch.stack(chooser.logprobs, 1).tolist()
        return [self._completion(t, p, sampling) for t, p in zip(tokens, logprobs, strict=True)]

    def _completion(self, tokens: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        end = next((i + 1 for i, token in enumerate(tokens) if token in sampling.stop_ids), None)
        if sampling.stop_strings:
            by_text = StopStrings(sampling.stop_strings, self.tokenizer).end(tokens[:end])
            end = by_text if by_text is not None else end
        if not all(map(math.isfinite, logprobs[:end])):
            raise EngineError(
                "the model gave logits that are not numbers", help="check the weights: a diverged policy does this"
            )
        return Completion(tuple(tokens[:end]), tuple(logprobs[:end]), "length" if end is None else "stop")

    def _pad(self, sampling: Sampling) -> int:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else (sampling.stop_ids[0] if sampling.stop_ids else 0)


class _Chooser:
    """A logits processor that applies the others, chooses each row's token from what they leave, and leaves it alone possible.

    `noise` [N, T] in [0, 1): row i's numbers, by which the cumulative distribution is inverted; None takes the likeliest token.
    """

    def __init__(
        self, processors: Sequence[Any], noise: torch.Tensor | None = None, tick: Callable[[], None] = silent
    ) -> None:
        self.processors, self.noise, self.tick = processors, noise, tick
        self.logprobs: list[torch.Tensor] = []  # of the tokens chosen, one [N] a step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tick()
        scores = scores.float()
        for processor in self.processors:
            scores = processor(input_ids, scores)
        logprobs = torch.log_softmax(scores, -1)
        if self.noise is None:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            tokens = _inverted(logprobs.double().exp(), self.noise[:, len(self.logprobs), None])
        self.logprobs.append(logprobs.gather(-1, tokens)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, 0.0)


def _inverted(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The token [N, 1] at which the cumulative sum of probabilities [N, V] passes noise [N, 1] times its total."""
    sums = probabilities.cumsum(-1)
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)  # none after it has a probability
    return torch.minimum((sums <= noise * sums[:, -1:]).sum(-1, keepdim=True), last)


class _AtStrings:
    """A stopping criterion: rows whose completion holds a stop string (transformers' own looks into the prompt as well)."""

    def __init__(self, strings: StopStrings, width: int) -> None:
        self.strings, self.width = strings, width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        made = input_ids[:, self.width :].tolist()
        ended = [self.strings.end(row, len(row) - 1) is not None for row in made]
        return torch.tensor(ended, device=input_ids.device)


def _processors(sampling: Sampling) -> list[Any]:
    from transformers.generation import logits_process as lp

    chain: list[Any] = []
    if sampling.repetition_penalty != 1:
        chain.append(lp.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return chain
    if sampling.temperature != 1:
        chain.append(lp.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        chain.append(lp.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(lp.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(lp.MinPLogitsWarper(sampling.min_p))
    return chain


def _config(model: Any, sampling: Sampling, pad: int, vocab: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False,  # `_Chooser` has chosen
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_ids)
        or [vocab],  # one that never comes: without any, the model's own would end rows
        pad_token_id=pad,
        bos_token_id=getattr(model.config, "bos_token_id", None),
    )


def _batches(lengths: Sequence[int], rows: int, *, alike: bool) -> Iterator[list[int]]:
    """The places of `lengths` in batches of at most `rows`, short ones first; `alike` keeps different lengths apart."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) == rows or (alike and lengths[place] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


@contextmanager
def _at_rest(model: Any) -> Iterator[None]:
    """Inside eval mode (no dropout, no gradient checkpointing); as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
