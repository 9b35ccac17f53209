"""The report says what the files say, the same each time, and does without whatever is missing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import run_folders
from markdown_it import MarkdownIt

from grpo_portable.recipe import Recipe
from grpo_portable.report import charts, markdown, page, setting
from grpo_portable.run.folder import append_line, read_lines
from grpo_portable.scores import scoring, windows
from grpo_portable.supervision.ladder import SAME_CODE

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn() -> None:
    """For tests that look at charts. The others do without: charts take most of a report's time."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(charts, "draw", lambda *_: {})


def text_of(run) -> str:
    scoring.score_run(run)
    return page.write_report(run).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_everything_is_there(tmp_path):
    run = run_folders.make_run(tmp_path / "run", samples=2)
    text = text_of(run)
    scores = run.read_json("scores.json")
    assert f"**{page.verdict(run)}**" in text
    for number in (scores["counts"]["gained"], scores["counts"]["lost"]):
        assert f" {number} " in text
    assert "RTX 5090 32 GiB, driver 570.86 (CUDA 12.8), Ubuntu 22.04" in text
    assert "596 M parameters; " in text and "20,185,088 trained (3.39 %)" in text  # of the model without its adapter
    assert "7,470 questions, 3 skipped" in text
    assert "trl 1.16.0" in text
    assert "seed 3407" in text
    for heading in (
        "What ran",
        "Why no faster path",
        "Events",
        "Training, window by window",
        "Versions",
        "Repeating it",
    ):
        assert f"## {heading}\n" in text
    assert str(tmp_path) not in text


def test_the_table_is_the_scores(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=200)
    text = text_of(run)
    strict = run.read_json("scores.json")["strict"]
    row = next(line for line in text.splitlines() if "**strict**" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].startswith(f"**{100 * strict['base']:.1f} %** ({round(200 * strict['base'])})")
    assert cells[3] == f"**{100 * strict['delta']:+.1f}**"
    assert cells[4] == f"[{100 * strict['interval'][0]:+.1f}, {100 * strict['interval'][1]:+.1f}]"


def test_rebuilding_gives_the_same_bytes(tmp_path, drawn):
    run = run_folders.make_run(tmp_path / "run", n=60)
    text_of(run)
    first = {f.name: f.read_bytes() for f in [run.path / "report.md", *(run.path / "charts").iterdir()]}
    text_of(run)
    assert {f.name: f.read_bytes() for f in [run.path / "report.md", *(run.path / "charts").iterdir()]} == first


def test_charts_are_small_pngs(tmp_path, drawn):
    run = run_folders.make_run(tmp_path / "run", steps=150, samples=2)
    text = text_of(run)
    files = sorted((run.path / "charts").iterdir())
    assert [f.name for f in files] == ["accuracy.png", "components.png", "reward.png"]
    for file in files:
        assert file.read_bytes().startswith(PNG)
        assert file.stat().st_size < 60_000
        assert f"](charts/{file.name})" in text


def test_without_matplotlib_there_are_no_charts(tmp_path, monkeypatch, drawn):
    run = run_folders.make_run(tmp_path / "run", n=40)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python does for a module that cannot be imported
    text = text_of(run)
    assert "charts/" not in text
    assert not (run.path / "charts").exists()
    assert "window by window" in text


def test_evaluation_only(tmp_path):
    text = text_of(run_folders.make_run(tmp_path / "run", n=50, steps=0, stages=("base",)))
    assert text.startswith("# Evaluation of Qwen3-0.6B: openai/gsm8k\n")
    assert "there is no delta" in text
    assert "Training, window" not in text
    assert "delta, points" not in text
    assert "One training run" not in text
    assert "trained" not in section(text, "What ran").replace("training", "")
    assert "grpo-portable eval --model Qwen/Qwen3-0.6B --recipe recipe.yaml --out again" in text


def test_training_without_evaluation(tmp_path, drawn):
    run = run_folders.make_run(tmp_path / "run", stages=())
    text = text_of(run)
    assert "Nothing was evaluated yet" in text
    assert [f.name for f in sorted((run.path / "charts").iterdir())] == ["components.png", "reward.png"]
    assert "agree with the evaluation" not in text


