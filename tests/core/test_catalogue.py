"""Every recipe that comes along plans on every machine of the zoo, introduces itself, and is in the wheel."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import spent
from typer.testing import CliRunner

from doctor.diagnosis import PATHS
from doctor.facts import Facts, Gpu, Host, Probe, facts_from_json
from doctor.phrases import verdict
from doctor.plan import diagnose
from doctor.speed import duration
from grpo_portable import cli, launch, preflight, reach, recipe_page, rewards
from grpo_portable.errors import PathClosed, RecipeError, RunFolderError, UsageError
from grpo_portable.plan import catalogue, listing, planning
from grpo_portable.recipe import Recipe, load, override, to_yaml

ROOT = Path(__file__).resolve().parents[2]
MACHINES = {
    file.stem: facts_from_json(json.loads(file.read_text(encoding="utf-8"))["facts"])
    for file in sorted((ROOT / "tests" / "doctor" / "machines").glob("*.json"))
}
NAMES = [entry.name for entry in catalogue.entries()]
OK = Probe(True, None)


def recipe_of(name: str) -> Recipe:
    recipe = load(catalogue.find(name))
    return replace(recipe, model=listing.STAND_IN) if recipe.model == "auto" else recipe


def test_every_reference_system_and_kind_of_machine_has_a_recipe() -> None:
    wanted = {"gsm8k-qwen3-4b-qlora", "math-qwen3-8b-fp8", "dapo-llama-3.2-1b-fp8", "dapo-llama-3.2-3b-fp8"}
    wanted |= {"gsm8k-smollm2-135m", "arithmetic-embedded", "gsm8k-qwen3-1.7b-t4", "gsm8k-qwen3-1.7b-8gb"}
    wanted |= {"gsm8k-qwen3-8b-24gb", "dapo-qwen3-14b-80gb", "gsm8k-smollm2-135m-cpu"}
    assert wanted <= set(NAMES)
    assert len(MACHINES) >= 50


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_plans_or_refuses_with_a_reason_on_every_machine(name: str) -> None:
    recipe, ran = recipe_of(name), 0
    for number, (machine, facts) in enumerate(MACHINES.items()):
        try:
            settled, diagnosis = planning.plan(recipe, facts, auto=True)
        except PathClosed as refusal:
            assert refusal.because and refusal.help, f"{machine}: {refusal.lines()}"
            continue
        ran += 1
        made = settled.recipe
        left = {
            key
            for key in ("path", "model", "data", "eval_data", "micro_batch", "optimizer")
            if getattr(made, key) == "auto"
        }
        assert not left, machine
        assert diagnosis.paths[made.path].open, machine
        assert made.prompts_per_step * made.group_size % int(made.micro_batch) == 0
        minutes = planning.minutes(settled, diagnosis)
        assert minutes is None or "estimate" in minutes
        if number % 5 == 0:
            again, _ = planning.plan(made, facts, auto=False)
            assert again.recipe == made, f"{machine}: the settled recipe settles to another one"
    assert ran, "no machine of the zoo can run it"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_rewards_that_exist_and_a_readable_template(name: str) -> None:
    recipe = recipe_of(name)
    preflight.known_rewards(recipe)
    preflight.known_template(recipe)
    assert all(":" in reward or reward in rewards.NAMES for reward in recipe.rewards)
    for line in catalogue.find(name).read_text(encoding="utf-8").splitlines():
        assert len(line) <= 132, line


def test_system_a_is_as_published() -> None:
    a = recipe_of("gsm8k-qwen3-4b-qlora")
    assert (a.model, a.path, a.lora_rank, a.steps, a.group_size) == ("Qwen/Qwen3-4B", "qlora-hf", 32, 150, 8)
    assert (a.eval_limit, a.answer_style, a.eval_samples) == (300, "gsm8k_marker", 0)
    assert dict(zip(a.rewards, a.reward_weights, strict=True)) == {"correctness": 1, "marker_format": 4}


def test_system_b_counts_as_published() -> None:
    from doctor.shapes import shape_of

    b, shape = recipe_of("math-qwen3-8b-fp8"), shape_of("Qwen/Qwen3-8B")
    assert shape is not None
    assert shape.adapter_params(b.lora_rank) == 87_293_952
    assert (b.bootstrap_limit, b.bootstrap_learning_rate, b.bootstrap_batch) == (200, 2e-4, 8)
    assert (b.steps, b.learning_rate, b.warmup_steps, b.weight_decay) == (100, 5e-6, 10, 0.001)
    assert (b.max_prompt_tokens, b.max_completion_tokens, b.group_size, b.min_p, b.seed) == (512, 1536, 4, 0.1, 3407)
    assert (b.max_grad_norm, b.rslora, b.optimizer, b.loss) == (0.1, True, "adamw_8bit", "grpo")


def test_system_c_counts_as_published() -> None:
    from doctor.shapes import shape_of

    c, shape = recipe_of("dapo-llama-3.2-1b-fp8"), shape_of("meta-llama/Llama-3.2-1B-Instruct")
    assert shape is not None
    assert shape.adapter_params(c.lora_rank) == 22_544_384
    assert (c.lora_alpha, c.rslora, c.gradient_checkpointing) == (64, True, True)
    assert (c.prompt_percentile, c.context_tokens) == (90, 2048)
    assert "<start_working_out>" in c.chat_template
    three = recipe_of("dapo-llama-3.2-3b-fp8")
    assert replace(three, model=c.model) == c


# --- planning


def card(name: str, capability: str, gib: float, **packages: str) -> Facts:
    return Facts(
        host=Host(platform="linux", arch="x86_64", python="3.12", ram_gib=64.0),
        gpus=(Gpu(0, "nvidia", name, capability, None, gib, gib - 0.4, False, False),),
        packages={"torch": "2.13.0+cu130", "vllm": "absent", "bitsandbytes": "0.50.2", **packages},
        probes={"torch_cuda": OK, "bnb_4bit": OK, "fp8_matmul": OK},
        torch_arch_list=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    )


def test_a_model_that_overflows_in_float16_is_not_put_on_a_card_without_bfloat16() -> None:
    gemma = replace(recipe_of("gsm8k-base"), model="google/gemma-3-1b-it")
    with pytest.raises(PathClosed) as refused:
        planning.plan(gemma, card("Tesla T4", "7.5", 15.0), auto=True)
    assert "overflows in float16" in str(refused.value)
    settled, _ = planning.plan(gemma, card("NVIDIA A10", "8.6", 22.0), auto=True)
    assert settled.recipe.path == "bf16-hf"
    qwen = replace(gemma, model="Qwen/Qwen3-1.7B")
    assert planning.plan(qwen, card("Tesla T4", "7.5", 15.0), auto=True)[0].recipe.path == "fp16-hf"


def test_dora_takes_a_path_without_vllm() -> None:
    facts = MACHINES["ref-h100-complete"]
    plain = recipe_of("gsm8k-qwen3-4b")
    assert planning.plan(plain, facts, auto=True)[0].recipe.path.endswith("-vllm")
    settled, _ = planning.plan(replace(plain, dora=True), facts, auto=True)
    assert settled.recipe.path.endswith("-hf")
    assert any("not DoRA" in reason.text for reason in settled.reasons)


def test_a_large_model_goes_to_the_cpu_only_when_told_to() -> None:
    laptop = Facts(host=Host(platform="linux", ram_gib=64.0), gpus=(), packages={"torch": "2.13.0+cpu"})
    recipe = recipe_of("gsm8k-qwen3-0.6b")
    with pytest.raises(PathClosed, match="days to weeks"):
        planning.plan(recipe, laptop, auto=True)
    assert planning.plan(replace(recipe, path="cpu"), laptop, auto=True)[0].recipe.path == "cpu"


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"])
def test_the_doctor_and_the_plan_judge_a_cpu_alike(model: str) -> None:
    facts = laptop()
    found = diagnose(facts, model)
    recipe = replace(recipe_of("gsm8k-smollm2-135m-cpu"), path="auto", model=model)
    refused = pytest.raises(PathClosed, match="days to weeks") if "135M" not in model else contextlib.nullcontext()
    with refused as told:
        assert planning.plan(recipe, facts, auto=True)[0].recipe.path == "cpu"
    assert found.plan.path == "cpu"
    assert ("would run on the CPU for days to weeks" in verdict(found)) is (told is not None)


def test_8_bit_states_stay_off_the_cpu() -> None:
    laptop = Facts(host=Host(platform="linux", ram_gib=64.0), gpus=(), packages={"torch": "2.13.0+cpu"})
    recipe = replace(recipe_of("gsm8k-smollm2-135m-cpu"), optimizer="adamw_8bit")
    settled, _ = planning.plan(recipe, laptop, auto=True)
    assert settled.recipe.optimizer == "adamw"
    assert any("8-bit" in reason.text for reason in settled.reasons)


def test_8_bit_states_need_bitsandbytes() -> None:
    facts = card("NVIDIA A100-SXM4-80GB", "8.0", 80.0, bitsandbytes="absent")
    settled, _ = planning.plan(recipe_of("dapo-llama-3.2-1b-fp8"), facts, auto=True)
    assert (settled.recipe.path, settled.recipe.optimizer) == ("bf16-hf", "adamw")
    assert any("32-bit states: bitsandbytes is not installed" in reason.text for reason in settled.reasons)
    with_it = card("NVIDIA A100-SXM4-80GB", "8.0", 80.0)
    assert planning.plan(recipe_of("dapo-llama-3.2-1b-fp8"), with_it, auto=True)[0].recipe.optimizer == "adamw_8bit"


def test_sizes_the_recipe_fixes_are_those_of_the_ledger() -> None:
    facts = card("NVIDIA GeForce RTX 4090", "8.9", 24.0)
    free, _ = planning.plan(recipe_of("gsm8k-qwen3-1.7b"), facts, auto=True)
    fixed, _ = planning.plan(
        replace(recipe_of("gsm8k-qwen3-1.7b"), micro_batch=2, rollout_rows=16, gradient_checkpointing=True),
        facts,
        auto=True,
    )
    assert free.ledger is not None
    assert fixed.ledger is not None
    assert (fixed.ledger.micro_batch, fixed.ledger.rollout_rows, fixed.recipe.micro_batch) == (2, 16, 2)
    assert fixed.ledger.need_gib < free.ledger.need_gib
    assert sum(fixed.ledger.ledger.values()) == pytest.approx(fixed.ledger.need_gib)
    large, _ = planning.plan(
        replace(recipe_of("gsm8k-qwen3-1.7b"), micro_batch=64, gradient_checkpointing=False), facts, auto=True
    )
    assert large.ledger is not None
    assert large.ledger.fits is False
    assert "micro_batch 64" in large.ledger.reason


def test_a_recipe_without_a_model_asks_for_one() -> None:
    with pytest.raises(RecipeError) as told:
        planning.plan(load(catalogue.find("gsm8k-base")), MACHINES["ref-h100-complete"], auto=True)
    assert "--model" in (told.value.help or "")


# --- the list


def test_the_list_says_yes_or_no_with_path_time_and_why() -> None:
    found = {row.name: row for row in listing.rows(card("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9", 8.0), None)}
    assert set(found) == set(NAMES)
    small, large = found["gsm8k-qwen3-1.7b-8gb"], found["dapo-qwen3-14b-80gb"]
    assert (small.fits, small.path) == (True, "qlora-hf")
    assert small.time and small.time.startswith("about ")
    assert (large.fits, large.path) == (False, None)
    assert "GiB" in large.why
    text = listing.text(found.values(), "x")
    assert all(name in text for name in NAMES)
    assert max(map(len, text.splitlines())) <= listing.WIDTH


def test_the_machine_is_named_with_every_kind_of_card() -> None:
    both = "NVIDIA GeForce RTX 2080 Ti + NVIDIA GeForce RTX 3090"
    assert listing.machine(MACHINES["3090-plus-2080ti"]) == both
    assert listing.machine(MACHINES["a6000x2-nvcc-too-old"]) == "2 x NVIDIA RTX A6000"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (259_199, "72.0 h"), (2_304_360, "27 days")],
)
def test_times_read_in_the_unit_they_are_felt_in(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def laptop(**extra: Any) -> Facts:
    return Facts(host=Host(platform="linux", ram_gib=48.0), gpus=(), packages={"torch": "2.13.0+cpu"}, extra=extra)


def test_a_time_on_the_cpu_is_measured_or_rests_on_measured_rates() -> None:
    unmeasured = {row.name: row for row in listing.rows(laptop(), None)}
    assert unmeasured["arithmetic-embedded"].time == "measured about 1 min on two CPU cores"
    assert unmeasured["gsm8k-smollm2-135m-cpu"].time is None
    found = {row.name: row for row in listing.rows(laptop(cpu_rates={"gflops": 160.0, "gb_s": 30.0}), None)}
    assert found["arithmetic-embedded"].time == "measured about 1 min on two CPU cores"
    assert found["gsm8k-smollm2-135m-cpu"].time == "about 82 min"
    assert [found[name].estimated for name in ("arithmetic-embedded", "gsm8k-smollm2-135m-cpu")] == [False, True]


def test_the_list_and_the_plan_say_one_time() -> None:
    facts = laptop(cpu_rates={"gflops": 160.0, "gb_s": 30.0})
    entry = next(e for e in catalogue.entries() if e.name == "gsm8k-smollm2-135m-cpu")
    listed = listing.row(entry, facts, None)
    planned = planning.minutes(*planning.plan(load(entry.file), facts, auto=True))
    assert listed.time and planned and planned.startswith(f"{listed.time}, ")
    assert "by a measurement of this CPU" in planned


def test_the_list_says_what_its_estimates_are_where_it_has_some() -> None:
    told = " ".join(listing.ESTIMATES.split())
    rates = {"gflops": 160.0, "gb_s": 30.0}
    for facts, has in ((laptop(cpu_rates=rates), True), (laptop(), False)):
        assert (told in " ".join(listing.text(listing.rows(facts, None), "x").split())) is has


def test_of_weights_in_parts_nobody_knows_the_time() -> None:
    facts = card("NVIDIA GeForce RTX 4090", "8.9", 24.0)
    settled, diagnosis = planning.plan(load(catalogue.find("gsm8k-qwen3-0.6b")), facts, auto=True)
    assert planning.step_seconds(settled, diagnosis) is not None
    parts = replace(settled, recipe=replace(settled.recipe, fsdp=True))
    assert planning.step_seconds(parts, diagnosis) is None and planning.minutes(parts, diagnosis) is None


def test_a_recipe_that_has_room_on_a_cpu_but_takes_days_is_marked_as_slow() -> None:
    rows = listing.rows(laptop(cpu_rates={"gflops": 1000.0, "gb_s": 150.0}), None)
    by_name = {row.name: row for row in rows}
    slow = by_name["gsm8k-smollm2-135m"]
    assert (slow.fits, slow.slow, by_name["arithmetic-embedded"].slow) == (True, True, False)
    fitting = [row.name for row in rows if row.fits]
    assert fitting[-1] == "gsm8k-smollm2-135m"
    line = next(line for line in listing.text(rows, "x").splitlines() if line.startswith("gsm8k-smollm2-135m "))
    assert line.split()[1:3] == ["slow", "cpu,"] and slow.time and slow.time.endswith((" h", " days"))
    laptops = listing.rows(laptop(cpu_rates={"gflops": 160.0, "gb_s": 38.0}), None)
    refused = next(row for row in laptops if row.name == "gsm8k-smollm2-135m")
    assert (refused.fits, refused.why) == (False, "cpu has room, but would take about 8 days")


def test_a_time_in_a_purpose_says_on_what_machine() -> None:
    """It stands below the time on the reader's own."""
    timed = [entry.purpose for entry in catalogue.entries() if re.search(r"second|minute|hour|day", entry.purpose)]
    assert timed and all("GPU" in purpose or "CPU" in purpose for purpose in timed)


