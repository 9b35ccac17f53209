"""A real `vllm serve` on this card, and a run whose rollouts come from it.

    pytest tests/gpu/test_server_gpu.py -s
    GRPO_PORTABLE_TEST_MODEL=SmolLM2-135M-Instruct.Q4_1.gguf pytest tests/gpu/test_server_gpu.py -s

`-s` shows what was measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import gpu_runs
import pytest
import rollouts
import tiny
import torch

from grpo_portable.errors import ServerError
from grpo_portable.models import policy
from grpo_portable.rollout import server
from grpo_portable.run.folder import read_lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
START_LIMIT_S = 150.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return gpu_runs.model_folder(
        os.environ.get("GRPO_PORTABLE_TEST_MODEL"), tmp_path_factory.mktemp("served") / "model"
    )


@pytest.fixture(scope="module")
def url(source: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on the model, as `rollout.server_request.command` starts it, small enough to share the card."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", source, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enable-lora", "--max-lora-rank", "16", "--max-model-len", "256"]
    command += ["--logprobs-mode", "processed_logprobs", "--dtype", "bfloat16", "--max-num-seqs", "64"]
    command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2 << 30)]
    command += ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})]
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = tmp_path_factory.mktemp("log") / "server.log"
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        while not _well(address):
            tail = log.read_text(errors="replace")[-6000:]
            assert process.poll() is None, tail
            assert time.perf_counter() - began < START_LIMIT_S, tail
            time.sleep(0.5)
        print(f"\nserver ready after {time.perf_counter() - began:.0f} s")
        yield address
    finally:
        for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):  # its engine is a process of its own
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(seconds)


def _well(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_a_run_whose_rollouts_come_from_a_server(source: str, url: str, tmp_path: Path) -> None:
    data = tiny.questions_folder(tmp_path / "sums")
    wanted = gpu_runs.recipe(source, data, "bf16-hf", backend="server", vllm_server=url, temperature=0.9)
    began = time.perf_counter()
    made = gpu_runs.supervised(tmp_path / "run", wanted)
    told = made.read_json("run.json")
    lines = list(read_lines(made.metrics_file))
    print(f"run: {time.perf_counter() - began:.0f} s, {told['engine_details']}")
    for line in lines:
        print(
            {k: line.get(k) for k in ("step", "loss", "reward", "sampler_kl", "ratio_cut", "rollout_s", "tokens_per_s")}
        )
    assert told["engine"] == "vllm-server" and abs(told["engine_details"]["apart_at_start"]) < 0.05
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(abs(line["sampler_kl"]) < 0.05 for line in lines)  # each update reached the server
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        assert len(json.load(answer)["data"]) == 1  # the run took its adapter away


def test_another_model_is_not_taken_for_this_one(source: str, url: str) -> None:
    loaded = policy.load(source, dtype="bfloat16", device="cuda")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.3)
    wanted = gpu_runs.recipe(source, Path("."), "bf16-hf", backend="server", vllm_server=url)
    with pytest.raises(ServerError, match="nats a token less likely"):
        server.make(policy.add_adapter(loaded.model, wanted), loaded.tokenizer, wanted, dtype="bfloat16")


def test_drawn_rows_have_the_policys_probabilities(source: str, url: str) -> None:
    loaded = policy.load(source, dtype="bfloat16", device="cuda")
    wanted = gpu_runs.recipe(source, Path("."), "bf16-hf", backend="server", vllm_server=url, temperature=0.7)
    torch.manual_seed(0)
    model = policy.add_adapter(loaded.model, wanted).eval()
    with torch.no_grad():
        for parameter in policy.trainable(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    engine = server.make(model, loaded.tokenizer, wanted, dtype="bfloat16")
    engine.sync(model)
    prompt = loaded.tokenizer("What is 12 plus 30?")["input_ids"]
    began = time.perf_counter()
    from grpo_portable.rollout.protocol import Sampling

    groups = engine.generate([prompt] * 4, 8, Sampling(max_tokens=64, temperature=0.7, seed=3))
    seconds = time.perf_counter() - began
    rows = [row for group in groups for row in group]
    assert len({row.token_ids for row in rows}) > 16  # each row has a seed of its own
    difference = torch.cat([torch.tensor(row.logprobs) - rollouts.logprobs(model, prompt, row, 0.7) for row in rows])
    print(f"{sum(len(row.token_ids) for row in rows) / seconds:.0f} tokens/s, mean gap {difference.mean():.4f} nats")
    assert abs(float(difference.mean())) < 0.05
    engine.close()
