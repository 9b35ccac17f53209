"""Rollout throughput of several engines on one workload, side by side in one process, against the floor of memory traffic.

`grpo-portable bench rollout --shape qwen3-4b --engines portable,reference,vllm --json`.
Weights are random, prompts are random token ids and no completion ends early unless lengths are asked to spread, so every
engine does the same work. One warm-up comes first; the reported rate is the median of the repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from grpo_portable import quiet
from grpo_portable.bench import child
from grpo_portable.bench.policy import BASES, random_policy
from grpo_portable.bench.shapes import SHAPES, Workload, config_of, known
from grpo_portable.errors import GrpoPortableError, UsageError
from grpo_portable.rollout.protocol import Sampling

OF_FLOOR = (
    "of floor: share of what memory traffic allows, where every step reads all",
    "weights and cached keys and values once, as fast as this device copies memory",
)
LONG_S = 15.0  # a rollout longer than this is its own warm-up and measured once
ENGINES = ("portable", "portable-fp8", "reference", "vllm")


def bench_rollout(
    shape: str,
    engines: Sequence[str],
    workload: Workload,
    *,
    bases: Sequence[str] = ("dense",),
    device: str = "auto",
    repeats: int = 3,
    tell: child.Tell = child.tell,
) -> dict[str, Any]:
    """Rates of `engines` on a random model of `shape`, over each of `bases` (dense, nf4).

    {shape, device, torch, dtype, workload, floor {bytes_per_step, bytes_per_s, tok_s}, engines: [{engine, base, tok_s, seconds,
    first_token_s, ready_s, sync_s, peak_gib, floor_share, notes} or {engine, base, error}]}. `ready_s` counts from the policy's
    weights being in memory to the first completion token, compiling and graph capture included; `sync_s` is what the engine
    takes after an update. With spread lengths also `full_tok_s`, the rate where nothing ends early and the same rows are
    full, and `cost`: the time of the spread run over that of its tokens at the full rate. `tell` hears of an engine when it
    begins and, with its figures, when it ends.
    """
    import torch

    known(shape)
    if unknown := [name for name in engines if name not in ENGINES]:
        raise UsageError(f"there is no engine `{unknown[0]}`", help=f"some of: {', '.join(ENGINES)}")
    if unknown := [name for name in bases if name not in BASES]:
        raise UsageError(f"there is no base `{unknown[0]}`", help=f"some of: {', '.join(BASES)}")
    where = _device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    config = config_of(shape)
    draw = np.random.default_rng(workload.seed)
    prompts = draw.integers(1, config.vocab_size, (workload.prompts, workload.prompt_tokens)).tolist()
    floor = _floor(config, workload, where, dtype)
    need, have = 2 * _weight_bytes(config, dtype), _free_bytes(where)
    if need > have:
        raise UsageError(
            f"{shape} and its rollout copy take {need / 2**30:.1f} GiB, and {have / 2**30:.1f} are free",
            help="choose a smaller --shape",
        )
    results = []
    for engine, base in [(engine, base) for base in bases for engine in engines]:
        result: dict[str, Any] = {"engine": engine, "base": base}
        tell(dict(result))
        try:
            result |= _measure(engine, base, config, prompts, workload, where, dtype, repeats)
        except Exception as error:  # one engine that fails, whatever the way, must not cost the others' numbers
            result["error"] = f"{type(error).__name__}: {error}"
        if "tok_s" in result and floor["tok_s"]:
            result["floor_share"] = round(result["tok_s"] / floor["tok_s"], 3)
        tell(result)
        results.append(result)
    return {
        "shape": shape,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "workload": asdict(workload),
        "floor": floor,
        "engines": results,
    }


def _measure(
    engine: str, base: str, config: Any, prompts: list, work: Workload, where: Any, dtype: Any, repeats: int
) -> dict[str, Any]:
    tokens = sum(work.limits() or [work.new_tokens] * (work.prompts * work.group))
    if engine == "vllm":
        if work.shortest is not None:
            raise UsageError("vLLM is measured with equal lengths only")
        if base != "dense":
            raise UsageError("vLLM is measured on dense weights only")
        from grpo_portable.rollout.vllm import bench_vllm

        with contextlib.redirect_stdout(sys.stderr):  # its log goes to stdout, where the figures belong
            seen: dict[str, Any] = bench_vllm(
                config, prompts, work.group, work.new_tokens, rows=work.width, repeats=repeats
            )
        return _result(tokens, seen, ["no adapter"])
    policy, notes = random_policy(config, base, work.lora_rank, work.seed, where, dtype)
    _settle(where, reset=True)
    start = time.perf_counter()
    rollout = engine_of(engine, policy, work)
    once = timer(rollout, prompts, work, where)
    once(1)
    seen = {"ready_s": time.perf_counter() - start}
    warm = once(None)
    seen["first_token_s"] = once(1)
    seen["seconds"] = [once(None) for _ in range(repeats)] if warm < LONG_S else [warm]
    seen["sync_s"] = _sync_seconds(rollout, policy, where)
    notes += notes_of(rollout)
    if rollout.name == "portable" and work.shortest is not None:
        notes.append(f"{rollout.row_steps / tokens:.2f} row-steps a token")
    result = _result(tokens, seen, notes)
    if work.shortest is not None:
        result |= _cost(result["tok_s"], _full_rate(rollout, prompts, work, where, repeats))
    result["peak_gib"] = _peak_gib(where)
    rollout.close()
    del policy, rollout, once
    _settle(where)
    return result


def _full_rate(rollout: Any, prompts: list, work: Workload, where: Any, repeats: int) -> float:
    """Tokens a second when as many completions as there are rows start together and all have `new_tokens`."""
    full = replace(work, prompts=max(1, min(work.prompts, work.width // work.group)), shortest=None)
    once = timer(rollout, prompts[: full.prompts], full, where)
    warm = once(None)
    seconds = statistics.median([once(None) for _ in range(repeats)] if warm < LONG_S else [warm])
    return full.prompts * full.group * full.new_tokens / seconds


def _cost(rate: float, full: float) -> dict[str, float]:
    return {"full_tok_s": round(full, 1), "cost": round(full / rate, 3)}


def _sync_seconds(rollout: Any, policy: Any, where: Any) -> float:
    """What the engine takes to take over the policy's weights; the second time, when whatever it makes once is made."""
    took = 0.0
    for _ in range(2):
        _settle(where)
        begin = time.perf_counter()
        rollout.sync(policy)
        if where.type == "cuda":
            import torch

            torch.cuda.synchronize(where)
        took = time.perf_counter() - begin
    return took


