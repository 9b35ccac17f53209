"""The doctor's proof on a CUDA card: vLLM starts on the tiny model in each number format that a path asks for.

pytest tests/gpu/test_prove_gpu.py -s
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from doctor import child, prove

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.mark.parametrize("form", ["none", prove.FP8_FORM])
def test_vllm_starts_as_training_starts_it(form: str) -> None:
    if form != "none" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no FP8")
    outcome = child.run("vllm_start", form, "bfloat16", timeout_s=180)
    print(f"\n{form}: {outcome.end} in {outcome.seconds:.1f} s")
    assert outcome.end == "ok", outcome
