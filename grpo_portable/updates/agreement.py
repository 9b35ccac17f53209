"""Do two ways to compute the same give the same here? Tried on the device, on a few random numbers, before one is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# of the largest entry: a handful of the type's own roundings
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def agree(plain: Callable[..., Any], ours: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Whether two functions give the same value, and the same gradient of each input, within the rounding of the first one's
    type; False where one of them fails.
    """
    try:
        with torch.enable_grad():
            (value, *slopes), (our_value, *our_slopes) = (_seen(function, inputs) for function in (plain, ours))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    bound = CLOSE[inputs[0].dtype]
    pairs = zip((value, *slopes), (our_value, *our_slopes), strict=True)
    return all(a.shape == b.shape and apart(a, b) <= bound for a, b in pairs)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two tensors, over the largest entry of the first; infinite where that is 0 or no number."""
    most = float(one.abs().max())
    found = float((one - other).abs().max())
    return found / most if 0 < most < float("inf") and found == found else float("inf")


def random_like(shape: tuple[int, ...], like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Normal numbers of a seed on a tensor's device and in its type, float32 where that is none to compute in."""
    generator = torch.Generator().manual_seed(seed)  # of its own: the run's draws stay what they are
    dtype = like.dtype if like.dtype in CLOSE else torch.float32
    return torch.randn(shape, generator=generator).to(like.device, dtype)


def _seen(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The value of a function, and the gradient of each input for a random gradient of the value, in float32."""
    given = [t.detach().clone().requires_grad_(True) for t in inputs]
    value = function(*given)
    # other numbers than the inputs': a norm does not change along its input, and rounding would be held against rounding
    slopes = torch.autograd.grad(value, given, random_like(tuple(value.shape), value, seed=1))
    return [value.detach().float(), *(slope.float() for slope in slopes)]