def _result(tokens: int, seen: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    seconds = statistics.median(seen["seconds"])
    synced = {"sync_s": round(seen["sync_s"], 4)} if "sync_s" in seen else {}
    return {
        **synced,
        "tok_s": round(tokens / seconds, 1),
        "seconds": [round(s, 4) for s in seen["seconds"]],
        "first_token_s": round(seen["first_token_s"], 4),
        "ready_s": round(seen["ready_s"], 2),
        "notes": notes,
    }


def timer(rollout: Any, prompts: list, work: Workload, where: Any) -> Callable[[int | None], float]:
    """A rollout of the workload, or with so many tokens each where a number is given: it returns the seconds."""
    sampling = Sampling(max_tokens=work.new_tokens, temperature=1.0, seed=work.seed)
    limits = work.limits()

    def once(tokens: int | None) -> float:
        wanted = sampling if tokens is None else replace(sampling, max_tokens=tokens)
        more = {"limits": limits} if tokens is None and limits is not None and rollout.name == "portable" else {}
        begin = time.perf_counter()
        groups = rollout.generate(prompts, work.group, wanted, **more)
        took = time.perf_counter() - begin
        if sum(map(len, groups)) != work.prompts * work.group:
            raise UsageError("an engine left completions out")
        return took

    return once


def engine_of(engine: str, policy: Any, work: Workload) -> Any:
    """The engine of a name of `ENGINES`, but vLLM, over a policy."""
    from grpo_portable.rollout.portable import PortableRollout
    from grpo_portable.rollout.reference import ReferenceRollout

    if engine == "reference":
        return ReferenceRollout(policy, None, rows=work.width)
    return PortableRollout(policy, None, rows=work.width, copy="fp8" if engine == "portable-fp8" else "auto")


def notes_of(rollout: Any) -> list[str]:
    """What the portable engine took: its copy of the weights, its kernels and why; of others nothing."""
    if rollout.name != "portable":
        return []
    return [f"weights {rollout.keeper.kind}", f"{rollout.run.name} kernels ({rollout.run.reason})"]


def _floor(config: Any, work: Workload, where: Any, dtype: Any) -> dict[str, Any]:
    """Tokens per second if each step read all weights and live keys and values once, at the measured copy bandwidth."""
    kv, head_dim = config.num_key_value_heads, _head_dim(config)
    weights = _weight_bytes(config, dtype)
    keys = work.prompt_tokens + work.new_tokens / 2
    cache = 2 * config.num_hidden_layers * kv * head_dim * dtype.itemsize * keys * work.width
    rate = _bandwidth(where)
    return {
        "bytes_per_step": int(weights + cache),
        "bytes_per_s": int(rate),
        "tok_s": round(work.width * rate / (weights + cache), 1),
    }


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _weight_bytes(config: Any, dtype: Any) -> int:
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    layer = hidden * _head_dim(config) * (2 * heads + 2 * kv) + 3 * hidden * config.intermediate_size
    return (config.num_hidden_layers * layer + hidden * config.vocab_size) * dtype.itemsize


def _free_bytes(where: Any) -> int:
    """Memory free on the device; on a CPU what the system calls available, else all there is."""
    import torch

    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    from doctor.probes_host import available_gib

    free = available_gib()
    return 2**62 if free is None else int(free * 2**30)  # unknown never counts as none


def _device(name: str) -> Any:
    """The torch device of this name, `auto` the first GPU where there is one; UsageError for one that cannot be had."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UsageError(f"there is no device `{name}`", help="one of: auto, cpu, cuda, cuda:1")
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no device `{name}`", because=f"torch sees {torch.cuda.device_count()} GPUs here")
    return torch.device(name)


def _count(text: str) -> int:
    """An argument that counts something."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _rank(text: str) -> int:
    """A count, or 0."""
    return 0 if text == "0" else _count(text)


def _bandwidth(where: Any) -> float:
    """Bytes a second of a large copy on this device, counting those read and those written."""
    import torch

    size = 2**31 if where.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        _settle(where)
        begin = time.perf_counter()
        target.copy_(source)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - begin)
    return 2 * size / min(times)


