"""Facts and their JSON: round trips, unknown keys kept, refusals in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_cases import handed
from machine_more import ours

from doctor.facts import ABSENT, Facts, FactsError, facts_from_json, facts_to_json


@pytest.mark.parametrize("case", [*handed(), *ours()], ids=lambda c: c.id)
def test_json_and_back_is_the_same_machine(case: Any) -> None:
    facts = facts_from_json(case.facts)
    assert facts_from_json(json.loads(json.dumps(facts_to_json(facts)))) == facts


def test_unknown_keys_are_kept_wherever_they_stand() -> None:
    raw: dict[str, Any] = {
        "schema": 1,
        "mood": "sunny",
        "host": {"platform": "linux", "kernel": "6.8"},
        "gpus": [{"index": 0, "uuid_kind": "GPU"}, None],
        "driver": {"version": "580", "open": True},
        "probes": {"torch_cuda": {"ok": True, "seconds": 3}, "new_trial": {"ok": None, "why": [1, 2]}},
    }
    facts = facts_from_json(raw)
    assert facts.extra == {"mood": "sunny"}
    back = facts_to_json(facts)
    assert back["mood"] == "sunny" and back["host"]["kernel"] == "6.8" and back["driver"]["open"] is True
    assert back["gpus"][0]["uuid_kind"] == "GPU" and len(back["gpus"]) == 2
    assert back["probes"]["torch_cuda"]["seconds"] == 3 and back["probes"]["new_trial"]["why"] == [1, 2]


def test_null_is_unknown_and_absent_is_looked_for() -> None:
    facts = facts_from_json({"packages": {"torch": None, "vllm": ABSENT, "trl": "1.16.0"}, "gpus": None})
    assert facts.version("torch") is None and not facts.absent("torch")
    assert facts.version("vllm") is None and facts.absent("vllm")
    assert facts.version("trl") == "1.16.0" and facts.gpus is None
    assert facts_from_json({"gpus": []}).gpus == ()
    assert facts_from_json({}) == Facts()


def test_numbers_count_as_text_where_text_is_wanted() -> None:
    """A person writes 12.0 and 8.9 without quotes."""
    facts = facts_from_json({"gpus": [{"compute_capability": 8.9}], "driver": {"cuda": 12.8}})
    assert facts.gpus is not None and facts.gpus[0].compute_capability == "8.9" and facts.driver.cuda == "12.8"


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ([], "one JSON object"),
        ("facts", "one JSON object"),
        ({"schema": 2}, "schema"),
        ({"schema": None}, "schema"),
        ({"schema": True}, "schema"),
        ({"gpus": {}}, "gpus"),
        ({"gpus": [3]}, "gpus[0]"),
        ({"host": []}, "host"),
        ({"host": {"ram_gib": -1}}, "host.ram_gib"),
        ({"host": {"ram_gib": float("nan")}}, "host.ram_gib"),
        ({"host": {"ram_gib": 10**400}}, "host.ram_gib"),
        ({"host": {"ram_gib": "64"}}, "host.ram_gib"),
        ({"host": {"container": 1}}, "host.container"),
        ({"driver": {"version": 10**5000}}, "driver.version"),
        ({"packages": {"torch": ["2.0"]}}, "packages.torch"),
        ({"probes": {"torch_cuda": True}}, "probes.torch_cuda"),
        ({"probes": {"torch_arch_list": "sm_90"}}, "torch_arch_list"),
        ({"env": {"A": {}}}, "env.A"),
    ],
)
def test_a_wrong_type_is_refused_by_name_in_one_line(raw: Any, names: str) -> None:
    with pytest.raises(FactsError) as refusal:
        facts_from_json(raw)
    assert names in str(refusal.value) and "\n" not in str(refusal.value) and len(str(refusal.value)) < 200


_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
_sections = st.sampled_from(["schema", "host", "gpus", "driver", "toolkit", "packages", "probes", "env", "other"])


@given(raw=st.dictionaries(_sections, _values, max_size=4))
def test_any_object_is_read_or_refused(raw: dict[str, Any]) -> None:
    try:
        facts = facts_from_json(raw)
    except FactsError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert facts_from_json(facts_to_json(facts)) == facts or "nan" in repr(raw)
