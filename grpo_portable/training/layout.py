"""Rows as a model sees them while it learns: real tokens first, padding last, and no mask.

TRL pads prompts on the left and masks what is padded. A padded query then has no key at all, and a kernel that mistakes such
rows loses the whole gradient: cuDNN's backward pass, which torch 2.11 prefers on H100 and H200, gives NaN for them whenever a
batch is 64 tokens longer than a multiple of 128. Padding on the right needs no mask, since no real token looks to its right.
So there are no such rows, attention runs on its causal kernels, which need no keys repeated for each head of a group, and
positions count from the prompt's first token, as in every rollout engine.

Legend: B rows, S columns, of which W are real in the longest row.
"""

from __future__ import annotations

from typing import Any

import torch


class PaddedRight:
    """Calls `model`, which scores labels by TRL's fused head, on rows moved to the left edge; its answer comes back as if
    they had stayed where they were.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **more: Any
    ) -> Any:
        """The model's output with log_probs and the like (B, S - 1). `attention_mask`: 1 on each row's unbroken real part."""
        columns = input_ids.size(1)
        start = attention_mask.long().argmax(1, keepdim=True)
        width = max(2, int(attention_mask.sum(1).max()))
        moved = (torch.arange(width, device=input_ids.device) + start) % columns
        if more.get("output_router_logits"):  # a router's balance is counted over real tokens only
            more["attention_mask"] = attention_mask.gather(1, moved)
        out = self.model(input_ids=input_ids.gather(1, moved), labels=labels.gather(1, moved), **more)
        back = torch.arange(columns - 1, device=input_ids.device) - start
        inside = (back >= 0) & (back < width - 1)
        back = back.clamp(0, width - 2)
        for name in ("log_probs", "entropy", "is_top1", "label_mask"):
            value = getattr(out, name, None)
            if value is not None:
                setattr(out, name, torch.where(inside, value.gather(1, back), torch.zeros_like(value[:, :1])))
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
