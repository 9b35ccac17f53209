"""What the report says of an engine with weights of its own, from what run.json holds."""

import run_folders

from grpo_portable.report import engine
from grpo_portable.report import page as report_page

VLLM = {
    "weights": "FP8, one scale an output row",
    "start_s": 23.07,
    "sleeps": False,
    "because": "the card holds engine and update at once",
    "gpu_memory_utilization": 0.05,
    "memory_gib": {"engine_copy": 0.151, "engine_workspace": 1.25, "kv_cache": 0.7},
    "lora_rank": 16,
}


def test_an_engine_is_told_with_its_format_start_memory_and_rest(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=20, steps=3)
    run.update_json("run.json", engine="vllm", engine_details=VLLM)
    page = report_page.write_report(run).read_text()
    assert (
        "- **Rollout engine:** vllm; weights in FP8, one scale an output row; ready in 23.1 s; "
        "2.10 GiB planned (weights 0.15, workspace 1.25, KV cache 0.70); "
        "stays awake during updates, because the card holds engine and update at once" in page
    )


def test_an_engine_without_weights_of_its_own_has_no_line(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=20, steps=3)
    run.update_json("run.json", engine_details=None)
    assert "Rollout engine" not in report_page.write_report(run).read_text()


def test_what_is_not_recorded_is_left_out():
    assert engine.line({"engine": "vllm", "engine_details": {"weights": "bfloat16", "start_s": None}}) == (
        "vllm; weights in bfloat16"
    )
    assert engine.line({"engine": "vllm", "engine_details": {"memory_gib": {}, "start_s": "soon"}}) == ""
    assert engine.line({"engine": "vllm", "engine_details": "none"}) == ""
