"""Not a test: where a rollout's time goes on this card, to be read by hand. `python tests/gpu/where_the_time_goes.py [SHAPE]`.

Milliseconds a step by row count and copy; the kernels of one step; the parts of a rollout whose completions end at
different times, the card waited for after each so that every part has its own time.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

import torch

from grpo_portable.bench.policy import random_policy
from grpo_portable.bench.shapes import Workload, config_of
from grpo_portable.rollout.decoder import Decoder
from grpo_portable.rollout.portable import PortableRollout
from grpo_portable.rollout.protocol import Sampling
from grpo_portable.rollout.schedule import Schedule

PROMPT, NEW, ROWS = 128, 256, (1, 8, 16, 32, 64, 128, 256)


def steps(policy: Any, vocab: int, copy: str) -> None:
    for rows in ROWS:
        engine = PortableRollout(policy, None, rows=rows, copy=copy)
        prompts = torch.randint(1, vocab, (max(1, rows // 8), PROMPT)).tolist()
        group = min(8, rows)
        took = {}
        for tokens in (16, 16, 144, 144):
            begin = time.perf_counter()
            engine.generate(prompts, group, Sampling(max_tokens=tokens, seed=0))
            took[tokens] = time.perf_counter() - begin
        print(
            f"{copy} {rows:4} rows: {(took[144] - took[16]) / 128 * 1e3:.3f} ms a step, 16 tokens {took[16] * 1e3:.1f} ms"
        )
        engine.close()


def kernels(policy: Any, vocab: int, copy: str) -> None:
    engine = PortableRollout(policy, None, rows=64, copy=copy)
    prompts = torch.randint(1, vocab, (8, PROMPT)).tolist()
    for _ in range(2):
        engine.generate(prompts, 8, Sampling(max_tokens=64, seed=0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        engine.generate(prompts, 8, Sampling(max_tokens=64, seed=0))
    print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=60))
    engine.close()


def parts(policy: Any, vocab: int, rows: int) -> None:
    spread = Workload(prompts=32, shortest=20, rows=rows)
    engine = PortableRollout(policy, None, rows=rows, copy="bf16")
    prompts = torch.randint(1, vocab, (32, PROMPT)).tolist()
    sampling, total, count = Sampling(max_tokens=NEW, seed=0), defaultdict(float), defaultdict(int)

    def timed(name: str) -> Any:
        inner = getattr(Decoder, name)

        def outer(*given: Any, **named: Any) -> Any:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            made = inner(*given, **named)
            torch.cuda.synchronize()
            total[name] += time.perf_counter() - begin
            count[name] += 1
            return made

        return outer

    for _ in range(4):
        engine.generate(prompts, 8, sampling, limits=spread.limits())
    begin = time.perf_counter()
    engine.generate(prompts, 8, sampling, limits=spread.limits())
    whole = time.perf_counter() - begin
    names = ("admit", "_prefill", "advance", "move", "share")
    kept = {name: getattr(Decoder, name) for name in names}
    for name in names:
        setattr(Decoder, name, timed(name))
    begin = time.perf_counter()
    engine.generate(prompts, 8, sampling, limits=spread.limits())
    waited = time.perf_counter() - begin
    for name, method in kept.items():
        setattr(Decoder, name, method)
    print(f"spread lengths, {rows} rows: {whole:.3f} s; waiting after each part {waited:.3f} s")
    for name in names:
        print(f"  {name:9} {total[name]:.3f} s in {count[name]} calls")
    engine.close()


def seconds(engine: PortableRollout, prompts: list, work: Workload) -> list[float]:
    """Of six rollouts; sizes that come again are captured in the first ones."""
    took = []
    for _ in range(6):
        begin = time.perf_counter()
        engine.generate(prompts, 8, Sampling(max_tokens=NEW, seed=0), limits=work.limits())
        took.append(round(time.perf_counter() - begin, 3))
    return took


def admissions(policy: Any, vocab: int) -> None:
    """The same work with rows handed out once an eighth, a sixteenth or a 32nd of them is free."""
    spread = Workload(prompts=32, shortest=20, rows=64)
    prompts, kept = torch.randint(1, vocab, (32, PROMPT)).tolist(), Schedule._enough
    for share in (8, 16, 32):
        Schedule._enough = lambda self, share=share: max(1, self.capacity // share)
        engine = PortableRollout(policy, None, rows=64, copy="bf16")
        print(f"64 rows, handed out once 1/{share} is free: {seconds(engine, prompts, spread)} s")
        engine.close()
    Schedule._enough = kept


def joined(policy: Any, vocab: int) -> None:
    """The same work with small prefills on their own, and as tokens of a step."""
    spread = Workload(prompts=32, shortest=20, rows=64)
    prompts = torch.randint(1, vocab, (32, PROMPT)).tolist()
    for joins in (False, True, False, True):
        engine = PortableRollout(policy, None, rows=64, copy="bf16")
        engine.run.joins = joins
        print(f"64 rows, prompts {'join steps' if joins else 'on their own'}: {seconds(engine, prompts, spread)} s")
        engine.close()


def looked_ahead(policy: Any, vocab: int) -> None:
    """The same work, full and with spread lengths: steps launched once the last are booked, and before."""
    spread = Workload(prompts=32, shortest=20, rows=64)
    prompts = torch.randint(1, vocab, (32, PROMPT)).tolist()
    for copy in ("bf16", "fp8"):
        for ahead in (False, True, False, True):
            engine = PortableRollout(policy, None, rows=64, copy=copy)
            engine.ahead = ahead
            for what, asked, work in (
                ("spread lengths", prompts, spread),
                ("nothing ends early", prompts[:8], Workload()),
            ):
                told = "ahead" if ahead else "not ahead"
                print(f"64 rows, {copy}, {what}, {told}: {seconds(engine, asked, work)} s")
            engine.close()


def main() -> None:
    config = config_of(sys.argv[1] if len(sys.argv) > 1 else "qwen3-4b")
    where = torch.device("cuda")
    policy, _ = random_policy(config, "dense", 32, 0, where, torch.bfloat16)
    for rows in (64, 256):
        parts(policy, config.vocab_size, rows)
    looked_ahead(policy, config.vocab_size)
    joined(policy, config.vocab_size)
    admissions(policy, config.vocab_size)
    for copy in ("bf16", "fp8"):
        steps(policy, config.vocab_size, copy)
    for copy in ("bf16", "fp8"):
        kernels(policy, config.vocab_size, copy)


if __name__ == "__main__":
    main()