def test_the_list_ends_with_a_plan_of_what_fits() -> None:
    text = listing.text(listing.rows(laptop(cpu_rates={"gflops": 160.0, "gb_s": 38.0}), None), "x")
    assert text.endswith("plan one: grpo-portable train arithmetic-embedded --auto --dry-run")


@pytest.mark.parametrize(
    ("model", "extra", "words"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"cpu_rates": {"gflops": 160.0, "gb_s": 30.0}}, "a step (estimate: "),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {}, "not estimated: this CPU was not measured"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"cpu_rates": {"gflops": 0, "gb_s": "x"}}, "this CPU was not measured"),
        ("someone/unheard-of", {}, "not estimated: the shape of the model is not known"),
    ],
)
def test_a_plan_on_a_cpu_has_a_time_or_says_why_not(model: str, extra: dict[str, Any], words: str) -> None:
    recipe = override(load(catalogue.find("gsm8k-smollm2-135m-cpu")), [f"model={model}"])
    settled, diagnosis = planning.plan(recipe, laptop(**extra), auto=True)
    assert words in str(planning.minutes(settled, diagnosis))


def test_the_list_survives_a_machine_nobody_looked_at() -> None:
    rows = listing.rows(Facts(), None)
    assert len(rows) == len(NAMES)
    assert all(row.why for row in rows)


