"""What the plan says of the open paths it does not take."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from doctor.facts import facts_from_json
from grpo_portable.plan import planning
from grpo_portable.recipe import Recipe

H200 = Path(__file__).parents[2] / "reports" / "gsm8k-smollm2-135m-fp8-vllm-h200" / "facts.json"
SMALL, LARGER = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-1.7B"


def told(**changes):
    """{path: seconds} of the others, in their order, and the plan's own path and seconds."""
    recipe = replace(Recipe(), **{"data": "arithmetic", "model": LARGER, **changes})
    facts = facts_from_json(json.loads(H200.read_text(encoding="utf-8")))
    settled, diagnosis = planning.plan(recipe, facts, auto=True)
    step = planning.step_seconds(settled, diagnosis)
    text = planning.others(settled, diagnosis) or ""
    return settled.recipe.path, step, {path: float(s) for path, s in re.findall(r"([\w-]+) ([\d.]+) s", text)}


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"model": LARGER}, {"fp8-hf", "bf16-hf", "qlora-hf", "bf16-vllm"}),
        ({"model": SMALL}, {"bf16-hf", "qlora-hf", "bf16-vllm"}),  # FP8 without vLLM is not shown to be faster there
        ({"path": "bf16-hf"}, {"fp8-hf", "qlora-hf", "bf16-vllm", "fp8-vllm"}),
        ({"dora": True, "path": "bf16-hf"}, {"fp8-hf", "qlora-hf"}),  # vLLM serves no such adapter
        ({"vllm_server": "http://localhost:8000", "path": "bf16-hf"}, set()),
        ({"path": "cpu", "model": "embedded"}, set()),
    ],
)
def test_open_paths_that_could_run_the_recipe_are_named(changes, paths):
    path, _, others = told(**changes)
    assert set(others) == paths - {path}


def test_the_fastest_comes_first_and_the_seconds_are_those_of_a_plan_on_that_path():
    path, own, others = told(model=SMALL)
    assert path == "fp8-vllm" and list(others.values()) == sorted(others.values())
    assert others["bf16-hf"] < 0.8 * own.total_s  # as measured there: vLLM's step of a small model is its host's time
    for other, seconds in others.items():
        _, step, _ = told(model=SMALL, path=other)
        assert seconds == pytest.approx(step.total_s, abs=0.051)
