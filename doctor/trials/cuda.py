"""What torch sees: devices, memory, the arch list of the wheel, one real matmul a kind of card, one FP8 matmul.

N rows, K inner, M columns of the small products. Each is checked against the CPU: a kernel that runs and answers wrong
is a failure too.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from doctor.trials import attempt, describe, stage, tell
from doctor.trials.cpu import tell_rates

_SIDE = 64  # multiples of 16, as FP8 matmuls demand
_BLOCK = 128  # side of a scaling block


def cuda() -> None:
    """Tells torch, arch_list, devices, torch_cuda, links, fp8_matmul and fp8_forms as far as it gets."""
    stage("import torch")
    import torch

    tell("torch", {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip})
    stage("arch list")
    tell("arch_list", torch.cuda.get_arch_list())
    _other_devices(torch)
    stage("CUDA start")
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        if count == 0:
            raise RuntimeError("No CUDA GPUs are available")
    except Exception as e:  # AssertionError, RuntimeError or a driver's own: the text is the fact
        tell("torch_cuda", {"ok": False, "error": describe(e)})
        tell_rates(torch)  # what is left to train on
        return
    devices = [_describe_device(torch, i) for i in range(count)]
    tell("devices", devices)
    _try_each_kind(torch, devices)
    best = max(range(count), key=lambda i: devices[i].get("capability") or [0, 0])
    if torch.version.hip is None:
        if count > 1:
            _look_between(torch, count)
        _try_fp8(torch, f"cuda:{best}")


def _describe_device(torch: Any, index: int) -> dict[str, Any]:
    stage(f"device {index}")
    seen = torch.cuda.get_device_properties(index)
    uuid = getattr(seen, "uuid", None)
    device: dict[str, Any] = {
        "index": index,
        "name": seen.name,
        "uuid": None if uuid is None else str(uuid),
        "capability": None if torch.version.hip else [seen.major, seen.minor],
        "gfx": getattr(seen, "gcnArchName", "").split(":")[0] or None,
        "integrated": bool(getattr(seen, "is_integrated", 0)),
        "total": seen.total_memory,
        "error": None,
    }
    try:
        device["free"], device["total"] = torch.cuda.mem_get_info(index)
    except Exception as e:  # a busy or broken card must not hide the others
        device["error"] = describe(e)
    return device


def _try_each_kind(torch: Any, devices: list[dict[str, Any]]) -> None:
    """One matmul on the first card of each kind; torch_cuda is ok when any card computes."""
    results: dict[str, str | None] = {}
    for device in devices:
        kind = f"{device['name']} {device['capability']}"
        if kind not in results:
            stage(f"matmul on device {device['index']}")
            # bfloat16 below 8.0 is emulation, and float16 is what would be used there
            dtype = torch.float16 if (device["capability"] or [9, 0]) < [8, 0] else torch.bfloat16
            results[kind] = device["error"] or attempt(_matmul(torch, device["index"], dtype))
        device["error"] = results[kind]
    tell("devices", devices)
    errors = [e for e in results.values() if e]
    ok = len(errors) < len(results)
    tell("torch_cuda", {"ok": ok, "error": None if ok else errors[0]})


def _look_between(torch: Any, count: int) -> None:
    """Tells links: whether each card reaches each other one's memory, and the version of NCCL ("" without it)."""
    stage("between the cards")
    there = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = torch.cuda.nccl.version() if there else ()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    peers = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    tell("links", {"nccl": ".".join(map(str, version)), "peers": peers})


def _matmul(torch: Any, index: int, dtype: Any) -> Callable[[], None]:
    def run() -> None:
        a = torch.arange(_SIDE * _SIDE, dtype=torch.float32).reshape(_SIDE, _SIDE).remainder(7)
        want = a @ a.T
        b = a.to(f"cuda:{index}", dtype)
        _check(torch, (b @ b.T).float().cpu(), want, 0.02)

    return run


def _check(torch: Any, got: Any, want: Any, tolerance: float) -> None:
    off = ((got - want).abs().max() / want.abs().max()).item()
    if not off <= tolerance:  # also for nan
        raise RuntimeError(f"the product is wrong: off by {off:.2g} of its largest entry")


def _try_fp8(torch: Any, place: str) -> None:
    forms: dict[str, str | None] = {}
    stage("fp8 matmul")
    forms["per_tensor"] = attempt(_fp8(torch, place, "per_tensor"))
    tell("fp8_matmul", {"ok": forms["per_tensor"] is None, "error": forms["per_tensor"]})
    if forms["per_tensor"] is None:  # after a failure the context may be poisoned: nothing more to learn
        for form in ("per_row", "block"):
            stage(f"fp8 matmul {form}")
            forms[form] = attempt(_fp8(torch, place, form))
    tell("fp8_forms", forms)


def _fp8(torch: Any, place: str, form: str) -> Callable[[], None]:
    def run() -> None:
        side = 4 * _BLOCK if form == "block" else _SIDE
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(side, side, generator=generator)  # (N, K)
        b = torch.randn(side, side, generator=generator)  # (M, K)
        a8, scale_a = _to_fp8(torch, a, form, row_blocks=1)
        b8, scale_b = _to_fp8(torch, b, form, row_blocks=_BLOCK)
        a8, b8, scale_a, scale_b = (t.to(place) for t in (a8, b8, scale_a, scale_b))
        if form == "block":  # the kernel wants the scales of a with the rows next to each other
            scale_a = scale_a.t().contiguous().t()
        if form != "per_tensor":
            scale_b = scale_b.t()
        got = torch._scaled_mm(a8, b8.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
        _check(torch, got.float().cpu(), a @ b.t(), 0.1)

    return run


def _to_fp8(torch: Any, x: Any, form: str, row_blocks: int) -> tuple[Any, Any]:
    """`x` as E4M3 and its fp32 scale: one number, one a row (N, 1), or one a block (N / row_blocks, K / 128)."""
    top = torch.finfo(torch.float8_e4m3fn).max
    if form == "per_tensor":
        scale = x.abs().max() / top
        return (x / scale).to(torch.float8_e4m3fn), scale.reshape(())
    if form == "per_row":
        scale = x.abs().amax(1, keepdim=True) / top
        return (x / scale).to(torch.float8_e4m3fn), scale
    n, k = x.shape
    blocks = x.reshape(n // row_blocks, row_blocks, k // _BLOCK, _BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / top
    return (blocks / scale).reshape(n, k).to(torch.float8_e4m3fn), scale[:, 0, :, 0].contiguous()


def _other_devices(torch: Any) -> None:
    """Intel XPUs and Apple's GPU, where this torch knows them."""
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and torch.version.cuda is None:
        stage("XPU start")
        try:
            tell("xpu", [_describe_xpu(xpu, i) for i in range(xpu.device_count())])
        except Exception as e:  # an XPU that does not answer must not hide the rest
            tell("xpu_error", describe(e))
    if platform.system() == "Darwin":
        stage("Metal start")
        tell("mps", {"error": attempt(lambda: (torch.ones(4, 4, device="mps") @ torch.ones(4, 4, device="mps")).cpu())})


def _describe_xpu(xpu: Any, index: int) -> dict[str, Any]:
    seen = xpu.get_device_properties(index)
    try:
        free = xpu.mem_get_info(index)[0]
    except (AttributeError, RuntimeError):  # older torch, or a driver without the query
        free = None
    return {"index": index, "name": seen.name, "total": seen.total_memory, "free": free}
