"""vLLM as a rollout engine, for the side-by-side measurement. The only file that imports vllm."""

from __future__ import annotations

import tempfile
import time
from typing import Any


def bench_vllm(
    config: Any, prompts: list[list[int]], n: int, new_tokens: int, *, rows: int, repeats: int
) -> dict[str, Any]:
    """Seconds to be ready, to a first token and for each of `repeats` rollouts, with dummy weights of the shape in `config`."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(map(len, prompts)) + new_tokens + 16,
            max_num_seqs=rows,
            gpu_memory_utilization=0.8,
        )
    ready = time.perf_counter() - start

    def once(tokens: int) -> float:
        wanted = SamplingParams(n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False)
        made = sum(len(one.token_ids) for request in outputs for one in request.outputs)
        if made != len(prompts) * n * tokens:
            raise RuntimeError(f"vLLM gave {made} tokens, not {len(prompts) * n * tokens}")
        return time.perf_counter() - begin

    once(8)
    first = once(1)
    return {"ready_s": ready, "first_token_s": first, "seconds": [once(new_tokens) for _ in range(repeats)]}
