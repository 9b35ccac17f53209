"""Models that are known, by their names, not to be computable in float16."""

import pytest

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
