"""The one protocol of every rollout engine: prompts in, groups of completions out.

Legend: B prompts, G completions a prompt (the group), N = B*G rows, P prompt tokens, T completion tokens, V vocabulary.
Torch-free: engines live in `portable.py`, `vllm.py` and `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

TokenIds = Sequence[int]
# Nats a token that a sampler may be from the policy: a factor of 1.28 at every token, far beyond what number formats do.
APART = 0.25


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave the distribution whole."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()  # a drawn stop id ends the row and is kept as its last token
    stop_strings: tuple[str, ...] = ()  # a row ends once its decoded text holds one; tokens up to that point are kept
    seed: int | None = None  # of a whole call: what is drawn then depends on a completion's place in it
    seeds: tuple[int, ...] = ()  # or one a prompt: its completions draw the same noise in whatever call they are made


@dataclass(frozen=True)
class Completion:
    """One row: T token ids, the sampler's log-probability of each, and why it ended.

    `logprobs` are of the distribution that was sampled: after temperature, penalties and truncation (for greedy: of the
    untempered distribution), so that an importance ratio against the trainer's log-probabilities is well defined.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str  # stop | length


class Rollout(Protocol):
    """An engine bound to one policy.

    Of its own it raises EngineError (or EngineUnsupported), after which a lower path may go on, and a UsageError where none
    could: DataError for a request that no engine can serve (`requests.check`), ServerError for a server set up otherwise.
    """

    name: str

    def generate(self, prompts: Sequence[TokenIds], n: int, sampling: Sampling) -> list[list[Completion]]:
        """`n` completions of each prompt, in the order of the prompts: B lists of G completions."""

    def sync(self, policy: Any) -> None:
        """Take over the policy's current weights; the very next `generate` uses them."""

    def close(self) -> None:
        """Free what the engine holds; the policy is left as it was before the engine was made."""


def silent() -> None:
    """What `tick` is while nobody listens."""


@runtime_checkable
class Ticking(Protocol):
    """An engine that calls `tick` every few tokens: a long rollout is no hang."""

    tick: Callable[[], None]


@runtime_checkable
class Holding(Protocol):
    """An engine that can say what memory it holds beside the policy's."""

    def holds(self) -> dict[str, float | None]:
        """GiB by part: `weights` of its own (0 where it reads the policy's), `kv_cache` the largest so far. None: not known."""


@runtime_checkable
class Resting(Protocol):
    """An engine with weights of its own, which can give its memory back while the policy is updated."""

    def describe(self) -> dict[str, Any]:
        """For run.json: its number format, memory and seconds to start."""

    def rest(self) -> None:
        """Let go of what the update needs; the next `sync` or `generate` takes it again."""
