"""What a step leaves of its rows: the drawn token is kept and is the next input, and the row goes on or ends.

Legend: N rows run, R rows held, C steps whose tokens are kept, S stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class State(NamedTuple):
    """Tensors a decoder fills in place: `tokens`, `lengths`, `limits` [R] int64 and `alive` [R]; `stops` [S]; `drawn` and
    `logprobs` [C, R] of the last C steps, the next of which goes to place `tick` [1]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    alive: torch.Tensor
    stops: torch.Tensor
    tick: torch.Tensor
    drawn: torch.Tensor
    logprobs: torch.Tensor


def book(state: State, drawn: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Take in the tokens [N] that were drawn for the first N rows. A row that has ended stands still."""
    rows = drawn.shape[0]
    tokens, lengths, alive = state.tokens[:rows], state.lengths[:rows], state.alive[:rows]
    state.drawn[:, :rows].index_copy_(0, state.tick, drawn[None])
    state.logprobs[:, :rows].index_copy_(0, state.tick, logprobs[None])
    state.tick.add_(1).remainder_(state.drawn.shape[0])
    lengths.add_(alive)
    tokens.copy_(torch.where(alive, drawn, tokens))
    ended = (drawn[:, None] == state.stops).any(1) | (lengths >= state.limits[:rows])
    alive.logical_and_(~ended)
