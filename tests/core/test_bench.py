"""The bench runs every engine on the same work and reports what a table needs; one that fails costs no other its number."""

from __future__ import annotations

import importlib.util
import json

import pytest

from grpo_portable.bench import Workload, bench_rollout, main, table
from grpo_portable.errors import UsageError

SMALL = Workload(prompts=2, group=2, prompt_tokens=6, new_tokens=8)


def test_two_engines_side_by_side() -> None:
    report = bench_rollout("tiny", ["portable", "reference"], SMALL, device="cpu", repeats=2)
    assert report["dtype"] == "float32" and report["workload"]["group"] == 2
    for row in report["engines"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["tok_s"] == pytest.approx(32 / (sum(row["seconds"]) / 2), rel=0.01)
        assert 0 < row["floor_share"] < 1 and row["ready_s"] > 0
    text = table(report)
    assert "portable" in text and "reference" in text and "LoRA r=32" in text


def test_the_floor_is_bytes_over_bandwidth() -> None:
    report = bench_rollout("tiny", [], SMALL, device="cpu")
    weights = 4 * (128 * 32 * (2 * 4 + 2 * 2) + 3 * 128 * 344) + 128 * 300
    keys = 2 * 4 * 2 * 32 * (6 + 4) * 4
    assert report["floor"]["bytes_per_step"] == 4 * (weights + keys)
    seconds = report["floor"]["bytes_per_step"] / report["floor"]["bytes_per_s"]
    assert report["floor"]["tok_s"] == pytest.approx(4 / seconds, rel=1e-3)


def test_spread_lengths_are_the_work_and_their_cost_is_told() -> None:
    work = Workload(prompts=2, group=4, prompt_tokens=6, new_tokens=12, shortest=2, rows=4)
    limits = work.limits()
    assert limits is not None and len(limits) == 8 and min(limits) >= 2 and max(limits) <= 12
    (row,) = bench_rollout("tiny", ["portable"], work, device="cpu", repeats=1)["engines"]
    assert row["tok_s"] == pytest.approx(sum(limits) / row["seconds"][0], rel=0.01)
    assert any("row-steps a token" in note for note in row["notes"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_fails_is_named(capsys) -> None:
    given = ["--prompts", "2", "--group", "2", "--prompt-tokens", "6", "--new-tokens", "8", "--repeats", "1"]
    assert main(["rollout", "--shape", "tiny", "--engines", "vllm,portable", "--device", "cpu", "--json", *given]) == 0
    vllm, portable = json.loads(capsys.readouterr().out)["engines"]
    assert "vllm" in vllm["error"] and portable["tok_s"] > 0


def test_unknown_names_are_refused(capsys) -> None:
    with pytest.raises(UsageError, match="no shape `huge`"):
        bench_rollout("huge", ["portable"], SMALL)
    with pytest.raises(UsageError, match="no engine `x`"):
        bench_rollout("tiny", ["portable", "x"], SMALL)
    assert main(["rollout", "--shape", "huge"]) == 2
    assert "no shape `huge`" in capsys.readouterr().out
