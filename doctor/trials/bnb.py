"""One 4-bit matmul with bitsandbytes: it imports fine on machines where the first real call fails minutes later."""

from __future__ import annotations

from doctor.trials import stage, tell

_SIDE = 64  # one NF4 block of 64 numbers a row


def bnb_4bit() -> None:
    """Tells bnb_4bit and where it ran (cuda, xpu or cpu)."""
    stage("import torch")
    import torch

    stage("import bitsandbytes")
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    place = "cuda" if torch.cuda.is_available() else "cpu"
    stage(f"NF4 matmul on {place}")
    dtype = torch.float32 if place == "cpu" else torch.float16
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_SIDE, _SIDE, generator=generator).to(place, dtype)
    x = torch.randn(4, _SIDE, generator=generator).to(place, dtype)
    packed, state = quantize_4bit(weight, quant_type="nf4", blocksize=64)
    exact = x.float() @ dequantize_4bit(packed, state).float().t()
    got = bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state).float()
    off = ((got - exact).abs().max() / exact.abs().max()).item()
    if not off <= 0.02:  # also for nan
        raise RuntimeError(f"the 4-bit product is wrong: off by {off:.2g} of its largest entry")
    lost = ((dequantize_4bit(packed, state) - weight).float().norm() / weight.float().norm()).item()
    if not lost <= 0.2:
        raise RuntimeError(f"NF4 lost {lost:.0%} of a weight; about 10 % is usual")
    tell("bnb_4bit", {"ok": True, "error": None})
    tell("place", place)