def _settle(where: Any, reset: bool = False) -> None:
    import torch

    gc.collect()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()
        if reset:
            torch.cuda.reset_peak_memory_stats(where)


def _peak_gib(where: Any) -> float | None:
    import torch

    return round(torch.cuda.max_memory_allocated(where) / 2**30, 2) if where.type == "cuda" else None


def progress(figures: Mapping[str, Any]) -> None:
    """A line on stderr for a reader: which engine begins, how it ended."""
    rate = figures.get("tok_s")
    said = f"{rate:,.0f} tok/s" if rate else figures.get("error", "made ready, then measured ...")
    print(f"{_title(figures)}: {said}", file=sys.stderr, flush=True)


def _title(row: Mapping[str, Any]) -> str:
    return row["engine"] if row["base"] == "dense" else f"{row['engine']}, {row['base']}"


def table(report: dict[str, Any]) -> str:
    """The report as a few lines of text."""
    work, floor = report["workload"], report["floor"]
    cost = "cost" if work["shortest"] is not None else ""
    lines = [
        f"{report['shape']} on {report['device']}, torch {report['torch']}, {report['dtype']}: {work['prompts']} x "
        f"{work['group']}, {work['prompt_tokens']} + {work['new_tokens']} tokens; traffic allows {floor['tok_s']:,.0f} tok/s",
        f"{'engine':<18}{'tok/s':>10}{'of floor':>10}{'first token':>13}{'ready':>9}{'peak GiB':>10}{cost:>6}  notes",
    ]
    for row in report["engines"]:
        name = _title(row)
        if "error" in row:
            lines.append(f"{name:<18}{row['error']}")
            continue
        cost = f"{row['cost']:.2f}" if "cost" in row else ""
        peak = "" if row.get("peak_gib") is None else f"{row['peak_gib']:.1f}"
        lines.append(
            f"{name:<18}{row['tok_s']:>10,.0f}{row.get('floor_share', 0):>10.0%}{row['first_token_s']:>11.3f} s"
            f"{row['ready_s']:>7.1f} s{peak:>10}{cost:>6}  {', '.join(row['notes'])}"
        )
    return "\n".join([*lines, *OF_FLOOR])


def main(arguments: Sequence[str]) -> int:
    """The command `bench rollout`; the exit code."""
    parser = argparse.ArgumentParser(prog="grpo-portable bench rollout", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-4b", help=", ".join(SHAPES))
    parser.add_argument("--engines", default="portable,reference", help=f"comma-separated: {', '.join(ENGINES)}")
    parser.add_argument("--base", default="dense", help="the policy's frozen weights, comma-separated: dense, nf4")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1; default: a GPU where there is one")
    for name, default, what in (
        ("repeats", 3, "times each engine is measured; the median counts"),
        ("prompts", 8, "prompts of the workload"),
        ("group", 8, "completions of each prompt"),
        ("prompt-tokens", 128, "length of each prompt"),
        ("new-tokens", 256, "length of each completion"),
    ):
        parser.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument("--lora-rank", type=_rank, default=32, metavar="N", help="the policy's adapter; 0 is none (32)")
    parser.add_argument("--rows", type=_count, metavar="N", help="completions generated at once; all by default")
    parser.add_argument("--shortest", type=_count, metavar="N", help="spread lengths evenly from this to --new-tokens")
    parser.add_argument("--json", action="store_true", help="the figures as JSON instead of a table")
    given = parser.parse_args(arguments)
    work = Workload(
        given.prompts, given.group, given.prompt_tokens, given.new_tokens, given.shortest, given.rows, given.lora_rank
    )
    try:
        quiet.libraries()
        report = bench_rollout(
            given.shape,
            given.engines.split(","),
            work,
            bases=given.base.split(","),
            device=given.device,
            repeats=given.repeats,
            tell=child.tell if given.json else progress,
        )
    except GrpoPortableError as error:
        print("\n".join(error.shown()), file=sys.stderr)
        return error.exit_code
    print(json.dumps(report, indent=1) if given.json else table(report))
    return 0
