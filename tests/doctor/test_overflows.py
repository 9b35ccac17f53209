"""Models that are known, by their names, not to be computable in float16."""

from typing import Any

import pytest
from machine_cases import card, machine

from doctor.facts import facts_from_json
from doctor.plan import diagnose
from doctor.walls_model import overflows_in_float16


@pytest.mark.parametrize(
    ("model", "overflows"),
    [
        ("google/gemma-2-9b-it", True),
        ("google/gemma-3-270m", True),
        ("google/gemma-3n-E2B-it", True),
        ("google/medgemma-4b-it", True),  # a Gemma 3
        ("google/functiongemma-270m-it", True),  # a Gemma 3
        ("openai/gpt-oss-20b", True),
        ("google/gemma-2b", False),  # the first Gemma, of 2 B
        ("google/gemma-7b-it", False),
        ("Qwen/Qwen3-4B", False),
        ("./gemma-3/checkpoints/Qwen3-0.6B", False),
    ],
)
def test_by_name(model: str, overflows: bool) -> None:
    assert overflows_in_float16(model) is overflows


_T4, _4060 = card("Tesla T4", "7.5", 14.7), card("RTX 4060", "8.9", 8.0)


@pytest.mark.parametrize(
    ("gpus", "model", "path", "after"),
    [
        ([_T4], "google/gemma-3-1b-it", "cpu", "cpu"),  # also 4-bit weights compute in float16 there
        ([_T4], "google/gemma-3n-E2B-it", "cpu", "cpu"),  # of a shape that is not known
        ([_T4], "Qwen/Qwen3-8B", "qlora-hf", "qlora-hf"),
        ([_4060], "google/gemma-3-4b-it", "qlora-hf", "qlora-hf"),  # in bfloat16
        ([_T4, _4060], "google/gemma-3-1b-it", "bf16-hf", "fp8-vllm"),
    ],
)
def test_no_path_computes_it_in_float16(gpus: list[dict[str, Any]], model: str, path: str, after: str) -> None:
    found = diagnose(facts_from_json(machine(*gpus)), model)
    assert (found.plan.path, found.after_fix) == (path, after)
    assert ("MODEL-FLOAT16" in {wall.code for wall in found.walls}) is (path == "cpu")
