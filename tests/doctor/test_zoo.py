"""The machine zoo: every machine gets the path, the closed paths and the words that its report calls for."""

from __future__ import annotations

import json

import pytest
from machine_cases import VLLM, Case, handed
from machine_more import ours

from doctor.diagnosis import PATHS, Diagnosis, diagnosis_to_json
from doctor.explain import CODES
from doctor.facts import facts_from_json
from doctor.plan import diagnose

CASES = [*handed(), *ours()]


@pytest.fixture(scope="module")
def diagnoses() -> dict[str, Diagnosis]:
    return {case.id: diagnose(facts_from_json(case.facts), case.model) for case in CASES}


def test_the_zoo_is_large_and_its_names_are_unique() -> None:
    assert len(handed()) >= 54 and len(ours()) >= 30
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_machine(case: Case, diagnoses: dict[str, Diagnosis]) -> None:
    d = diagnoses[case.id]
    assert d.plan.path in case.path_any_of
    assert [p for p in case.closed if d.paths[p].open] == []
    assert [p for p in case.open if not d.paths[p].open] == []
    assert set(case.codes) <= {w.code for w in d.walls}
    if case.after is not None:
        assert d.after_fix == case.after
    closing = [w for w in d.walls if not case.closed or set(w.closes) & set(case.closed)]
    raw = diagnosis_to_json(d)["walls"]
    text = json.dumps(
        [
            {k: v for k, v in r.items() if k not in ("code", "closes")}
            for r, w in zip(raw, d.walls, strict=True)
            if w in closing
        ]
    )
    assert [m for m in case.mentions if m.lower() not in text.lower()] == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_what_holds_for_every_machine(case: Case, diagnoses: dict[str, Diagnosis]) -> None:
    d = diagnoses[case.id]
    assert tuple(d.paths) == PATHS
    for path, state in d.paths.items():
        assert state.open == (not state.walls)
        assert state.walls == tuple(dict.fromkeys(w.code for w in d.walls if path in w.closes))
    if d.plan.path is not None:
        assert d.paths[d.plan.path].open and d.paths[d.plan.path].fits is not False
        assert (d.plan.engine == "vllm") == (d.plan.path in VLLM)
        assert bool(d.plan.gpus) == (d.plan.path != "cpu")
        assert PATHS.index(d.after_fix or "cpu") <= PATHS.index(d.plan.path)
    assert d.plan.reasons
    for wall in d.walls:
        assert wall.code in CODES
        assert wall.fact and wall.because and wall.help
        assert "\n" not in wall.fact and not wall.fact.endswith(".")
        assert all(h.confidence in ("certain", "likely", "try") for h in wall.help)
        assert not any(h.command and h.command in h.text for h in wall.help), "a command is given once"
    assert json.loads(json.dumps(diagnosis_to_json(d)))["schema"] == 1
