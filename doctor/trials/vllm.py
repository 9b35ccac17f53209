"""Importing vLLM with its compiled code, and starting it on a tiny model made on the spot. The only file that imports it.

A bare `import vllm` succeeds while the compiled extension is broken or missing, so the extension is loaded by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

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


def vllm_start(quantization: str = "none", dtype: str = "bfloat16") -> None:
    """Starts vLLM on a two-layer model with random weights, draws four tokens and tells vllm_start.

    LoRA is on, as in training. With `quantization="fp8"` the weights are quantised on the way in, as fp8-vllm does it.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # errors are raised here, not in a process of its own
    os.environ.setdefault(
        "VLLM_USE_FLASHINFER_SAMPLER", "0"
    )  # it would compile for minutes where no cubin is installed
    stage("make a tiny model")
    from doctor.trials.tiny import save_tiny_llama

    model = save_tiny_llama(Path("tiny-llama").absolute())
    stage("import vllm")
    from vllm import LLM, SamplingParams

    stage("start vllm")
    engine = LLM(
        model=str(model),
        tokenizer=str(model),
        dtype=dtype,
        quantization=None if quantization == "none" else quantization,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=_small_share(),
        enable_lora=True,  # training hands its adapter over so; the warm-up of LoRA is where mismatched sets die
        max_loras=1,
        max_lora_rank=16,
    )
    stage("generate")
    outputs = engine.generate(["1 2 3"], SamplingParams(n=2, temperature=1.0, max_tokens=4, ignore_eos=True))
    drawn = [len(completion.token_ids) for completion in outputs[0].outputs]
    if drawn != [4, 4]:
        raise RuntimeError(f"vLLM returned {drawn} tokens where 2 completions of 4 were asked for")
    tell("vllm_start", {"ok": True, "error": None})


def _small_share() -> float:
    """A share of the card that a tiny engine can live in: about 3 GiB, never more than is free."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return max(0.02, min(0.9, 0.9 * free / total, 4 * 2**30 / total))
