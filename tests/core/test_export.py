"""Exports say what the adapter says: merged exactly, rounded once, written to GGUF as llama.cpp wants it, and asked again."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

from grpo_portable import cli, evaluate, export
from grpo_portable.data.questions import Question
from grpo_portable.errors import ExportError, RunFolderError
from grpo_portable.export import card, gguf_file, gguf_tokens, merge, recheck
from grpo_portable.models import policy, pretokenizers, prompts
from grpo_portable.recipe import Recipe
from grpo_portable.rollout import portable
from grpo_portable.run import folder as run_folder
from grpo_portable.scores import scoring

TEXTS = [
    "Natalia sold 48 clips in April, and then she sold half as many clips in May.",
    "How many clips did she sell altogether? 48 + 24 = 72\n#### 72",
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9 plus minus times",
]


def test_without_the_package_gguf_nothing_is_loaded_for_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_folder.create(tmp_path / "run", Recipe())
    made.adapter.mkdir()
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(export, "_load", lambda *_: pytest.fail("the base was loaded"))
    with pytest.raises(ExportError, match="a GGUF file cannot be written") as told:
        export.export(made, "gguf")
    assert told.value.help == 'pip install "gguf>=0.17"'


def test_an_export_is_asked_with_the_worked_examples_of_the_run(tmp_path: Path) -> None:
    """They are drawn from what is trained on: of six questions three are held out here."""
    lines = [json.dumps({"question": f"question {i}", "answer": f"#### {i}"}) + "\n" for i in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "test.jsonl").write_text("".join(lines[:3]))
    places = {"data": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "test.jsonl")}
    recipe = Recipe(**places, on_overlap="drop", few_shot=3, chat_template="none")
    shots = recheck.builder_of(recipe, bpe(), None).shots
    assert {shot.question for shot in shots} == {f"question {i}" for i in (3, 4, 5)}


def bpe(cut: pretokenizers.Cut = pretokenizers.CUTS[2], size: int = 384) -> Any:
    """A byte-level BPE that cuts as `cut` says, trained on a few lines; ids 0 and 1 are its end and pad token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(ignore_merges=cut.whole_words_first))
    pieces = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in cut.expressions]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([*TEXTS, *gguf_tokens.PROBES], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "initializer_range": 0.2,  # answers that differ from question to question
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model_of(kind: str, **changes: Any) -> Any:
    import transformers

    config, cls = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    return cls(config(**{**SIZES, **changes})).eval()


RECIPE = replace(
    Recipe(),
    path="cpu",
    chat_template="none",
    prompt_template="{question}\n",
    data="sums",
    eval_data="sums",
    steps=3,
    lora_rank=4,
    lora_alpha=16.0,
    max_completion_tokens=12,
)


def adapted(model: Any, recipe: Recipe, seed: int = 1) -> Any:
    """The model with an adapter that changes what it says."""
    wrapped = policy.add_adapter(model, recipe)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable(wrapped).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            elif recipe.lora_rank == 0:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    return wrapped


def finished(folder: Path, model: str, recipe: Recipe = RECIPE, questions: int = 24) -> run_folder.RunFolder:
    """A run folder as training leaves it, with an adapter made up here and the answers it really gives."""
    recipe = replace(recipe, model=model)
    made = run_folder.create(folder, recipe)
    loaded = policy.load(model, dtype=policy.stored_dtype(model))
    asked = [
        Question(f"test-{i}", row["question"], row["answer"][-1], row["answer"])
        for i, row in enumerate(tiny.rows(questions))
    ]
    for stage in ("base", "tuned"):
        tuned = adapted(loaded.model, recipe) if stage == "tuned" else loaded.model
        builder = prompts.builder(
            loaded.tokenizer, recipe, generation_stop_ids=prompts.generation_stop_ids(loaded.model)
        )
        engine = portable.make(tuned, loaded.tokenizer, rows=8)
        engine.sync(tuned)
        fitted = prompts.fit(asked, builder, max_tokens=200)
        evaluate.evaluate(engine, builder, fitted, replace(recipe, rollout_rows=8), made.generations(stage))
        engine.close()
    policy.save(tuned, made.adapter, "some/base")
    made.write_json("run.json", {"base_model": "some/base", "quantization": None})
    scoring.score_run(made)
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model_of("llama", rope_parameters=LLAMA3, tie_word_embeddings=False).save_pretrained(folder)
    bpe().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> run_folder.RunFolder:
    made = finished(tmp_path_factory.mktemp("whole") / "run", str(base))
    texts = {
        stage: [r["completion"] for r in run_folder.read_lines(made.generations(stage))] for stage in ("base", "tuned")
    }
    assert len(set(texts["tuned"])) > 10, "the test model must say different things"
    assert sum(a != b for a, b in zip(texts["base"], texts["tuned"], strict=True)) > 20, (
        "the adapter must change what it says"
    )
    return made


# --- the whole way


def test_bars_of_libraries_are_off_when_an_export_loads_its_model() -> None:
    """tqdm reads its switch once, so nothing that an export imports before may bring it along."""
    code = (
        "from grpo_portable import quiet, reach\nimport grpo_portable.export\nquiet.libraries()\n"
        "from tqdm.auto import tqdm\nassert list(tqdm([1])) == [1]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("to", "quantize", "files"),
    [
        ("adapter", "q8_0", {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"}),
        ("merged", "q8_0", {"model.safetensors", "config.json", "tokenizer.json", "README.md"}),
        ("gguf", "f16", {"README.md", "Modelfile"}),
        ("gguf", "q8_0", {"README.md", "Modelfile"}),
    ],
)
def test_an_export_answers_as_the_run_did(
    whole: run_folder.RunFolder, tmp_path: Path, to: str, quantize: str, files: set
) -> None:
    done = export.export(whole, to, out=tmp_path / "out", quantize=quantize)
    assert done.check is not None
    same, _, total = done.check.split()[:3]
    assert total == "20"
    assert int(same) >= (20 if quantize != "q8_0" or to != "gguf" else 10), done.check  # noise has many near ties
    names = {f.name for f in done.folder.iterdir()}
    assert files <= names
    assert len({f.stat().st_mode for f in done.folder.iterdir()}) == 1  # by the umask, all of them
    assert (to != "gguf") or any(name.endswith(f"-{quantize}.gguf") for name in names)
    page = (done.folder / "README.md").read_text(encoding="utf-8")
    assert "24 held-out questions" in page
    assert "## How to load it" in page
    assert done.check in page
    for file in done.folder.iterdir():
        if file.suffix in (".json", ".md", "") and file.name != "tokenizer.json":
            assert str(whole.path.parent) not in file.read_text(encoding="utf-8"), (
                f"{file.name} names a place of this machine"
            )


def test_an_export_that_answers_otherwise_is_called_broken_and_says_so_in_its_card(
    whole: run_folder.RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "permuted", lambda data, heads: data)
    with pytest.raises(ExportError, match="does not answer as the run's tuned model did"):
        export.export(whole, "gguf", out=tmp_path / "out", quantize="f16")
    assert "**no**" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_run_that_trained_all_weights_is_exported_merged_only(base: Path, tmp_path: Path) -> None:
    made = finished(tmp_path / "run", str(base), replace(RECIPE, lora_rank=0))
    assert export.export(made, "merged", out=tmp_path / "merged").check.startswith("20 of 20")  # type: ignore[union-attr]
    with pytest.raises(ExportError, match="no adapter"):
        export.export(made, "adapter", out=tmp_path / "adapter")


def test_what_stands_in_the_way_is_told_before_anything_is_written(
    whole: run_folder.RunFolder, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(RunFolderError, match="not empty"):
        export.export(whole, "merged", out=tmp_path / "full")
    monkeypatch.setattr(export, "_load", lambda *_: pytest.fail("the base was loaded"))
    for place, why in ((tmp_path / "full" / "x", "it is a file"), (tmp_path / "full" / "x" / "y", "not a directory")):
        with pytest.raises(RunFolderError, match=f"cannot be written, because {why}"):
            export.export(whole, "merged", out=place)
    with pytest.raises(RunFolderError, match="it has no adapter yet"):
        export.export(run_folder.create(tmp_path / "young", replace(RECIPE, model=str(base))), "merged")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExportError, match="llama-quantize") as refused:
        export.export(whole, "gguf", out=tmp_path / "q4", quantize="q4_k_m")
    assert "brew install llama.cpp" in (refused.value.help or "")
    assert not (tmp_path / "q4").exists()


def test_q4_k_m_goes_through_llama_cpps_own_tool(
    whole: run_folder.RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "llama-quantize"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$3" = Q4_K_M ] && cp "$1" "$2" && echo "$@" > "$(dirname "$0")/asked"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    done = export.export(whole, "gguf", out=tmp_path / "out", quantize="q4_k_m")
    assert [f.name for f in done.folder.glob("*.gguf")] == [f"{Path(whole.recipe().model).name}-grpo-q4_k_m.gguf"]
    assert "-f16.gguf" in (tool.parent / "asked").read_text()
    tool.write_text('#!/bin/sh\nhead -c 99 "$1" > "$2"\nprintf \'cannot read caf\\351\\n\' >&2\nexit 3\n')
    for _ in range(2):  # nothing is left that would be in the way, or be taken for a file
        with pytest.raises(ExportError, match="cannot read caf\ufffd"):
            export.export(whole, "gguf", out=tmp_path / "again", quantize="q4_k_m")


def test_the_command(whole: run_folder.RunFolder, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli.app, ["export", str(whole.path), "--to", "merged", "--out", str(tmp_path / "m"), "--check", "3"]
    )
    assert done.exit_code == 0, done.output
    assert "check: 3 of 3" in done.stdout and max(map(len, done.stdout.partition("check")[2].splitlines())) <= 80
    for wrong in (["--to", "onnx"], ["--to", "gguf", "--quantize", "q2"], ["--to", "merged", "--dtype", "int8"]):
        refused = CliRunner().invoke(cli.app, ["export", str(whole.path), *wrong])
        assert "one of" in str(getattr(refused.exception, "help", "")), wrong


# --- merging


@pytest.mark.parametrize("changes", [{}, {"rslora": True}, {"dora": True}, {"dora": True, "rslora": True}])
def test_a_merge_is_exact_and_rounded_once(changes: dict) -> None:
    ids = torch.randint(2, 384, (2, 9), generator=torch.Generator().manual_seed(0))
    tuned = adapted(model_of("qwen3"), replace(RECIPE, **changes))
    with torch.no_grad():
        wanted = tuned(ids).logits
    exact = dict(merge.weights(tuned))
    merged, faithful = merge.bake(tuned, torch.float32)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, wanted, atol=2e-5)
    assert faithful.matrices == 14
    assert faithful.survives == pytest.approx(1, abs=1e-6)
    assert exact.keys() == dict(merged.named_parameters()).keys()
    half, _ = merge.bake(adapted(model_of("qwen3"), replace(RECIPE, **changes)), torch.bfloat16)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, exact[name].to(torch.bfloat16)), name


def test_what_rounding_loses_is_measured() -> None:
    tuned = adapted(model_of("llama").to(torch.bfloat16), RECIPE)
    with torch.no_grad():
        for name, parameter in policy.trainable(tuned).items():
            if "lora_B" in name:
                parameter.mul_(2e-3)
    _, faithful = merge.bake(tuned, torch.bfloat16)
    assert faithful.relative_size < 1e-3
    assert 0 < faithful.survives < 0.6


def test_a_quantised_base_is_never_merged_into() -> None:
    tuned = adapted(model_of("llama"), RECIPE)
    tuned.base_model.model.is_loaded_in_4bit = True
    with pytest.raises(ExportError, match="quantised"):
        merge.bake(tuned, torch.float32)


# --- GGUF


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize(("quantize", "near"), [("f16", 0.005), ("q8_0", 0.1)])
def test_a_file_read_back_computes_the_same(
    kind: str, changes: dict, quantize: str, near: float, tmp_path: Path
) -> None:
    model = model_of(kind, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    vocabulary = gguf_tokens.vocabulary(bpe(), 384)
    file = tmp_path / "m.gguf"
    gguf_file.write(
        file, model.config, lambda: merge.weights(model), vocabulary, kind=quantize, name="m", chat_template=None
    )
    ids = torch.randint(2, 384, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, got = model(ids).logits, recheck.load_gguf(file, model.config)(ids).logits
    assert (got - wanted).norm() < near * wanted.norm(), kind


def test_llama_3_frequencies_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model_of("llama", rope_parameters=LLAMA3).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2).double() / 16)
    factors = gguf_file.frequency_factors(config)
    assert factors is not None
    assert np.allclose(factors, (plain / scaled.double()).numpy(), rtol=1e-5)
    assert factors[0] == 1.0
    assert factors[-1] == 32.0
    assert gguf_file.frequency_factors(model_of("llama").config) is None


def test_permuting_is_undone_by_transformers_loader() -> None:
    data = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    mixed = gguf_file.permuted(data, 2)
    assert mixed[:4, 0].tolist() == [0.0, 12.0, 3.0, 15.0]  # rows 0, 4, 1, 5 of the first head
    back = mixed.reshape(2, 4, 2, 3).swapaxes(1, 2).reshape(16, 3)
    assert np.array_equal(back, data)


def test_what_is_not_known_here_is_refused_with_the_tool_that_knows_it() -> None:
    from transformers import GPT2Config

    refusals = [
        lambda: gguf_file.family_of(GPT2Config()),
        lambda: gguf_file.family_of(model_of("mistral", sliding_window=128).config),
        lambda: gguf_file.frequency_factors(
            model_of("qwen2", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}).config
        ),
        lambda: gguf_tokens.vocabulary(tiny.tokenizer(), 100),
        lambda: gguf_tokens.vocabulary(bpe(pretokenizers.Cut("odd", (r"[aeiou]",))), 384),
    ]
    for refusal in refusals:
        with pytest.raises(ExportError) as told:
            refusal()
        assert "convert_hf_to_gguf.py" in (told.value.help or "")


def test_numbers_float16_cannot_hold_are_refused_for_f16(tmp_path: Path) -> None:
    model = model_of("qwen2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    vocabulary = gguf_tokens.vocabulary(bpe(), 384)

    def write(kind: str) -> None:
        gguf_file.write(
            tmp_path / f"{kind}.gguf",
            model.config,
            lambda: merge.weights(model),
            vocabulary,
            kind=kind,
            name="m",
            chat_template=None,
        )

    with pytest.raises(ExportError, match="float16's range"):
        write("f16")
    assert list(tmp_path.iterdir()) == []
    write("q8_0")


@pytest.mark.parametrize("cut", pretokenizers.CUTS, ids=lambda cut: cut.name)
def test_a_cut_is_recognised_by_what_it_does(cut: pretokenizers.Cut) -> None:
    made = gguf_tokens.vocabulary(bpe(cut), 400, TEXTS)
    assert made.pre == cut.name
    assert len(made.tokens) == len(made.types) == 400
    assert made.types[:2] == (gguf_tokens.CONTROL, gguf_tokens.CONTROL)
    assert made.types[-1] == gguf_tokens.UNUSED
    assert (made.eos, made.pad, made.bos, made.adds_bos) == (0, 1, None, False)


def test_a_tokenizer_read_from_gguf_gets_its_own_cut_back() -> None:
    wanted, other = bpe(pretokenizers.CUTS[3]), bpe(pretokenizers.CUTS[3])
    other._tokenizer = pretokenizers.with_cut(json.loads(other.backend_tokenizer.to_str()), pretokenizers.CUTS[2])
    text = TEXTS[1]
    assert other(text)["input_ids"] != wanted(text)["input_ids"]
    pretokenizers.as_named(other, "unheard-of")
    assert other(text)["input_ids"] != wanted(text)["input_ids"]
    pretokenizers.as_named(other, "gpt-2")
    assert other(text)["input_ids"] == wanted(text)["input_ids"]


# --- the card


def subject(**changes: Any) -> card.Subject:
    scores = json.loads(json.dumps(scoring.score({}, "gsm8k_marker")))
    made = card.Subject(
        "adapter", None, None, RECIPE, {"base_model": "org/Base-1B"}, scores, None, None, "bfloat16",
        f"<user>{card.MARK}<end><assistant>", ("<end>", "\n"),
    )  # fmt: skip
    return replace(made, **changes)


def test_the_card_names_its_base_and_how_to_load_each_form() -> None:
    adapter = card.card(subject())
    assert adapter.startswith("---\nlibrary_name: peft\nbase_model: org/Base-1B\n")
    assert "PeftModel.from_pretrained" in adapter
    assert "vllm serve org/Base-1B --enable-lora --max-lora-rank 8" in adapter
    assert 'AutoModelForCausalLM.from_pretrained("org/Base-1B", dtype="auto")' in adapter
    built_in = card.card(subject(run={"base_model": "embedded"}))
    assert (
        'vllm serve "$(python -c "from grpo_portable.embedded import model_folder; print(model_folder())")"' in built_in
    )
    assert "vllm serve embedded" not in built_in and '"embedded"' not in built_in and "--to merged" in built_in
    assert "--to merged" in card.card(subject(recipe=replace(RECIPE, dora=True)))
    merged = card.card(subject(kind="merged", faithful=merge.Faithful(7, 0.003, 0.93)))
    assert "93.0 % of it survives" in merged
    assert "vllm serve ." in merged
    gguf = card.card(subject(kind="gguf", quantize="q8_0", file="m.gguf"))
    assert all(word in gguf for word in ("llama-cli -m m.gguf", "ollama create", 'gguf_file="m.gguf"', "{question}"))
    assert "Not checked" in gguf
    assert "base_model" not in card.card(subject(run={"base_model": "local-folder"}))


def test_the_modelfile_holds_the_runs_own_prompt() -> None:
    text = card.modelfile(subject(kind="gguf", file="m.gguf"))
    assert 'TEMPLATE """<user>{{ .Prompt }}<end><assistant>"""' in text
    assert 'PARAMETER stop "<end>"' in text
    assert text.count("PARAMETER stop") == 1
    assert "num_predict 12" in text


@pytest.mark.parametrize(
    ("prompt", "template"),
    [  # read by hand as Go reads it: {{ opens an action wherever it stands, and three quotes end the text
        ("\\frac{{1}} QUESTION go", '\\frac{{ "{{" }}1}} {{ .Prompt }} go'),
        ("\\boxed{QUESTION}", '\\boxed{{ "{" }}{{ .Prompt }}}'),
        ('{{{QUESTION{"a": {}}', '{{ "{{{" }}{{ .Prompt }}{"a": {}}'),
        ('"""QUESTION"', '{{ "\\"\\"\\"" }}{{ .Prompt }}{{ "\\"" }}'),
    ],
)
def test_braces_and_quotes_of_a_prompt_stay_text_in_the_modelfile(prompt: str, template: str) -> None:
    text = card.modelfile(subject(kind="gguf", file="m.gguf", prompt=prompt.replace("QUESTION", card.MARK)))
    assert f'TEMPLATE """{template}"""\n' in text


def test_a_prompt_with_a_fence_of_its_own_stays_in_its_block() -> None:
    text = card.card(subject(prompt=f"```python\n{card.MARK}\n```\n"))
    assert "````text\n```python\n{question}\n```\n\n````\n" in text


def test_two_kinds_of_nonsense_are_not_the_same_answer() -> None:
    def answered(saved: str | None, now: str | None, same_text: bool) -> recheck.Answered:
        return recheck.Answered("x", "1", saved, now, saved == "1", now == "1", same_text)

    found = recheck.Check((answered("1", "1", False), answered(None, None, False), answered(None, None, True)), "x")
    assert (found.same, found.same_text) == (2, 1)
    found.require("file")
    with pytest.raises(ExportError):
        recheck.Check((answered(None, None, False), answered("1", "2", False), answered("1", "1", True)), "x").require(
            "file"
        )


# --- a real model


@pytest.mark.skipif(not os.environ.get("GRPO_PORTABLE_SMOLLM2"), reason="GRPO_PORTABLE_SMOLLM2 names no GGUF file")
def test_smollm2_keeps_its_tokenizer_and_its_answers(tmp_path: Path) -> None:
    import gguf

    source = Path(os.environ["GRPO_PORTABLE_SMOLLM2"])
    recipe = replace(RECIPE, chat_template="auto", prompt_template="{question}", max_completion_tokens=24)
    made = finished(tmp_path / "run", str(source), recipe, questions=6)
    done = export.export(made, "gguf", out=tmp_path / "out", quantize="q8_0", count=6)
    assert done.check is not None
    ours, theirs = gguf.GGUFReader(next(done.folder.glob("*.gguf"))), gguf.GGUFReader(source)

    def value(reader: Any, key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    for key in ("tokens", "merges", "token_type", "pre", "model", "eos_token_id", "add_bos_token"):
        assert value(ours, f"tokenizer.ggml.{key}") == value(theirs, f"tokenizer.ggml.{key}"), key
    for key in ("block_count", "embedding_length", "attention.head_count_kv", "rope.freq_base", "rope.dimension_count"):
        assert value(ours, f"llama.{key}") == value(theirs, f"llama.{key}"), key
    assert {t.name for t in ours.tensors} == {t.name for t in theirs.tensors}
