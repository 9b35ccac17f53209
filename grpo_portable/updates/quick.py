"""The short ways of an update that leave its results as they are: no walks through all modules, no kernel launched in vain."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from grpo_portable.models import policy
from grpo_portable.models.shard import is_spread
from grpo_portable.training.trl_trainer import short_ways
from grpo_portable.updates.few_kernels import few_kernels, fused_attention
from grpo_portable.updates.walks import short_walks


class QuickUpdates:
    """To be put before a Trainer's class. `own_layers`: the model's layers are a backend's, as Unsloth's are, and stay."""

    model: Any
    accelerator: Any
    own_layers = False
    _trained: dict[str, torch.nn.Parameter] | None = None

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """`models.policy.trainable` of the model; while it trains without looking for them again."""
        return policy.trainable(self.model) if self._trained is None else self._trained

    def train(self, *args: Any, **named: Any) -> Any:
        """Train, with the short ways that results allow: fewer walks anywhere, fewer kernels where launching them costs."""
        self._trained = policy.trainable(self.model)
        try:
            attention = fused_attention(self.accelerator.device)
            with short_ways(), short_walks(self.model), attention, self._kernels() as replaced:
                if replaced is not None:
                    self._note_replaced(replaced)
                return super().train(*args, **named)  # type: ignore[misc]
        finally:
            self._trained = None

    def floating_point_ops(self, inputs: Any) -> int:
        """0: nobody reads the sum, and counting walks through all parameters in every micro-batch."""
        return 0

    def _kernels(self) -> contextlib.AbstractContextManager[Any]:
        """`few_kernels` on a GPU, unless layers are a backend's own or weights come and go in parts."""
        # on a CPU the arithmetic dominates, and runs stay bit for bit what they were
        on_gpu = self.accelerator.device.type == "cuda"
        wanted = on_gpu and not self.own_layers and not is_spread(self.model)
        return few_kernels(self.model) if wanted else contextlib.nullcontext()

    def _note_replaced(self, replaced: dict[str, int]) -> None:
        """A subclass keeps what `few_kernels` gave; what is 0 was not trusted here."""