def test_a_folder_with_a_recipe_and_nothing_else(tmp_path):
    run = run_folders.create(tmp_path / "run", Recipe())
    text = page.write_report(run).read_text()
    assert "Nothing was evaluated yet" in text
    assert section(text, "Versions").strip() == "Not recorded."


def test_with_a_bootstrap_three_models_stand_side_by_side(tmp_path):
    stages = ("base", "bootstrap", "tuned")
    text = text_of(run_folders.make_run(tmp_path / "run", n=100, stages=stages, bootstrap_epochs=3.0))
    head = next(line for line in text.splitlines() if line.startswith("| 100 held-out questions"))
    assert [cell.strip() for cell in head.strip("|").split("|")][1:5] == [
        "base",
        "after bootstrap",
        "tuned",
        "GRPO's delta, points",
    ]
    assert "bootstrap and GRPO together" in text
    assert "bootstrap of 3 epochs, then" in text


def test_metrics_after_a_resume_count_once(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=30, steps=20)
    for line in run_folders.metrics(14, seed=9)[10:]:
        append_line(run.metrics_file, {**line, "memory_gib": 77.0})
    text = text_of(run)
    assert text.startswith("# GRPO on Qwen3-0.6B, 20 steps: ")
    assert "77.00 GiB" in section(text, "Training, window by window")


def test_missing_and_null_metrics_leave_columns_out(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=30, steps=0)
    for step in range(1, 12):
        append_line(run.metrics_file, {"step": step, "reward": 0.5, "loss": None, "kl": None})
    rows = section(text_of(run), "Training, window by window").strip().splitlines()
    assert re.sub(r"\s+", " ", rows[0]) == "| steps | reward | diagnosis |"


def test_examples_show_both_answers_of_the_same_questions(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=300)
    text = section(text_of(run), "Questions gained and lost")
    gained, lost = text.split("<summary>lost")
    assert gained.count("\n- **`") == 10
    assert lost.count("\n- **`") == min(10, run.read_json("scores.json")["counts"]["lost"])
    assert gained.count("before: wrong") == gained.count("after: right") == 10
    assert lost.count("before: right") == lost.count("after: wrong") > 0


NASTY = "</details> | `code` ``` $x$ <script> **bold** \n\n# heading\n| a | b |\n[link](x) " + "word " * 300


def test_text_of_models_cannot_change_the_page(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=40)
    for stage in ("base", "tuned"):
        change = lambda r: {**r, "question": NASTY, "completion": NASTY + r["completion"]}  # noqa: E731
        run_folders.rewrite(run, stage, change)
    run.event("engine", NASTY, error=NASTY)
    text = text_of(run)
    plain = text_of(run_folders.make_run(tmp_path / "plain", n=40))
    headings = [token.tag for token in MarkdownIt().enable("table").parse(text) if token.type == "heading_open"]
    assert headings == [
        token.tag for token in MarkdownIt().enable("table").parse(plain) if token.type == "heading_open"
    ]
    html = MarkdownIt().enable("table").render(text)
    assert "<script" not in html
    assert html.count("</details>") == html.count("<details>")
    assert "<strong>bold</strong>" not in html
    assert max(map(len, text.splitlines())) < 1200


def test_report_is_valid_markdown(tmp_path, drawn):
    html = MarkdownIt().enable("table").render(text_of(run_folders.make_run(tmp_path / "run", n=60)))
    assert html.count("<h1>") == 1
    assert html.count("<table>") == 2
    assert html.count("<img") == 3


def test_closed_paths_one_line_a_wall():
    lines = setting.closed_paths(run_folders.PLAN, "bf16-hf")
    assert lines == [
        "- `fp8-vllm`, `bf16-vllm`, `fp16-vllm`: vllm is not installed, because the only wheel for this card needs torch 2.11, "
        "and 2.10.0+cu128 is installed (`NO_VLLM`)",
        "- `fp8-vllm`: nvcc is 12.8, because FP8 kernels need 12.9 (`OLD_NVCC`)",
        "- `fp8-hf`: no engine here reads FP8 weights",
    ]
    assert setting.closed_paths(run_folders.PLAN, "fp8-vllm") == []
    assert setting.closed_paths({}, "cpu") == []
    assert setting.closed_paths(run_folders.PLAN, None) == []