def test_what_has_room_but_would_take_days_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = card("NVIDIA GeForce RTX 4090", "8.9", 24.0)
    entry = next(e for e in catalogue.entries() if e.name == "gsm8k-qwen3-4b")
    assert listing.row(entry, facts, None).fits
    monkeypatch.setattr(listing, "TOO_LONG_S", 60)
    refused = listing.row(entry, facts, None)
    assert refused.fits is False
    assert "has room, but would take about" in refused.why


def test_a_recipe_for_a_model_of_ones_own_is_never_a_no() -> None:
    """Where the model that stands in for it does not fit, a smaller one may."""
    rows = listing.rows(laptop(), None)
    own = next(row for row in rows if row.name == "gsm8k-base")
    assert own.fits is None and "--model" in own.why and listing.STAND_IN in own.why
    line = next(line for line in listing.text(rows, "x").splitlines() if line.startswith("gsm8k-base"))
    assert line.split()[1] == "?"


@pytest.mark.parametrize(
    ("name", "fits", "words"),
    [
        (
            "gsm8k-qwen3-1.7b-8gb",
            False,
            "model `Qwen/Qwen3-1.7B` is not on this machine, and the hub is out of reach (it is",
        ),
        ("gsm8k-base", True, "with your own --model and --data; "),
        ("arithmetic-embedded", True, "GiB"),
    ],
)
def test_what_is_neither_here_nor_to_be_had_does_not_run_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, fits: bool, words: str
) -> None:
    asked: list[bool] = []
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setattr(reach, "hub", lambda: asked.append(True) or reach.Reach(False, "it is away"))
    facts = card("NVIDIA GeForce RTX 4060 Laptop GPU", "8.9", 8.0)
    rows = listing.rows(facts, listing.Here(lambda _: {}, preflight.lacking()))
    row = next(row for row in rows if row.name == name)
    assert (row.fits, words in row.why, len(asked)) == (fits, True, 1), row
    assert not any(row.fits and row.name.startswith("gsm8k-qwen") for row in rows)


