"""Importing vLLM with its compiled code, and starting it on a tiny model made on the spot. The only file that imports it.

A bare `import vllm` succeeds while the compiled extension is broken or missing, so the extension is loaded by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from doctor.trials import stage, tell

# The names changed over the releases (stable-ABI builds since 0.22); those that are there must load.
_EXTENSIONS = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "cumem_allocator")


def vllm_import() -> None:
    """Tells vllm_import; whatever stops the import is raised."""
    stage("import torch")
    import torch  # noqa: F401

    stage("import vllm")
    import vllm

    folder = Path(vllm.__file__).resolve().parent
    there = [name for name in _EXTENSIONS if _compiled(folder, name)]
    if not _compiled(folder, "_C*"):  # any: the CPU wheels have one for each instruction set
        raise ImportError("vllm is installed without its compiled code: no vllm._C for this platform")
    stage("import vllm's compiled code")
    for name in there:
        importlib.import_module(f"vllm.{name}")
    tell("compiled", there)
    stage("import vllm.LLM")
    from vllm import LLM, SamplingParams  # noqa: F401

    tell("vllm_import", {"ok": True, "error": None})


def _compiled(folder: Path, name: str) -> bool:
    return any(any(folder.glob(name + end)) for end in (".so", ".*.so", ".pyd", ".*.pyd"))


# as in training; settings the user made are kept
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # errors are raised here, not in a process of its own
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile for minutes where no cubin is installed
    "VLLM_HOST_IP": "127.0.0.1",  # a host name that does not resolve would hang it
}
_ROWS, _CONTEXT = 8, 256
_KV_BYTES = 64 << 20  # a tiny model's 8 rows need 2 MiB


def vllm_start(quantization: str = "none", dtype: str = "bfloat16") -> None:
    """Starts vLLM on a two-layer model with random weights, draws four tokens and tells vllm_start.

    `quantization`: none, or what vLLM makes of the weights on the way in (fp8_per_channel, as fp8-vllm does it).
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stage("make a tiny model")
    from doctor.trials.tiny import save_tiny_llama

    model = save_tiny_llama(Path("tiny-llama").absolute())
    stage("import vllm")
    from vllm import LLM, SamplingParams

    stage("start vllm")
    engine = LLM(**arguments(str(model), None if quantization == "none" else quantization, dtype, _small_share()))
    stage("generate")
    outputs = engine.generate(["1 2 3"], SamplingParams(n=2, temperature=1.0, max_tokens=4, ignore_eos=True))
    drawn = [len(completion.token_ids) for completion in outputs[0].outputs]
    if drawn != [4, 4]:
        raise RuntimeError(f"vLLM returned {drawn} tokens where 2 completions of 4 were asked for")
    tell("vllm_start", {"ok": True, "error": None})


def arguments(model: str, quantization: str | None, dtype: str, share: float) -> dict[str, Any]:
    """The arguments training gives vLLM, each with a small value: one that this vLLM does not know ends the trial too.

    LoRA is on, since training hands its adapter over so, and its warm-up is where mismatched sets die. `load_format` alone is
    the trial's own: the tiny model has no file of weights.
    """
    return {
        "model": model,
        "load_format": "dummy",
        "trust_remote_code": False,
        "dtype": dtype,
        "quantization": quantization,
        "seed": 0,
        "max_model_len": _CONTEXT,
        "max_num_seqs": _ROWS,
        "max_num_batched_tokens": 8 * _CONTEXT,
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": _KV_BYTES,
        "enable_sleep_mode": False,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "compilation_config": {
            "cudagraph_capture_sizes": [1, 2, 4, _ROWS],
            "cudagraph_specialize_lora": False,
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
        },
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def _small_share() -> float:
    """A share of the card that a tiny engine can live in: about 3 GiB, never more than is free."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return max(0.02, min(0.9, 0.9 * free / total, 4 * 2**30 / total))
