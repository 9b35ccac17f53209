"""Rows are moved to the left edge for the model and back: the same log-probabilities and gradients, and nothing to mask."""

from types import SimpleNamespace

import tiny
import torch
import training
from torch.overrides import TorchFunctionMode
from trl.trainer.utils import add_fused_lm_head

from grpo_portable.training.layout import PaddedRight

IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 0], [9, 10, 11, 12, 13, 0, 0], [0, 14, 15, 16, 17, 18, 19]])
MASK = (IDS != 0).long()
LABELS = torch.where(torch.arange(7) >= 3, IDS, 0).masked_fill(MASK == 0, -100)
LABELS[:, :3] = -100  # prompts of three columns, answers of up to four


class Attention(TorchFunctionMode):
    """Writes down the mask of every attention that is learnt through; rollouts are not."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            self.masks.append(kwargs.get("attn_mask"))
        return function(*args, **kwargs)


def test_rows_by_hand():
    seen = {}

    def model(input_ids, labels):
        seen.update(ids=input_ids, labels=labels)
        return SimpleNamespace(log_probs=input_ids[:, 1:].float() * 10, entropy=None)

    out = PaddedRight(model)(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    assert seen["ids"].tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 11, 12, 13, 0], [14, 15, 16, 17, 18, 19]]
    assert seen["labels"].tolist() == [
        [-100, 6, 7, 8, -100, -100],
        [-100, -100, -100, 12, 13, -100],
        [-100, -100, 16, 17, 18, 19],
    ]
    # each next token's value stands in the column before it, where it stood without the move
    assert torch.equal(out.log_probs[:, 2:] / 10, IDS[:, 3:].float())


def test_the_same_log_probabilities_and_gradients_as_with_a_mask():
    model = tiny.model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    weight = model.model.layers[0].self_attn.q_proj.weight
    places = (MASK.cumsum(1) - 1).clamp(min=0)

    def scored(call, **more):
        out = call(input_ids=IDS, attention_mask=MASK, labels=LABELS, fused_lm_head=True, **more)
        (gradient,) = torch.autograd.grad(out.log_probs[:, 2:].sum(), weight)
        return out.log_probs[:, 2:], out.entropy[:, 2:], gradient

    for right, left in zip(scored(PaddedRight(model)), scored(model, position_ids=places), strict=True):
        assert torch.allclose(right, left, atol=1e-5) and right.abs().max() > 0


def test_an_update_masks_nothing(tmp_path):
    """A query without a key is what kernels lose gradients over; left padding makes some, a mask is how they are told."""
    made = training.make(tmp_path)
    with Attention() as attention:
        gradients = training.gradients(made)
    assert attention.masks and all(mask is None for mask in attention.masks)
    assert all(torch.isfinite(g).all() for g in gradients.values())


def test_left_padding_would_leave_queries_without_a_key():
    with Attention() as attention:
        tiny.model()(input_ids=IDS, attention_mask=MASK)
    allowed = attention.masks[0]
    assert (~allowed.any(-1)).sum() == 3  # two padded places before the first row, one before the third
