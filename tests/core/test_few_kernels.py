"""Layers in few kernels: the values and gradients of the models' own code, kernels counted, everything put back afterwards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import card_norm
import pytest
import tiny
import torch
import training
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.updates import few_kernels, lora_product
from grpo_portable.updates.lora_product import LoraProduct, lora_products
from grpo_portable.updates.walks import short_walks

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
MOVES_NOTHING = {
    "t",
    "view",
    "detach",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "slice",
    "_unsafe_view",
    "empty_like",
}


class Kernels(TorchDispatchMode):
    """Counts the operations that would be a kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.seen[name] += name not in MOVES_NOTHING
        return function(*args, **(kwargs or {}))


def adapted(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    recipe = replace(Recipe(), lora_rank=4, **changes)
    model = policy.add_adapter(tiny.model().to(dtype), recipe).train()
    torch.manual_seed(1)
    for name, parameter in policy.trainable(model).items():
        if "lora_B" in name:  # zero at first, so that nothing would depend on A
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def learned(model: Any, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in policy.trainable(model).items()}


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float((flat(one) - flat(other)).norm() / flat(other).norm())


def test_the_product_and_its_gradients_by_hand() -> None:
    # y = W x + s B (A x) with W = [[1, 2], [3, 4]], x = (1, 2), A = (1, 1), B = (1, 2)', s = 3: (5, 11) + 3 * 3 * (1, 2)
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    a, b = torch.tensor([[1.0, 1.0]], requires_grad=True), torch.tensor([[1.0], [2.0]], requires_grad=True)
    y = LoraProduct.apply(x, weight, None, a, b, a.detach(), b.detach(), 3.0)
    assert y.tolist() == [[14.0, 29.0]]
    y.sum().backward()  # dy = (1, 1): g = B'dy = 3, dx = W'dy + 3 A'g, dA = 3 g x', dB = 3 dy (A x)'
    assert x.grad is not None and x.grad.tolist() == [[4.0 + 9.0, 6.0 + 9.0]]
    assert a.grad is not None and a.grad.tolist() == [[9.0, 18.0]]
    assert b.grad is not None and b.grad.tolist() == [[9.0], [9.0]]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("alpha", [4.0, 18.0])
def test_a_model_learns_the_same_in_few_kernels(alpha: float, checkpointing: bool) -> None:
    model = adapted(lora_alpha=alpha)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradients = learned(model)
    with few_kernels.few_kernels(model) as replaced:
        fast_loss, fast = learned(model)
    layers = model.config.num_hidden_layers
    assert replaced == {"adapters": 7 * layers, "norms": 2 * layers + 1, "rotary": 1}
    assert fast_loss == pytest.approx(loss, abs=1e-5)
    assert apart(fast, gradients) < 1e-4
    again_loss, again = learned(model)
    assert again_loss == loss and all(torch.equal(again[name], gradients[name]) for name in gradients)


def test_in_bfloat16_the_gradient_is_as_near_to_float32s_as_pefts() -> None:
    model = adapted(torch.bfloat16)
    policy.keep_float32(model)
    exact = adapted()
    exact.load_state_dict(model.state_dict())
    _, truth = learned(exact)
    _, plain = learned(model, torch.bfloat16)
    with few_kernels.few_kernels(model):
        _, fast = learned(model, torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in fast.values())
    assert apart(fast, truth) < 1.5 * apart(plain, truth) < 0.1


def test_an_adapter_costs_three_kernels_forward_and_seven_backward() -> None:
    model = adapted(torch.bfloat16, lora_alpha=4.0)
    policy.keep_float32(model)
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    x = torch.randn(2, 3, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    with lora_products(model), torch.autocast("cpu", torch.bfloat16):
        with Kernels() as forward:
            y = layer(x)
        with Kernels() as backward:
            y.backward(torch.ones_like(y))
    assert +forward.seen == Counter(mm=2, addmm_=1)
    assert backward.seen["mm"] + backward.seen["addmm_"] + backward.seen["_to_copy"] == 7


def test_matrices_changed_past_autograd_are_read_at_the_next_forward_pass() -> None:
    model = adapted(torch.bfloat16)
    policy.keep_float32(model)

    def logits() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=IDS).logits.float()

    with few_kernels.few_kernels(model):
        before = logits()
        for parameter in policy.trainable(model).values():
            parameter.data.mul_(3)  # as optimizers of compiled packages do: no version is counted
        after = logits()
    assert (after - logits()).abs().max() < 0.1 * (after - before).abs().max()


def test_with_the_adapter_off_the_model_is_its_base() -> None:
    model = adapted()
    with torch.no_grad(), policy.without_adapter(model):
        base = model(input_ids=IDS).logits
    with few_kernels.few_kernels(model), torch.no_grad():
        with policy.without_adapter(model):
            assert torch.allclose(model(input_ids=IDS).logits, base, atol=1e-5)
        assert (model(input_ids=IDS).logits - base).abs().max() > 1e-2


@pytest.mark.parametrize("changes", [{"lora_dropout": 0.5}, {"dora": True}])
def test_what_is_no_plain_adapter_stays_pefts(changes: dict[str, Any]) -> None:
    with lora_products(adapted(**changes)) as count:
        assert count == 0


def test_a_kernel_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    norm = model.get_base_model().model.norm
    # a norm of another kind under the same name
    monkeypatch.setattr(type(norm), "forward", lambda self, x: self.weight * x)
    with few_kernels.few_kernels(model) as replaced:
        assert replaced["norms"] == 0


def test_a_norm_whose_gradient_alone_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    norm = model.get_base_model().model.norm
    right = type(norm).forward
    # the same value; a gradient of twice the size, which a gradient along x itself would not show: there it is zero
    monkeypatch.setattr(type(norm), "forward", lambda self, x: right(self, 2 * x - x.detach()))
    with few_kernels.few_kernels(model) as replaced:
        assert replaced["norms"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_only_rounds_otherwise_is_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all its weights are 1, as random ones are made: a gradient along x itself is nothing but rounding there."""
    model = adapted(dtype)
    monkeypatch.setattr(few_kernels, "fused_norm", card_norm.card_norm)
    with few_kernels.few_kernels(model) as replaced:
        assert replaced["norms"] == 2 * model.config.num_hidden_layers + 1


def test_keys_repeated_for_each_head_change_no_value() -> None:
    """For cards whose fused attention takes no groups: what autograd keeps of a key is as wide as a query."""
    model = adapted()
    config = model.config
    size, heads = config.head_dim, {config.num_attention_heads, config.num_key_value_heads}
    assert len(heads) == 2
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and tensor.ndim == 4 and tensor.shape[2:] == (IDS.shape[1], size):
            kept.append(tensor.shape[1])
        return tensor

    def seen() -> tuple[set[int], tuple[float, dict[str, torch.Tensor]]]:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = learned(model)
        return set(kept), found

    groups, (loss, gradients) = seen()
    with few_kernels.repeated_keys():
        single, (same_loss, same) = seen()
    assert (groups, single) == (heads, {config.num_attention_heads})
    assert same_loss == pytest.approx(loss, abs=1e-5) and apart(same, gradients) < 1e-4
    assert seen()[0] == heads


def wrong_value(ctx: Any, x: Any, weight: Any, bias: Any, a: Any, b: Any, low_a: Any, low_b: Any, scale: float) -> Any:
    return RIGHT.forward(ctx, x, weight, bias, a, b, low_a, low_b, 2 * scale)


def wrong_slope(ctx: Any, *grads: torch.Tensor) -> Any:
    x, weight, bias, a, b, *rest = RIGHT.backward(ctx, *grads)
    return x, weight, bias, a, None if b is None else 1.1 * b, *rest


RIGHT = lora_product.LoraProduct


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [{"forward": staticmethod(wrong_value)}, {"backward": staticmethod(wrong_slope)}])
def test_an_adapter_product_that_gives_something_else_is_not_used(
    dtype: torch.dtype, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(dtype)
    policy.keep_float32(model)
    before = [p.clone() for p in model.parameters()]
    with lora_products(model) as count:
        assert count == 7 * model.config.num_hidden_layers
    monkeypatch.setattr(lora_product, "LoraProduct", type("Wrong", (RIGHT,), wrong))
    with lora_products(model) as count:
        assert count == 0
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_only_the_kind_of_layer_that_peft_computes_otherwise_stays_pefts() -> None:
    model = adapted()
    layers = model.get_base_model().model.layers
    for layer in layers:  # as a later PEFT might, for these alone
        layer.mlp.down_proj.lora_A["default"].register_forward_hook(lambda module, given, out: out.relu())
    with lora_products(model) as count:
        assert count == 6 * len(layers)


def test_walks_are_short_and_do_the_same() -> None:
    model = adapted()
    learned(model)
    with short_walks(model):
        model.eval()
        assert not any(module.training for module in model.modules())
        model.train()
        assert all(module.training for module in model.modules())
        assert any(p.grad is not None for p in model.parameters())
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert "train" not in vars(model) and "zero_grad" not in vars(model)


def test_a_run_in_few_kernels_learns_as_without_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training.make(tmp_path / "plain")
    plain.start()
    monkeypatch.setattr(type(plain), "_kernels", lambda self: few_kernels.few_kernels(self.model))
    whole = training.make(tmp_path / "whole")
    whole.start()
    expected = training.weights(plain)
    assert all(torch.allclose(p, expected[name], atol=1e-3) for name, p in training.weights(whole).items())

    first = training.make(tmp_path / "resumed")
    first.add_callback(stop_after(2))
    first.start()
    resumed = training.resume(tmp_path / "resumed")
    assert resumed.state.global_step == training.RECIPE.steps
    assert all(torch.equal(p, training.weights(resumed)[name]) for name, p in training.weights(whole).items())


def stop_after(steps: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= steps

    return Stop()