def test_listing_is_quick() -> None:
    with spent.at_most(1.5):
        listing.rows(MACHINES["ref-t4-small"], None)


# --- the command line


def test_the_commands_list_show_copy_and_plan_for_a_saved_machine(tmp_path: Path) -> None:
    run = CliRunner().invoke
    facts = tmp_path / "facts.json"
    raw = json.loads((ROOT / "tests/doctor/machines/ref-t4-small.json").read_text(encoding="utf-8"))
    facts.write_text(json.dumps(raw["facts"]), encoding="utf-8")
    listed = run(cli.app, ["recipes", "--json", "--facts", str(facts)])
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["gsm8k-qwen3-1.7b-t4"]["fits"] is True
    assert set(rows["gsm8k-qwen3-1.7b-t4"]) == {f.name for f in fields(listing.Row)}
    assert "arithmetic-embedded" in run(cli.app, ["recipes", "--plain"]).stdout
    name = "dapo-llama-3.2-1b-fp8"
    assert run(cli.app, ["recipes", name]).stdout == catalogue.find(name).read_text(encoding="utf-8")
    planned = run(cli.app, ["train", name, "--auto", "--dry-run", "--facts", str(facts)])
    assert planned.exit_code == 0
    assert "fp16-hf" in planned.stdout
    assert "Tesla T4" in planned.stdout


