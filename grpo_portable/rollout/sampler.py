"""From logits to one token a row and its log-probability.

A token is drawn by inverting the cumulative distribution at one uniform number a row and step: `noise[row, position]`, which
depends on nothing but the request's seed and number (`requests.noises`) and the position. So a row's tokens do not depend on
which rows it shares a batch with, no V-sized noise is made, and the drawn token's log-probability falls out of the same
softmax. The cumulative sum is taken over blocks of the vocabulary first and inside one block after, both in float64.

Order of the operations, as in transformers: repetition penalty, temperature, top-k, top-p, min-p.
Legend: N rows, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_portable.rollout.protocol import Sampling


@dataclass(frozen=True)
class Drawing:
    """The part of `Sampling` that shapes the distribution: one captured graph serves one Drawing."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    penalty: float

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def drawing_of(sampling: Sampling) -> Drawing:
    if sampling.temperature == 0:  # nothing but the penalty moves an argmax
        return Drawing(0.0, 1.0, 0, 0.0, sampling.repetition_penalty)
    return Drawing(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)


def draw(
    logits: torch.Tensor, noise: torch.Tensor, drawing: Drawing, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N] and their log-probabilities [N] (float32) from logits [N, V] and uniform noise [N] in [0, 1), float64.

    `seen` [N, V] marks the tokens of prompt and completion so far; only a repetition penalty reads it.
    """
    if seen is not None and drawing.penalty != 1:
        logits = penalised(logits.float(), seen, drawing.penalty)
    if drawing.greedy:
        tokens = logits.argmax(-1)
        chosen = logits.gather(-1, tokens[:, None])[:, 0].float()
        return tokens, chosen - torch.logsumexp(logits.float(), -1)
    if drawing.temperature != 1:
        logits = logits.float() / drawing.temperature
    weights = torch.softmax(logits, -1, dtype=torch.float32)
    if drawing.truncates:
        weights = truncated(weights, drawing)
    return invert(weights, noise)


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits of seen tokens divided by the penalty where positive, multiplied where negative."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncated(weights: torch.Tensor, drawing: Drawing) -> torch.Tensor:
    """Weights [N, V] with the tokens that top-k, top-p and min-p leave out set to zero; not renormalised."""
    if drawing.top_k > 0 or drawing.top_p < 1:
        keep = min(drawing.top_k, weights.shape[-1]) if drawing.top_k > 0 else weights.shape[-1]
        kept, index = (
            torch.topk(weights, keep, dim=-1)
            if drawing.top_k > 0
            else torch.sort(weights, dim=-1, descending=True, stable=True)
        )
        if drawing.top_p < 1:
            before = kept.double().cumsum(-1)
            before = (before - kept) / before[:, -1:]
            kept = kept * (before < drawing.top_p)
        weights = torch.zeros_like(weights).scatter_(-1, index, kept)
    if drawing.min_p > 0:
        weights = weights * (weights >= drawing.min_p * weights.amax(-1, keepdim=True))
    return weights


def invert(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token at which the cumulative sum of weights [N, V] passes noise [N] times its total, and log(weight / total)."""
    rows, vocab = weights.shape
    size = block_size(vocab)
    if vocab % size:
        weights = torch.nn.functional.pad(weights, (0, size - vocab % size))
    blocks = weights.view(rows, -1, size)
    sums = blocks.sum(-1).double().cumsum(-1)
    total = sums[:, -1:]
    aim = noise[:, None] * total
    block = _passing(sums, aim)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_min(0)), torch.zeros_like(aim))
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, size))[:, 0]
    offset = _passing(inside.double().cumsum(-1), aim - before)
    logprobs = torch.log(inside.gather(-1, offset).double() / total)
    return (block * size + offset)[:, 0], logprobs[:, 0].float()


def _passing(cumulative: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """First index [N, 1] whose cumulative sum exceeds the aim; never one past the last that adds anything (rounding)."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum((cumulative <= aim).sum(-1, keepdim=True), last)


def block_size(vocab: int) -> int:
    """Width of the blocks of the two-level sum: near the square root, a divisor of the vocabulary when there is one."""
    root = max(1, int(vocab**0.5))
    divisors = [d for d in range(max(1, root // 4), 4 * root + 1) if vocab % d == 0]
    return min(divisors, key=lambda d: abs(d - root), default=root)


def uniform(noises: Sequence[tuple[int, int]], length: int) -> np.ndarray:
    """Noise [len(noises), length] in [0, 1), float64: row r is that of (seed, number) r, whatever else is asked for."""
    # typed, since a list with a number from 2^63 on is taken for floats, which near seeds share
    keys = [np.array([seed & (2**64 - 1), number], dtype=np.uint64) for seed, number in noises]
    rows = [np.random.Generator(np.random.Philox(key=key)).random(length) for key in keys]
    return np.stack(rows) if rows else np.zeros((0, length))
