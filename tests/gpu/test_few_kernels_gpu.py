"""Layers in few kernels on a card: gradients as near to float32's, half the launches, no more memory."""

import contextlib
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch.profiler import ProfilerActivity, profile

from grpo_portable.models import policy
from grpo_portable.recipe import Recipe
from grpo_portable.updates.agreement import agree
from grpo_portable.updates.few_kernels import few_kernels, fused_norm

pytestmark = pytest.mark.gpu
LAYERS = 12


def adapted(dtype, checkpointing=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=576, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    model = policy.add_adapter(
        LlamaForCausalLM(shape).to("cuda", torch.bfloat16).to(dtype), replace(Recipe(), lora_rank=16)
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.trainable(model).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def learned(model, dtype):
    ids = torch.randint(3, 512, (16, 96), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.trainable(model).values()])
    model.zero_grad()
    return gradient


def launches(model):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        learned(model, torch.bfloat16)
        torch.cuda.synchronize()
    return sum(event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for event in seen.events())


@pytest.mark.parametrize(("rows", "width"), [(8, 576), (8, 128), (8, 2560), (4096, 576), (4096, 2560)])
def test_the_fused_norm_is_the_norm(rows, width):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    plain = LlamaRMSNorm(width).cuda().to(torch.bfloat16).requires_grad_(False)
    exact = LlamaRMSNorm(width).cuda().double().requires_grad_(False)
    torch.manual_seed(0)
    x, grad = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    seen = {}
    for name, forward, dtype in (
        ("exact", lambda t: exact.weight * t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6), torch.double),
        ("plain", plain.forward, torch.bfloat16),
        ("fused", fused_norm(plain), torch.bfloat16),
    ):
        given = x.to(dtype).requires_grad_(True)
        value = forward(given)
        (slope,) = torch.autograd.grad(value, given, grad.to(dtype))
        seen[name] = value.detach().double(), slope.double()
    off = {
        name: [float((a - b).norm() / b.norm()) for a, b in zip(seen[name], seen["exact"], strict=True)]
        for name in ("plain", "fused")
    }
    print(
        f"{rows} x {width}, value and gradient apart from float64: {off}; trusted: {agree(plain.forward, fused_norm(plain), x)}"
    )
    assert all(fused < 2 * other + 1e-3 for fused, other in zip(off["fused"], off["plain"], strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_launches_and_memory(checkpointing):
    truth = learned(adapted(torch.float32), torch.float32)
    model = adapted(torch.bfloat16, checkpointing)
    seen = {}
    for name, way in (("plain", contextlib.nullcontext), ("few", lambda: few_kernels(model))):
        with way() as replaced:
            if replaced is not None:
                assert replaced == {"adapters": 7 * LAYERS, "norms": 2 * LAYERS + 1, "rotary": 1}
            learned(model, torch.bfloat16)
            torch.cuda.reset_peak_memory_stats()
            gradient = learned(model, torch.bfloat16)
            peak = torch.cuda.max_memory_allocated() / 2**20
            seen[name] = (float((gradient - truth).norm() / truth.norm()), launches(model), peak)
    print(f"checkpointing {checkpointing}: (apart from float32, launches, peak MiB) {seen}")
    assert seen["few"][0] < 1.5 * seen["plain"][0]
    assert seen["few"][1] < 0.6 * seen["plain"][1]
    assert seen["few"][2] <= seen["plain"][2]
