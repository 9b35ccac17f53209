"""TRL's fused LM head: a plain softmax's log-probabilities, at the cost of the positions with a label, on a CPU too."""

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode
from trl.trainer.utils import add_fused_lm_head

from grpo_portable.training import trl_trainer

# a prompt and an answer; a shorter answer, padded
LABELS = torch.tensor([[-100, -100, 7, 8, 9], [-100, 5, 6, -100, -100]])


@pytest.fixture
def model():
    """A model with TRL's head, as it is while training goes on."""
    made = tiny.model()
    add_fused_lm_head(made, temperature=0.5)
    with trl_trainer.short_ways():
        yield made


def test_values_and_gradients_are_those_of_a_plain_softmax(model):
    ids = LABELS.clamp(min=3)
    fused = model(input_ids=ids, labels=LABELS, fused_lm_head=True).log_probs
    plain = (model(input_ids=ids).logits[:, :-1] / 0.5).log_softmax(-1)
    plain = plain.gather(-1, LABELS[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1) * (LABELS[:, 1:] != -100)
    assert torch.allclose(fused, plain, atol=1e-5) and (fused != 0).sum() == 5
    weight = model.model.layers[0].self_attn.q_proj.weight
    (of_fused,), (of_plain,) = torch.autograd.grad(fused.sum(), weight), torch.autograd.grad(plain.sum(), weight)
    assert torch.allclose(of_fused, of_plain, atol=1e-5)


def test_prompt_and_padding_cost_no_product_with_the_vocabulary(model):
    ids = LABELS.clamp(min=3)

    def flops(labels):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=ids, labels=labels, fused_lm_head=True)
        return counter.get_total_flops()

    vocabulary, hidden = model.lm_head.weight.shape
    everywhere = LABELS.clamp(min=3)  # 2 x 4 next tokens
    assert flops(everywhere) - flops(LABELS) == 2 * (8 - 5) * vocabulary * hidden


def test_a_micro_batch_without_any_label_has_a_gradient_of_zero(model):
    none = torch.full_like(LABELS, -100)
    model(input_ids=LABELS.clamp(min=3), labels=none, fused_lm_head=True).log_probs.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() == 0
