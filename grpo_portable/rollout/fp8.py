"""Products with FP8 weights through torch's scaled matmul, and whether this machine can run them.

Both operands are quantised to float8_e4m3: the weights once, with a scale an output; the activations at each step, with a
scale a row. The matmul itself runs with unit scales and the two scales are multiplied in afterwards, so only per-tensor
scaling is asked of the card, which every card with FP8 has (row-wise scaling fails on sm_120, pytorch#192707), and
the rescaling fuses with whatever follows.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0  # of float8_e4m3fn
ROWS = 16  # the matmul wants sizes in multiples of 16


def why_not(device: torch.device, inputs: int, outputs: int) -> str | None:
    """None when an FP8 product runs here and is right, else the reason it does not."""
    if device.type != "cuda":
        return f"FP8 products need a CUDA card, this is `{device.type}`"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 products need compute capability 8.9 or newer"
    if inputs % ROWS or outputs % ROWS:
        return f"FP8 products need sizes in multiples of {ROWS}, a layer has {inputs} x {outputs}"
    try:
        draw = torch.Generator(device=device).manual_seed(0)  # of its own: a trial takes nothing from the run's draws
        x = torch.randn(ROWS, inputs, device=device, dtype=torch.bfloat16, generator=draw)
        w = torch.randn(outputs, inputs, device=device, generator=draw)
        scale = w.abs().amax(1) / FP8_MAX
        y = product_fp8(x, (w / scale[:, None]).to(torch.float8_e4m3fn), None, scale, torch.ones((), device=device))
        error = (y.float() - x.float() @ w.T).norm() / (x.float() @ w.T).norm()
        return None if error < 0.08 else f"an FP8 product here is off by {float(error):.0%}"
    except RuntimeError as refusal:  # the reason a library or driver gives is the answer asked for
        return str(refusal).splitlines()[0]


def product_fp8(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor, unit: torch.Tensor
) -> torch.Tensor:
    """x [N, inputs] times FP8 weight [outputs, inputs] with a float32 `scale` [outputs]; the type of x. `unit` holds 1."""
    wide = x.float()
    row_scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    narrow = (wide / row_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    y = (matmul(narrow, weight, unit, x.dtype).float() * row_scale * scale).to(x.dtype)
    return y if bias is None else y + bias


def matmul(narrow: torch.Tensor, weight: torch.Tensor, unit: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 states [N, inputs] times FP8 weight [outputs, inputs], unscaled."""
    rows = narrow.shape[0]
    if rows % ROWS:
        narrow = torch.nn.functional.pad(narrow.view(torch.uint8), (0, 0, 0, -rows % ROWS)).view(torch.float8_e4m3fn)
    return torch._scaled_mm(narrow, weight.t(), scale_a=unit, scale_b=unit, out_dtype=dtype, use_fast_accum=True)[:rows]
