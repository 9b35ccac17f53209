"""A step of ours beside a step of TRL's: the same amount of work is asked of both, and both are measured."""

from grpo_portable import catalogue
from grpo_portable.bench_step import bench_step, table
from grpo_portable.recipe import load

SMALL = [
    "path=cpu",
    "prompts_per_step=2",
    "group_size=4",
    "micro_batch=8",
    "rollout_rows=8",
    "eval_limit=4",
    "train_limit=32",
    "optimizer=adamw",
    "eval_data=arithmetic",
    "max_completion_tokens=24",
]


def test_both_sides_make_the_steps_they_are_asked_for():
    report = bench_step(load(catalogue.find("arithmetic-embedded"), SMALL), steps=2)
    for side in ("ours", "trl"):
        assert len(report[side]["seconds"]) == 2 and all(s > 0 for s in report[side]["seconds"])
        assert 8 <= report[side]["tokens_a_step"] <= 8 * 24
    ratio = report["trl"]["seconds_median"] / report["ours"]["seconds_median"]
    assert abs(report["times_faster"] - ratio) <= 0.01 + 0.01 * ratio
    assert "TRL's default" in table(report)
