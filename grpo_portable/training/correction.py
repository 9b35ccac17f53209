"""Importance sampling between sampler and trainer, for an engine whose weights or kernels are not the trainer's own.

An FP8 engine draws from a slightly different policy than the one that learns, so each token's gradient is weighted by
min(pi_trainer / pi_sampler, C): truncated importance sampling (Ionides, "Truncated Importance Sampling", Journal of
Computational and Graphical Statistics 17(2), 2008), per token as in Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training" (2025), with their C = 2. TRL's default instead drops whole sequences whose product of ratios
passes 3, which independent noise of 0.05 a token reaches within one standard deviation at 500 tokens.

Legend: N rows, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_portable.errors import EngineError
from grpo_portable.rollout.protocol import APART
from grpo_portable.training.layout import PaddedRight

LIMIT = 2.0  # C
ENOUGH = 256  # tokens from which the mean is trusted


def truncated_ratios(
    trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, limit: float = LIMIT
) -> torch.Tensor:
    """min(exp(trainer - sampler), limit) (N, T); 1 where the mask is 0 or the sampler's log-probability is not a number.

    `trainer`, `sampler`: log-probabilities of the drawn tokens (N, T) under the distributions that learn and that drew.
    """
    difference = torch.nan_to_num((trainer - sampler) * mask, nan=0.0, posinf=0.0, neginf=0.0)
    return difference.exp().clamp(max=limit)


def sums_apart(
    trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, ratios: torch.Tensor, limit: float = LIMIT
) -> torch.Tensor:
    """A `Gap`'s three numbers (3,), float64, over these tokens and where they are: reading them would wait for a GPU.

    `ratios`: their `truncated_ratios` at this limit (N, T).
    """
    difference = ((sampler - trainer) * mask).float()
    seen = mask.bool() & difference.isfinite()
    cut = seen & (ratios >= limit)
    return torch.stack([part.double().sum() for part in (seen, difference.where(seen, 0.0), cut)])


@dataclass(frozen=True)
class Gap:
    """How far sampler and trainer are apart over the tokens of one step."""

    tokens: float = 0.0
    divergence: float = 0.0  # sum of log sampler - log trainer, an estimate of KL(sampler || trainer)
    truncated: float = 0.0

    @classmethod
    def of_all(cls, parts: Iterable[Gap]) -> Gap:
        """The gap over the tokens of several processes."""
        found = list(parts)
        return cls(*(sum(getattr(part, name) for part in found) for name in ("tokens", "divergence", "truncated")))

    def metrics(self) -> dict[str, float]:
        """`sampler_kl` in nats a token, and the share of tokens whose ratio was cut."""
        if not self.tokens:
            return {}
        return {"sampler_kl": self.divergence / self.tokens, "ratio_cut": self.truncated / self.tokens}

    def require_close(self, engine: str, step: int) -> None:
        """EngineError when the engine evidently samples from something else than the policy."""
        apart = self.divergence / max(1, self.tokens)
        if self.tokens >= ENOUGH and apart > APART:
            raise EngineError(
                f"the {engine} engine no longer samples from the policy: {apart:.2f} nats a token apart at step {step}",
                because="its weights or its adapter are not those that learn",
            )


class SamplerCorrection:
    """In front of TRL's GRPOTrainer: measures the gap, and weighs the loss by the truncated ratios if `correct_sampler`.

    TRL computes the trainer's log-probabilities once more under no_grad for its own correction. Where sampling and update
    are aligned they are those of the loss's own forward pass, so the ratios are filled in there and that pass is saved.
    """

    correct_sampler = False
    _apart: torch.Tensor | None = None  # `sums_apart` over the micro-batches since the last `take_gap`
    _learned_from: dict[str, Any] | None = None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._learned_from = inputs
        self.use_vllm = self.correct_sampler  # with it, TRL multiplies the loss by inputs["importance_sampling_ratio"]
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._learned_from, self.use_vllm = None, False

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(PaddedRight(model), *args, **kwargs)  # type: ignore[misc]
        batch = self._learned_from
        if batch is not None:
            old = batch.get("old_per_token_logps")  # there when a rollout is learned from more than once
            given = (
                result[0].detach() if old is None else old,
                batch["sampling_per_token_logps"],
                batch["completion_mask"],
            )
            batch["importance_sampling_ratio"] = ratios = truncated_ratios(*given)
            apart = sums_apart(*given, ratios)
            self._apart = apart if self._apart is None else self._apart + apart
        return result

    def take_gap(self) -> Gap:
        """The gap over the tokens learned from since this was last asked for."""
        apart, self._apart = self._apart, None
        return Gap() if apart is None else Gap(*apart.tolist())
