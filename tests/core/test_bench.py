"""The bench runs every engine on the same work and reports what a table needs; one that fails costs no other its number."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from grpo_portable.bench.cli import main
from grpo_portable.bench.policy import random_policy
from grpo_portable.bench.rollout import bench_rollout, progress, table
from grpo_portable.bench.shapes import Workload, config_of
from grpo_portable.errors import UsageError
from grpo_portable.models import policy

SMALL = Workload(prompts=2, group=2, prompt_tokens=6, new_tokens=8)


def test_two_engines_side_by_side() -> None:
    told: list[Mapping[str, Any]] = []
    report = bench_rollout("tiny", ["portable", "reference"], SMALL, device="cpu", repeats=2, tell=told.append)
    begun = [{"engine": name, "base": "dense"} for name in ("portable", "reference")]
    assert told == [begun[0], report["engines"][0], begun[1], report["engines"][1]]
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
    report = bench_rollout("tiny", ["portable"], work, device="cpu", repeats=1)
    (row,) = report["engines"]
    assert row["tok_s"] == pytest.approx(sum(limits) / row["seconds"][0], rel=0.01)
    assert any("row-steps a token" in note for note in row["notes"])
    at_full_rate = sum(limits) / row["full_tok_s"]
    assert row["cost"] == pytest.approx(row["seconds"][0] / at_full_rate, rel=0.01) and row["cost"] > 0
    assert f"{row['cost']:.2f}" in table({**report, "engines": [row]}).splitlines()[2]


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({"base": "dense"}, "portable: made ready, then measured ..."),
        ({"base": "nf4", "tok_s": 1234.5}, "portable, nf4: 1,234 tok/s"),
        ({"base": "dense", "error": "it broke"}, "portable: it broke"),
    ],
)
def test_a_reader_sees_a_line_when_an_engine_begins_and_when_it_ends(capsys, figures, line) -> None:
    progress({"engine": "portable", **figures})
    assert capsys.readouterr().err == f"{line}\n"


def test_equal_lengths_have_no_cost() -> None:
    report = bench_rollout("tiny", ["portable"], SMALL, device="cpu", repeats=1)
    assert "cost" not in report["engines"][0] and "cost" not in table(report)


def test_a_4_bit_base_is_measured_beside_the_dense_one() -> None:
    pytest.importorskip("bitsandbytes")
    report = bench_rollout("tiny", ["portable"], SMALL, bases=("dense", "nf4"), device="cpu", repeats=1)
    dense, four = report["engines"]
    assert (dense["base"], four["base"]) == ("dense", "nf4") and min(dense["sync_s"], four["sync_s"]) > 0
    assert "weights copy" in four["notes"] and "LoRA r=32" in four["notes"]
    assert "portable, nf4" in table(report)


def test_a_4_bit_policy_is_what_the_4_bit_path_trains(tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    import torch

    config = config_of("tiny")
    ours, _ = random_policy(config, "nf4", 4, 3, torch.device("cpu"), torch.float32)
    base, adapted = ours.get_base_model(), type(ours.base_model.model.model.layers[0].mlp.up_proj)
    assert adapted.__name__ == "Linear4bit" and type(base.lm_head) is torch.nn.Linear
    dense, _ = random_policy(config, "dense", 0, 3, torch.device("cpu"), torch.float32)
    dense.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=policy._nf4("float32"), dtype=torch.float32, device_map={"": "cpu"}
    )
    ids = torch.arange(12)[None]
    # in training, as the path is: in evaluation bitsandbytes packs weights anew for CPUs with AVX512-BF16, and takes only
    # multiples of 32 rows
    with torch.no_grad(), ours.train().disable_adapter():
        assert torch.equal(ours(ids).logits, loaded.train()(ids).logits)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_fails_is_named(capsys) -> None:
    given = ["--prompts", "2", "--group", "2", "--prompt-tokens", "6", "--new-tokens", "8", "--repeats", "1"]
    assert main(["rollout", "--shape", "tiny", "--engines", "vllm,portable", "--device", "cpu", "--json", *given]) == 0
    vllm, portable = json.loads(capsys.readouterr().out)["engines"]
    assert "vllm" in vllm["error"] and portable["tok_s"] > 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--help"], 0, "{rollout,step}"),
        (["rollout", "--help"], 0, "--shortest"),
        (["step", "--help"], 0, "--sides"),
        (["rollout", "--gpus", "0,1", "--help"], 0, "--together"),
        ([], 2, "required: what"),
        (["steps"], 2, "invalid choice: 'steps'"),
    ],
)
def test_the_first_words_say_what_is_measured(capsys, words, code, told) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == code and told in said.out + said.err


def test_unknown_names_are_refused(capsys) -> None:
    with pytest.raises(UsageError, match="no shape `huge`"):
        bench_rollout("huge", ["portable"], SMALL)
    with pytest.raises(UsageError, match="no engine `x`"):
        bench_rollout("tiny", ["portable", "x"], SMALL)
    with pytest.raises(UsageError, match="no base `int3`"):
        bench_rollout("tiny", ["portable"], SMALL, bases=["int3"])
    assert main(["rollout", "--shape", "huge"]) == 2
    said = capsys.readouterr()
    assert "no shape `huge`" in said.err and said.out == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--device", "xyz"], "no device `xyz`"),
        (["--device", "cuda:99"], "no device `cuda:99`"),
        (["--prompts", "0"], "whole number of at least 1, not '0'"),
        (["--repeats", "-1"], "whole number of at least 1, not '-1'"),
        (["--lora-rank", "x"], "whole number of at least 1, not 'x'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(capsys, given, words) -> None:
    try:
        code = main(["rollout", "--shape", "tiny", *given])
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr()
    assert code == 2 and words in said.err and said.out == ""
