"""The reference engine: transformers' own `generate`. Slow, and right for every model transformers runs.

It is what the portable engine is tested against, and what takes over for a model that the portable engine does not know.
Truncation is done by transformers' own processors, so the two share no sampling code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grpo_portable.errors import EngineError
from grpo_portable.rollout.protocol import Completion, Sampling, TokenIds, silent
from grpo_portable.rollout.requests import check
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
        check(prompts, n, sampling, getattr(model.config, "max_position_embeddings", 1 << 30), vocab)
        groups: list[list[Completion]] = [[] for _ in prompts]
        with _sampling_mode(model, sampling.seed):
            for batch in _batches(prompts, n, self.rows, alike=sampling.repetition_penalty != 1):
                for (index, _), rows in zip(
                    batch, self._run(model, [prompts[i] for i, _ in batch], batch[0][1], sampling), strict=True
                ):
                    groups[index].extend(rows)
        return groups

    def _run(self, model: Any, prompts: list[TokenIds], count: int, sampling: Sampling) -> list[list[Completion]]:
        device, width = model.get_input_embeddings().weight.device, max(map(len, prompts))
        pad = self._pad(sampling)
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        recorder, drawn = _Recorder(_processors(sampling), self.tick), count if sampling.temperature > 0 else 1
        strings = StopStrings(sampling.stop_strings, self.tokenizer) if sampling.stop_strings else None
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=_config(model, sampling, drawn, pad),
            logits_processor=[recorder],
            stopping_criteria=[] if strings is None else [_AtStrings(strings, width)],
        )
        recorder.note(out)
        tokens, logprobs = out[:, width:].tolist(), torch.stack(recorder.logprobs, 1).tolist()
        rows = [self._completion(t, p, sampling) for t, p in zip(tokens, logprobs, strict=True)]
        return [
            rows[i : i + drawn] * (count // drawn) for i in range(0, len(rows), drawn)
        ]  # greedy: one answer, repeated

    def _completion(self, tokens: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        end = next((i + 1 for i, token in enumerate(tokens) if token in sampling.stop_ids), None)
        if sampling.stop_strings:
            by_text = StopStrings(sampling.stop_strings, self.tokenizer).end(tokens[:end])
            end = by_text if by_text is not None else end
        return Completion(tuple(tokens[:end]), tuple(logprobs[:end]), "length" if end is None else "stop")

    def _pad(self, sampling: Sampling) -> int:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else (sampling.stop_ids[0] if sampling.stop_ids else 0)


class _Recorder:
    """A logits processor that applies the others and keeps the log-probability of the token drawn from what they leave.

    The token drawn from one call's scores is the last input of the next call, so only one step of scores is ever held.
    """

    def __init__(self, processors: Sequence[Any], tick: Callable[[], None] = silent) -> None:
        self.processors, self.tick = processors, tick
        self.logprobs: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.note(input_ids)
        self.tick()
        scores = scores.float()
        for processor in self.processors:
            scores = processor(input_ids, scores)
        self._last = torch.log_softmax(scores, -1)
        return scores

    def note(self, input_ids: torch.Tensor) -> None:
        if self._last is not None:
            self.logprobs.append(self._last.gather(-1, input_ids[:, -1:])[:, 0])
        self._last = None


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


def _config(model: Any, sampling: Sampling, count: int, pad: int) -> Any:
    from transformers import GenerationConfig

    whole: dict[str, Any] = (
        {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        if sampling.temperature > 0
        else {"do_sample": False}
    )
    return GenerationConfig(
        **whole,
        max_new_tokens=sampling.max_tokens,
        num_return_sequences=count,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=pad,
        bos_token_id=getattr(model.config, "bos_token_id", None),
    )


def _batches(prompts: Sequence[TokenIds], n: int, rows: int, *, alike: bool) -> Iterator[list[tuple[int, int]]]:
    """Batches of (prompt, completions), at most `rows` completions each; `alike` keeps different lengths apart."""
    if n > rows:
        for index in range(len(prompts)):
            for start in range(0, n, rows):
                yield [(index, min(rows, n - start))]
        return
    batch: list[tuple[int, int]] = []
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if batch and ((len(batch) + 1) * n > rows or (alike and len(prompts[index]) != len(prompts[batch[0][0]]))):
            yield batch
            batch = []
        batch.append((index, n))
    if batch:
        yield batch


@contextmanager
def _sampling_mode(model: Any, seed: int | None) -> Iterator[None]:
    """Eval mode (no dropout, no gradient checkpointing) and, with a seed, generators of its own; both as before afterwards."""
    was_training = model.training
    model.eval()
    devices = [model.get_input_embeddings().weight.device.index or 0] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        model.train(was_training)
