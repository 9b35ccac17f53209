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
    ("gpu", "model", "path", "warns"),
    [
        (_T4, "google/gemma-3-1b-it", "fp16-hf", True),
        (_T4, "google/gemma-3-12b-it", "qlora-hf", True),  # 4-bit weights, float16 arithmetic
        (_T4, "Qwen/Qwen3-8B", "qlora-hf", False),
        (_4060, "google/gemma-3-4b-it", "qlora-hf", False),  # 4-bit weights, bfloat16 arithmetic
    ],
)
def test_warned_of_where_the_path_computes_in_it(gpu: dict[str, Any], model: str, path: str, warns: bool) -> None:
    found = diagnose(facts_from_json(machine(gpu)), model)
    assert found.plan.path == path
    assert ("MODEL-FLOAT16" in {wall.code for wall in found.walls}) is warns
