"""Small real pieces of a GRPO step: attention as a decode engine calls it, a CUDA graph, one LoRA update.

Legend: B rows, H heads, K key/value heads, S cached positions, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from doctor.trials import attempt, stage, tell

_B, _H, _K, _S, _D = 4, 8, 2, 64, 64


def attention(dtype: str, device: str) -> None:
    """Tells attention, and attention_forms by form: each call the portable engine makes, against fp32 on the CPU.

    The variable-length flash kernel is told, but does not decide: the engine can do without it.
    """
    stage("import torch")
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(_B, n, _K, _D, generator=generator) for n in (_H // _K, _S, _S))
    lengths = torch.tensor([5, 17, 40, _S])
    live = torch.arange(_S) < lengths[:, None]  # (B, S)
    mask = live[:, None, None].expand(-1, -1, _H // _K, -1)
    q, k, v = (t.transpose(1, 2) for t in (q, keys, values))  # (B, K, H/K, D), (B, K, S, D): a group shares its keys
    want = sdpa(q, k, v, attn_mask=mask)

    def here(x: Any) -> Any:
        return x.to(device, kind)

    def causal() -> Any:
        return sdpa(here(k), here(k), here(v), is_causal=True)

    def decode() -> Any:
        return sdpa(here(q), here(k), here(v), attn_mask=mask.to(device))

    def flash() -> Any:
        rows = torch.arange(_B + 1, device=device, dtype=torch.int32)
        flat = [here(x).reshape(-1, _K, _D) for x in (keys, values)]
        heads = here(q).reshape(_B, _H, _D)
        out = torch.ops.aten._flash_attention_forward(
            heads, *flat, rows, rows * _S, 1, _S, 0.0, False, False, seqused_k=lengths.to(device, torch.int32)
        )[0]
        return out.reshape(_B, _K, _H // _K, _D)

    forms = {"causal": (causal, sdpa(k, k, v, is_causal=True)), "masked decode": (decode, want)}
    if device != "cpu" and torch.cuda.get_device_capability() >= (8, 0) and kind is not torch.float32:
        forms["flash decode"] = (flash, want)
    said: dict[str, str | None] = {}
    for form, (run, right) in forms.items():
        stage(f"attention: {form}")
        said[form] = attempt(partial(_near, run, right))
        tell("attention_forms", {name: error or "ok" for name, error in said.items()})
        failed = next((f"{name}: {error}" for name, error in said.items() if error and name != "flash decode"), None)
        tell("attention", {"ok": failed is None, "error": failed})


def _near(run: Callable[[], Any], right: Any) -> None:
    off = (run().float().cpu() - right).abs().max().item()
    if not off <= 0.05:  # also for nan
        raise RuntimeError(f"the answer is wrong: off by {off:.2g}")


def cuda_graph(dtype: str) -> None:
    """Tells cuda_graph: one decode-like step captured, replayed with new input, equal to the same step run eagerly."""
    stage("import torch")
    import torch

    kind = getattr(torch, dtype)
    stage("CUDA graph: warm-up")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 256, generator=generator).to("cuda", kind) / 16
    x = torch.randn(_B, 256, generator=generator).to("cuda", kind)

    def step() -> Any:
        return torch.nn.functional.silu(x @ weight).float().softmax(-1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    stage("CUDA graph: capture")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    stage("CUDA graph: replay")
    x.copy_(torch.randn(_B, 256, generator=generator).to("cuda", kind))
    graph.replay()
    torch.cuda.synchronize()
    off = (out - step()).abs().max().item()
    if not off <= 1e-3:  # also for nan
        raise RuntimeError(f"the replayed graph is wrong: off by {off:.2g}")
    tell("cuda_graph", {"ok": True, "error": None})


def lora_step(device: str, dtype: str, base: str = "plain") -> None:
    """Tells lora_step: two AdamW updates of a LoRA adapter on a tiny Llama, loss finite and falling, base untouched.

    `base` is plain or nf4 (bitsandbytes Linear4bit). With transformers and peft installed the step runs through them,
    as training will; without them it is plain torch and `through` says so.
    """
    stage("import torch")
    import torch

    torch.manual_seed(0)
    stage("build the model")
    try:
        import peft
        import transformers
    except ModuleNotFoundError as missing:
        if missing.name not in ("peft", "transformers"):
            raise
        model, through = _plain_lora(torch, base), "torch alone"
    else:
        model, through = _peft_lora(torch, transformers, peft, base), "transformers and peft"
    kind = getattr(torch, dtype)
    for p in model.parameters():  # as in training: base in the path's type, adapter in fp32, autocast between them
        if not p.requires_grad and p.dtype is torch.float32 and base == "plain":
            p.data = p.data.to(kind)
    model = model.to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.arange(64, device=device).reshape(2, 32) % 50 + 3
    losses = []
    stage(f"LoRA step on {device} in {dtype}")
    started = time.monotonic()
    for _ in range(3):
        with torch.autocast(device.split(":")[0], kind, enabled=kind is not torch.float32):
            logits = model(ids) if through == "torch alone" else model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:  # also for nan
        raise RuntimeError(f"the loss does not fall: {losses}")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(kept, frozen, strict=True)):
        raise RuntimeError("the frozen base weights changed")
    tell("seconds", round(time.monotonic() - started, 3))
    tell("through", through)
    tell("lora_step", {"ok": True, "error": None})


def _peft_lora(torch: Any, transformers: Any, peft: Any, base: str) -> Any:
    from doctor.trials.tiny import tiny_shape

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_shape()))
    if base == "nf4":
        _quantize(torch, model)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    return peft.get_peft_model(model, config)


def _quantize(torch: Any, model: Any) -> None:
    """Replaces the linear layers of the blocks by NF4 ones; they quantise when they move to their device."""
    import bitsandbytes

    for _, parent in list(model.model.layers.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                four = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
                )
                four.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, name, four)


def _plain_lora(torch: Any, base: str) -> Any:
    """Embedding, one frozen (or NF4) linear layer with a rank-4 adapter, head."""
    from torch import nn

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
            self.base = nn.Linear(128, 128, bias=False)
            if base == "nf4":
                import bitsandbytes

                weight = self.base.weight.data
                self.base = bitsandbytes.nn.Linear4bit(128, 128, bias=False, quant_type="nf4")
                self.base.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(4, 128) / 11), nn.Parameter(torch.zeros(128, 4))

        def forward(self, ids: Any) -> Any:
            h = self.embed(ids)
            return self.head(h + self.base(h) + (h @ self.a.t()) @ self.b.t())

    return Lora()