def test_closed_paths_by_one_wall_are_told_together():
    wall = {"code": "NO_GPU", "closes": list(setting.PATHS[:-1]), "fact": "no GPU was found", "because": []}
    assert setting.closed_paths({"walls": [wall]}, "cpu") == ["- all 7 faster paths: no GPU was found (`NO_GPU`)"]


FITS = {"open": True, "fits": True}
BROKEN = "vLLM could not start: ImportError: libcudart.so.13"


def fallback(left, to, **more):
    return {"kind": "fallback", "message": f"{left} failed", "from": left, "to": to, "error": BROKEN, "step": 0, **more}


@pytest.mark.parametrize(
    ("plan", "path", "events", "lines"),
    [
        (
            {"paths": {"fp8-hf": {"open": True, "fits": False}, "bf16-hf": FITS}},
            "qlora-hf",
            [],
            [
                "- `fp8-hf`: open, but the run does not fit into memory there",
                "- `bf16-hf`: open, and not taken: the reason is not recorded",
            ],
        ),
        (
            {"paths": {"bf16-hf": FITS, "fp16-hf": FITS}, "asked": "qlora-hf"},
            "qlora-hf",
            [],
            ["- `bf16-hf`, `fp16-hf`: open, and not taken: path qlora-hf was asked for"],
        ),
        (
            {"paths": {"bf16-vllm": FITS}},
            "bf16-hf",
            [fallback("bf16-vllm", "bf16-hf")],
            [
                f"- `bf16-vllm`: taken, and left before the first step: {BROKEN}",
            ],
        ),
        (
            {"paths": {"bf16-vllm": FITS}},
            "bf16-hf",
            [fallback("bf16-vllm", "bf16-hf", step=3)],
            [
                f"- `bf16-vllm`: taken, and left after step 3: {BROKEN}",
            ],
        ),
        (
            {
                "paths": {"fp8-vllm": FITS, "bf16-vllm": FITS, "fp16-vllm": FITS, "fp8-hf": {"open": False}},
                "walls": [{"code": "OLD", "closes": ["fp8-hf"], "fact": "too old"}],
            },
            "bf16-hf",
            [fallback("fp8-vllm", "bf16-hf", passed={"bf16-vllm": SAME_CODE, "fp16-vllm": SAME_CODE})],
            [
                "- `fp8-hf`: too old (`OLD`)",
                f"- `fp8-vllm`: taken, and left before the first step: {BROKEN}",
                f"- `bf16-vllm`, `fp16-vllm`: open, and not taken: left out when `fp8-vllm` failed, because {SAME_CODE}",
            ],
        ),
        (  # asked for one path, and below it left out another; a run that did not note why
            {
                "paths": dict.fromkeys(("fp8-vllm", "bf16-vllm", "fp16-vllm"), FITS),
                "asked": "bf16-vllm",
            },
            "fp8-hf",
            [fallback("bf16-vllm (unsloth)", "bf16-vllm"), fallback("bf16-vllm", "fp8-hf")],
            [
                "- `fp8-vllm`: open, and not taken: path bf16-vllm was asked for",
                f"- `bf16-vllm`: taken, and left before the first step: {BROKEN}",
                "- `fp16-vllm`: open, and not taken: left out when `bf16-vllm` failed",
            ],
        ),
    ],
)
def test_of_every_open_path_the_reason_why_it_was_not_taken_is_told(plan, path, events, lines):
    assert setting.closed_paths(plan, path, events) == lines


