"""Gradients of left-padded rows at the lengths at which masked attention loses them on some cards."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from grpo_portable.training.layout import PaddedRight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("columns", [64, 128, 192, 200, 256, 320, 448])
def test_gradients_are_finite_at_every_length(columns):
    """64 beyond a multiple of 128, torch 2.11 on an H200: NaN when the padding is on the left and masked."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
            num_key_value_heads=3,
        )
    ).to("cuda", torch.bfloat16)  # fmt: skip
    add_fused_lm_head(model)
    ids = torch.randint(3, 512, (8, columns), device="cuda")
    mask = torch.ones_like(ids)
    for row in range(1, 8):
        mask[row, : 5 * row] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : columns // 2] = -100

    def not_finite(call):
        model.zero_grad()
        call(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs.sum().backward()
        return [name for name, p in model.named_parameters() if not torch.isfinite(p.grad).all()]

    print(f"{columns} columns, masked on the left: not finite {not_finite(model) or 'nowhere'}")
    assert not_finite(PaddedRight(model)) == []