def test_a_copied_recipe_takes_its_template_along(tmp_path: Path) -> None:
    name = "dapo-llama-3.2-1b-fp8"
    catalogue.copy_out(name, tmp_path / "mine.yaml")
    assert load(tmp_path / "mine.yaml") == load(catalogue.find(name))
    with pytest.raises(RunFolderError):
        catalogue.copy_out(name, tmp_path / "mine.yaml")


def test_a_recipe_carries_its_template_as_text(tmp_path: Path) -> None:
    recipe = load(catalogue.find("dapo-llama-3.2-1b-fp8"))
    (tmp_path / "r.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load(tmp_path / "r.yaml") == recipe
    with pytest.raises(RecipeError, match=r"nowhere\.jinja"):
        preflight.known_template(replace(recipe, chat_template="nowhere.jinja"))


def test_another_machine_is_only_planned_for() -> None:
    with pytest.raises(UsageError, match="another machine"):
        launch.train("gsm8k-base", auto=True, overrides=[], out=None, dry_run=False, fallback=True, facts_file="x")
    with pytest.raises(UsageError, match="cannot be read"):
        launch.prepare("gsm8k-base", auto=True, overrides=[], facts_file="/nowhere/facts.json")


# --- the page, the wheel


def test_the_reference_page_is_up_to_date() -> None:
    assert recipe_page.PAGE.read_text(encoding="utf-8") == recipe_page.page(), (
        "run: python -m grpo_portable.recipe_page"
    )


def test_the_reference_page_has_every_field_and_recipe() -> None:
    page = recipe_page.page()
    assert all(f"| `{f.name}`" in page for f in fields(Recipe))
    assert all(f"[`{name}`]" in page for name in NAMES)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project built from the files that belong to it, and unpacked as an installation would."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if told.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, told.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(built)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(built.glob("*.whl"))) as packed:
        packed.extractall(built)
    return built


def test_the_wheel_holds_every_module_and_file(wheel: Path) -> None:
    for package in ("grpo_portable", "doctor"):
        ours = {f.relative_to(ROOT) for f in (ROOT / package).rglob("*.py")}
        assert ours == {f.relative_to(wheel) for f in (wheel / package).rglob("*.py")}
    assert {f.name for f in (wheel / "grpo_portable_recipes").glob("*.yaml")} == {f"{name}.yaml" for name in NAMES}
    assert (wheel / "doctor" / "cards.json").is_file()
    assert (wheel / "grpo_portable" / "embedded" / "model" / "config.json").is_file()


def test_recipes_are_found_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(wheel)!r}]\n"
        "from grpo_portable import recipe, rollout\nfrom grpo_portable.plan import catalogue\n"
        f"assert catalogue.__file__.startswith({str(wheel)!r}), catalogue.__file__\n"
        "print(len(catalogue.entries()), len(recipe.load(catalogue.find('dapo-llama-3.2-1b-fp8')).chat_template) > 50)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(NAMES)), "True"]


def test_every_path_is_some_recipes_path_somewhere() -> None:
    taken = set()
    for facts in MACHINES.values():
        for name in ("gsm8k-qwen3-4b", "gsm8k-qwen3-0.6b", "math-qwen3-8b-fp8", "arithmetic-embedded"):
            try:
                taken.add(planning.plan(recipe_of(name), facts, auto=True)[0].recipe.path)
            except PathClosed:
                continue
    assert taken >= set(PATHS) - {"fp8-hf"}