def test_events_are_told_once_and_saves_are_not():
    same = {"kind": "retry", "message": "one more try.", "step": 3, "error": "killed by signal 9"}
    lines = setting.events([{"kind": "saved", "message": "x"}, same, {**same, "step": 4}])
    assert lines == ["- **retry** after step 3: one more try (`killed by signal 9`) (2 times)"]
    assert setting.events([]) == ["None: no fault, no retry, no fallback."]
    many = setting.events([{"kind": "data", "message": f"row {i}"} for i in range(20)])
    assert len(many) == setting.MOST_EVENTS + 1
    assert "8 more" in many[-1]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, ""),
        ({"gpus": []}, "no GPU"),
        ({"gpus": None}, ""),
        ({"gpus": [{"name": "L4", "total_gib": 22.2}] * 2, "host": {"os": "Debian 12"}}, "2 x L4 22 GiB, Debian 12"),
        (
            {"gpus": [], "host": {"os": "Ubuntu 24.04", "arch": "x86_64", "ram_gib": 23.4}},
            "no GPU, Ubuntu 24.04, x86_64, 23 GiB RAM",
        ),
    ],
)
def test_machine_in_a_line(facts, text):
    assert setting.machine(facts) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0.4 s"), (48, "48 s"), (59.7, "1 min 0 s"), (725, "12 min 5 s"), (11_220, "3 h 7 min")]
)
def test_duration(seconds, text):
    assert setting.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "span"), [("18", "`18`"), ("a`b", "``a`b``"), ("`a`", "`` `a` ``"), ("a\n b", "`a ⏎ b`")]
)
def test_code_spans_hold_any_text(text, span):
    assert markdown.code(text) == span


def test_shorten_keeps_what_matters():
    text = "start " + "x" * 500 + " #### 18"
    assert markdown.shorten(text, 60).startswith("start x")
    assert markdown.shorten(text, 60, keep_end=True).endswith("#### 18")
    assert all(len(markdown.shorten(text, 60, keep_end=keep)) <= 60 for keep in (True, False))
    assert markdown.shorten("short", 60) == "short"


def test_smooth_is_a_running_mean():
    assert charts.smooth([1, 2, 3, 10]) == [1.5, 2, 5, 6.5]
    assert charts.smooth([5.0]) == [5.0]
    assert charts.smooth([0.5] * 9 + [1e20] + [0.5] * 9)[11:] == [0.5] * 8  # what comes after a spike is as it was
    assert charts.smooth([]) == []


def test_one_step_can_be_drawn(tmp_path, drawn):
    files = charts.draw(tmp_path, {}, windows.steps_in_order(run_folders.metrics(1)), [])
    assert list(files) == ["reward"]


def test_there_is_no_half_a_step():
    steps = windows.steps_in_order(run_folders.metrics(2))
    for figure in (charts._reward(steps, []), charts._components(charts.panels(steps))):
        shown = [axis for axis in figure.axes if axis.get_visible()]
        assert shown and all(tick == round(tick) for axis in shown for tick in axis.get_xticks())


def test_events_of_a_run_are_read_from_its_file(tmp_path):
    run = run_folders.make_run(tmp_path / "run", n=20)
    assert [e["kind"] for e in read_lines(run.events_file)] == ["oom", "fallback", "saved"]
    assert "`fp8-hf` → `bf16-hf` after step 17" in section(text_of(run), "Events")


def test_report_and_scores_need_no_torch():
    heavy = "[m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules]"
    code = f"import sys, grpo_portable.report.page, grpo_portable.report.compare; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planned_memory_stands_beside_the_peak_of_the_path_it_was_planned_for():
    recipe, planned = Recipe(), {"path": "bf16-hf", "ledger_gib": {"weights": 2.0, "activations": 1.5, "context": 0.55}}
    run = {"path": "bf16-hf", "peak_memory_gib": 3.4, "planned_memory": planned}
    assert "peak memory 3.40 GiB (3.50 planned)" in setting._path(recipe, run)  # torch sees no context
    fell = {**run, "path": "cpu"}
    assert "peak memory 3.40 GiB" in setting._path(recipe, fell)
    assert "planned" not in setting._path(recipe, fell)
    on_cpu = {**fell, "planned_memory": {**planned, "path": "cpu"}}
    assert "3.40 GiB (4.05 planned)" in setting._path(recipe, on_cpu)
