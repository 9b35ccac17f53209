"""Seconds of a step on a CPU: by hand from given rates, and the rates themselves from a real trial."""

from __future__ import annotations

import importlib.util
from types import MappingProxyType

import pytest

from doctor import child, probes, speed, speed_cpu
from doctor.facts import Facts
from doctor.memory import Setting
from doctor.shapes import Shape, shape_of
from doctor.speed_cpu import Rates


def smollm2() -> Shape:
    shape = shape_of("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert shape is not None
    return shape


def test_a_step_by_hand() -> None:
    """8 rows of 64 tokens after 2 prompts of 100; 134,515,008 weights, read at 20 GB/s, multiplied at 80 Gflop/s."""
    setting = Setting("fp32", micro_batch=4, rollout_rows=8, prompt_tokens=100, completion_tokens=64, device="cpu")
    weights = 134_515_008
    step = 4 * weights / 20e9 + 2 * weights * 8 / (0.75 * 80e9) + 30 * (0.5e-3 + 8 * 15e-6)
    prefill = 2 * weights * 2 * 100 / (0.75 * 80e9)
    update = 3 * 2 * weights * 8 * 164 / (0.75 * 80e9) + 30 * 3 * (2 * 3e-3 + 8 * 164 * 8e-6)
    found = speed.cpu_step_estimate(smollm2(), setting, Rates(80.0, 20.0), prompts=2, group_size=4)
    assert (found.rollout_s, found.update_s) == (pytest.approx(64 * step + prefill), pytest.approx(update))
    assert found.total_s == pytest.approx(found.rollout_s + found.update_s)
    assert (found.low_s, found.high_s) == (pytest.approx(found.total_s / 2.5), pytest.approx(found.total_s * 2.5))


def test_more_rows_at_once_read_the_weights_less_often() -> None:
    few, many = (Setting("fp32", rollout_rows=rows, device="cpu") for rows in (8, 64))
    rate = Rates(80.0, 20.0)
    slow, fast = (speed_cpu.phases(smollm2(), s, rate, prompts=8, group_size=8)[0] for s in (few, many))
    # 256 tokens, 7 rounds fewer: each reads 0.54 GB at 20 GB/s and passes 30 blocks at 0.5 ms; prefills are the same 8
    assert slow - fast == pytest.approx(7 * 256 * (0.0269030016 + 0.015))


@pytest.mark.parametrize(
    "told", [None, 3, {}, {"gflops": 80.0}, {"gflops": "80", "gb_s": 2.0}, {"gflops": 0, "gb_s": 1}]
)
def test_rates_that_nobody_measured_are_none(told: object) -> None:
    assert speed_cpu.rates(Facts(extra=MappingProxyType({"cpu_rates": told}))) is None


def test_a_machine_without_torch_is_left_as_it_is() -> None:
    facts = Facts(packages=MappingProxyType({"torch": "absent"}))
    assert probes.with_cpu_rates(facts) is facts


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_trial_measures_rates_that_a_cpu_can_have() -> None:
    outcome = child.run("cpu", timeout_s=90)
    rates = speed_cpu.rates(Facts(extra=MappingProxyType(dict(outcome.told))))
    assert outcome.end == "ok" and rates is not None, outcome
    assert 0.1 < rates.gflops < 1e5 and 0.1 < rates.gb_s < 1e4
