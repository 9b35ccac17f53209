"""Each trial of a proof closes what it proves, and nothing while it is unknown or passed."""

from __future__ import annotations

from types import MappingProxyType

import doctor_samples as samples
import pytest

from doctor import prove
from doctor.diagnosis import PATHS
from doctor.facts import Probe
from doctor.walls_proof import TRIALS, proof_walls


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize(("ok", "raised"), [(False, True), (None, False), (True, False)])
def test_only_a_failure_raises_the_wall(name: str, ok: bool | None, raised: bool) -> None:
    facts = samples.facts(probes=MappingProxyType({name: Probe(ok, "the text of the failure")}))
    walls = proof_walls(facts)
    assert [w.code for w in walls] == ([TRIALS[name].code] if raised else [])
    assert not raised or "the text of the failure" in walls[0].because[0]


def test_what_a_proof_tries_has_a_wall_or_a_rule_of_its_own() -> None:
    tried = {step.probe for path in PATHS for step in prove.steps(path, "bfloat16")}
    assert tried - set(TRIALS) == {"fp8_matmul", "bnb_4bit", "vllm_start"}
    assert set(TRIALS) <= tried


@pytest.mark.parametrize("path", PATHS)
def test_a_failed_step_never_leaves_its_path_open(path: str) -> None:
    for step in prove.steps(path, "bfloat16"):
        if step.probe in TRIALS and step.probe != "cuda_graph":
            assert path in TRIALS[step.probe].closes, step.probe
