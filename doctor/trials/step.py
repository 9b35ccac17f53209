"""Small real pieces of a GRPO step: attention as a decode engine calls it, a CUDA graph, one LoRA update.

Legend: B rows, H heads, K key/value heads, S cached positions, D head size.
"""

from __future__ import annotations

import time
from typing import Any

from doctor.trials import stage, tell

_B, _H, _K, _S, _D = 4, 8, 2, 64, 64


def attention(dtype: str, device: str) -> None:
    """Tells attention: sdpa causal, sdpa over a static cache with a boolean mask, and with grouped heads, against fp32."""
    stage("import torch")
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int) -> Any:
        return torch.randn(_B, heads, length, _D, generator=generator)

    lengths = torch.tensor([5, 17, 40, _S])
    live = (torch.arange(_S) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, S)
    grouped = {"enable_gqa": True}
    forms: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "causal prefill": (draw(_H, _S), (draw(_H, _S), draw(_H, _S)), {"is_causal": True}),
        "decode over a masked cache": (draw(_H, 1), (draw(_H, _S), draw(_H, _S)), {"attn_mask": live}),
        "decode with grouped heads": (draw(_H, 1), (draw(_K, _S), draw(_K, _S)), {"attn_mask": live, **grouped}),
    }
    for form, (q, (k, v), options) in forms.items():
        stage(f"attention: {form}")
        here: dict[str, Any] = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        got = sdpa(q.to(device, kind), k.to(device, kind), v.to(device, kind), **here).float().cpu()
        off = (got - sdpa(q, k, v, **options)).abs().max().item()
        if not off <= 0.05:  # also for nan
            raise RuntimeError(f"{form} is wrong: off by {off:.2g}")
    tell("attention", {"ok": True, "error": None})


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
