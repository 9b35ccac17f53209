"""Unsloth itself on a CUDA card: one copy of the weights, the trainer's probabilities beside the sampler's, a whole run.

    pytest tests/gpu/test_unsloth_gpu.py -s
    GRPO_PORTABLE_TEST_MODEL=SmolLM2-135M-Instruct.Q4_1.gguf pytest tests/gpu/test_unsloth_gpu.py -s

Unsloth changes the process it is imported in, so all of it runs in processes of its own. `-s` shows what was measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_runs
import pytest
import tiny
import torch

from grpo_portable.run.folder import read_lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth"),
]
PATHS = os.environ.get("GRPO_PORTABLE_TEST_PATHS", "fp8-vllm,bf16-vllm").split(",")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return gpu_runs.model_folder(
        os.environ.get("GRPO_PORTABLE_TEST_MODEL"), tmp_path_factory.mktemp("shared") / "model"
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_run_on_shared_weights(path: str, source: str, tmp_path: Path) -> None:
    data = tiny.questions_folder(tmp_path / "sums")
    wanted = gpu_runs.recipe(source, data, path, backend="unsloth", gradient_checkpointing=True, temperature=0.9)
    began = time.perf_counter()
    made = gpu_runs.supervised(tmp_path / "run", wanted)
    told, lines = made.read_json("run.json"), list(read_lines(made.metrics_file))
    print(f"\nrun: {time.perf_counter() - began:.0f} s, peak {told['peak_memory_gib']} GiB, {told['engine_details']}")
    for line in lines:
        print(
            {
                k: line.get(k)
                for k in ("step", "loss", "reward", "grad_norm", "sampler_kl", "ratio_cut", "step_s", "rollout_s")
            }
        )
    assert told["backend"] == "trl on Unsloth's kernels" and told["engine_details"]["weights_shared"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # the same weights under other kernels: what is apart is rounding, as long as every update reached vLLM
    assert all(abs(line["sampler_kl"]) < 0.05 for line in lines)


@pytest.mark.parametrize("path", PATHS[:1])
def test_one_copy_of_the_weights_and_one_distribution(path: str, source: str, tmp_path: Path) -> None:
    out = tmp_path / "seen.json"
    places = os.pathsep.join(filter(None, (str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, __file__, source, path, str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    seen = json.loads(out.read_text())
    print(f"\n{seen}")
    assert seen["shared_bytes"] > 0.5 * seen["policy_bytes"]  # all but what each side keeps for itself
    # a left-padded row learns what the row alone would, up to FP8's rounding, and nothing like one whose padding is attended to
    assert seen["padding"] < 0.25 and seen["padding"] < 0.5 * seen["padding_seen"]
    assert abs(seen["gap"]) < 0.05 and abs(seen["gap_after_update"]) < 0.05
    assert seen["greedy_changed"]
    assert seen["kv_given_back_gib"] > 0.5 * seen["kv_gib"]


def look(source: str, path: str) -> dict[str, Any]:
    """What the backend does, seen from inside its process."""
    import rollouts

    from grpo_portable import fast
    from grpo_portable.models import policy
    from grpo_portable.rollout.protocol import Sampling

    wanted = gpu_runs.recipe(source, Path("."), path, backend="unsloth", gradient_checkpointing=False)
    sleeping = fast.plan_memory

    def asleep(*arguments: Any, **options: Any) -> Any:
        return replace(sleeping(*arguments, **options), sleeps=True)

    fast.plan_memory = asleep
    began = time.perf_counter()
    shared = fast.load(wanted, rows=32, dtype="bfloat16", fp8=path.startswith("fp8"))
    model, _ = shared.adapted(wanted)
    seen: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
    move(policy.trainable(model), 1)
    theirs = shared.llm.apply_model(_storages)[0]
    own = [(p.data_ptr(), p.numel() * p.element_size()) for n, p in model.named_parameters() if ".lora_" not in n]
    seen["policy_bytes"] = sum(size for _, size in own)
    seen["shared_bytes"] = sum(size for at, size in own if any(low <= at < high for low, high in theirs))
    engine = fast.engine(shared, model, wanted, rows=32)
    free = torch.cuda.mem_get_info()[0]
    engine.sync(model)
    seen["kv_given_back_gib"] = (free - torch.cuda.mem_get_info()[0]) / 2**30
    seen["kv_gib"] = shared.memory.gib["kv_cache"]
    prompts = [shared.loaded.tokenizer(f"What is {i} plus {9 * i}?")["input_ids"] for i in range(4)]
    model.eval()
    drawn = Sampling(max_tokens=48, temperature=1.0, seed=2)
    greedy = Sampling(max_tokens=24, temperature=0.0)

    def gap() -> float:
        groups = engine.generate(prompts, 8, drawn)
        with torch.autocast("cuda", torch.bfloat16):  # as the loss's forward runs
            parts = [
                torch.tensor(row.logprobs) - rollouts.logprobs(model, prompt, row, 1.0)
                for prompt, group in zip(prompts, groups, strict=True)
                for row in group
            ]
        return float(torch.cat(parts).mean())

    seen["gap"], before = gap(), engine.generate(prompts, 1, greedy)
    engine.rest()
    move(policy.trainable(model), 2)
    engine.sync(model)
    seen["gap_after_update"], after = gap(), engine.generate(prompts, 1, greedy)
    seen["greedy_changed"] = [g[0].token_ids for g in before] != [g[0].token_ids for g in after]
    row = list(after[0][0].token_ids)
    ids = torch.tensor([[*prompts[0], *row]], device="cuda")
    pad = torch.full((1, 40), shared.loaded.tokenizer.pad_token_id, device="cuda")
    # all three as the policy learns, since FP8 rounds another way when it does not
    model.train()
    whole = torch.cat([pad, ids], 1)
    real = torch.cat([torch.zeros_like(pad), torch.ones_like(ids)], 1)
    chosen = torch.tensor(row, device="cuda")[:, None]

    def logprobs(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=tokens, attention_mask=mask).logits[0, -len(row) - 1 : -1]
        return logits.float().log_softmax(-1).gather(1, chosen)

    alone = logprobs(ids, torch.ones_like(ids))
    seen["padding"] = float((logprobs(whole, real) - alone).abs().mean())
    seen["padding_seen"] = float((logprobs(whole, torch.ones_like(whole)) - alone).abs().mean())
    engine.close()
    return seen


def move(parameters: Any, seed: int) -> None:
    draw = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=draw, device="cuda") * 0.02)


def _storages(model: Any) -> list[tuple[int, int]]:
    found = [p.untyped_storage() for p in model.parameters()]
    return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in found]


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(look(sys.argv[1], sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # as the worker does: freeing vLLM's memory while the interpreter is taken down may crash
