"""A finished run as files others can load: adapter, merged model or GGUF, each loaded again and asked before it counts.

    adapter   safetensors of the adapter, float32       merged   base and adapter, 16 bit
    gguf      f16 or q8_0 written here; q4_k_m by llama.cpp's llama-quantize from the f16

The base is loaded unquantised whatever the run trained on. A folder of the export holds a README.md with the report's table.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_portable import reach
from grpo_portable.errors import ExportError, RunFolderError
from grpo_portable.recipe import Recipe
from grpo_portable.run import manifest
from grpo_portable.run.folder import RunFolder, usual_modes
from grpo_portable.run.saved import adapter_fault

QUANTIZE_LIMIT_S = 3600.0
KINDS = ("adapter", "merged", "gguf")
QUANTIZE = ("q8_0", "f16", "q4_k_m")


@dataclass(frozen=True)
class Exported:
    """Where the export lies, and the sentence of its check (None when it was not asked)."""

    folder: Path
    check: str | None


@dataclass(frozen=True)
class _Loaded:
    """The run's model put together again: base, tokenizer, the tuned model, and what it is called."""

    model: Any
    tokenizer: Any
    config: Any
    name: str
    dtype: str


def export(
    run: RunFolder,
    to: str,
    *,
    out: Path | None = None,
    quantize: str = "q8_0",
    base: str | None = None,
    dtype: str = "auto",
    count: int = 20,
) -> Exported:
    """Write the export and check it with `count` questions (0: not at all). `base` replaces the recipe's model.

    RunFolderError when the run has no adapter yet, or a torn one, or `out` is taken; ExportError when it cannot be written,
    or the export does not answer as the run's tuned model did: the files then stay, with the check in their README.md.
    """
    _require_training(run)
    recipe = run.recipe()
    if to == "adapter" and recipe.lora_rank == 0:
        raise ExportError("the run has no adapter", because="all weights were trained", help="export with --to merged")
    folder = out or run.path / "export" / (to if to != "gguf" else f"gguf-{quantize}")
    if folder.is_dir() and any(folder.iterdir()):
        raise RunFolderError(f"`{folder}` is not empty", help="choose another --out, or remove it")
    if to == "gguf" and importlib.util.find_spec("gguf") is None:
        because = "the package gguf is not installed"
        raise ExportError("a GGUF file cannot be written", because=because, help='pip install "gguf>=0.17"')
    if to == "gguf" and quantize == "q4_k_m":
        _quantize_tool()
    _require_adapter(run)
    _make(folder)
    loaded = _load(run, recipe, base)
    writer = {"adapter": _adapter, "merged": _merged, "gguf": _gguf}[to]
    return writer(run, recipe, loaded, folder, quantize=quantize, dtype=dtype, count=count)


def _make(folder: Path) -> None:
    """The export's folder, tried: before the minutes of work. RunFolderError where it cannot be written."""
    trial = folder / ".trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        because = "it is a file" if folder.is_file() else error.strerror
        raise RunFolderError(f"`{folder}` cannot be written", because=because, help="choose another --out") from error


def _require_adapter(run: RunFolder) -> None:
    if fault := adapter_fault(run):
        help = f"finish it, or have it made again: grpo-portable train --resume --out {run.word}"
        raise RunFolderError(f"run `{run.path}` cannot be exported", because=fault, help=help)


def _require_training(run: RunFolder) -> None:
    """RunFolderError for an evaluation, which makes no adapter: it names the run or the folder whose adapter was asked."""
    if run.trains():
        return
    asked = run.read_json("task.json").get("adapter")
    adapter = Path(str(asked)).expanduser()
    its_run = adapter.parent if (adapter.parent / "recipe.yaml").is_file() else None
    raise RunFolderError(
        f"run `{run.path}` is an evaluation and has nothing to export",
        because=f"it asked the adapter in `{its_run or asked}`" if asked else "it asked a model without an adapter",
        help=f"grpo-portable export {shlex.quote(str(its_run))} --to adapter"
        if its_run
        else "name the run that trained the adapter",
    )


def _load(run: RunFolder, recipe: Recipe, base: str | None) -> _Loaded:
    """Base unquantised in its own number format, with what the run trained."""
    source = base or recipe.model
    if reach.require(source):
        reach.stay_offline()
    from grpo_portable import quiet

    quiet.libraries()  # before anything imports them
    from grpo_portable.models import policy

    stored = policy.stored_dtype(source)
    loaded = policy.load(source, dtype=stored)
    if recipe.lora_rank:
        model = policy.load_adapter(loaded.model, run.adapter)
    else:
        model = loaded.model
        policy.restore(model, run.adapter)
    return _Loaded(model.eval(), loaded.tokenizer, loaded.model.config, loaded.name, stored)


def _adapter(
    run: RunFolder, recipe: Recipe, loaded: _Loaded, folder: Path, *, quantize: str, dtype: str, count: int
) -> Exported:
    for file in sorted(run.adapter.iterdir()):
        if file.is_file() and file.name != manifest.NAME:
            shutil.copyfile(file, folder / file.name)
    _save_tokenizer(recipe, loaded, folder)

    def again() -> tuple[Any, Any]:
        from grpo_portable.models import policy

        return policy.load_adapter(loaded.model.unload(), folder).to(_device()), loaded.tokenizer

    how = f"The adapter on {loaded.name} in {loaded.dtype}"
    return _finish(run, recipe, loaded, folder, "adapter", None, None, again, how, count)


def _merged(
    run: RunFolder, recipe: Recipe, loaded: _Loaded, folder: Path, *, quantize: str, dtype: str, count: int
) -> Exported:
    import torch

    from grpo_portable.export import merge

    chosen = _output_dtype(loaded.dtype, dtype)
    model, faithful = merge.bake(loaded.model, getattr(torch, chosen))
    model.config.dtype = getattr(torch, chosen)
    model.save_pretrained(str(folder), safe_serialization=True)
    _save_tokenizer(recipe, loaded, folder)
    usual_modes(folder)
    del model

    def again() -> tuple[Any, Any]:
        from grpo_portable.models import policy

        read = policy.load(str(folder), dtype=chosen, device=_device())
        return read.model, read.tokenizer

    how = f"The merged model, read from these files in {chosen}"
    done = replace(loaded, model=None, dtype=chosen)
    return _finish(run, recipe, done, folder, "merged", None, faithful, again, how, count)


def _gguf(
    run: RunFolder, recipe: Recipe, loaded: _Loaded, folder: Path, *, quantize: str, dtype: str, count: int
) -> Exported:
    from grpo_portable.export import gguf_file, gguf_tokens, merge, recheck
    from grpo_portable.run.folder import read_lines

    merge.require_unpacked(loaded.model)
    gguf_file.family_of(loaded.config)
    builder = recheck.builder_of(recipe, loaded.tokenizer, loaded.model)
    texts = [
        builder.text(str(r["question"])) for _, r in zip(range(50), read_lines(run.generations("tuned")), strict=False)
    ]
    vocabulary = gguf_tokens.vocabulary(loaded.tokenizer, loaded.config.vocab_size, texts)
    kind = "f16" if quantize == "q4_k_m" else quantize
    written = folder / f"{_file_stem(loaded.name)}-{kind}.gguf"
    gguf_file.write(
        written,
        loaded.config,
        lambda: merge.weights(loaded.model),
        vocabulary,
        kind=kind,
        name=f"{loaded.name} tuned with GRPO",
        chat_template=builder.template or loaded.tokenizer.chat_template,
        turn_end=builder.turn_end_id,
    )
    if quantize == "q4_k_m":
        final = folder / f"{_file_stem(loaded.name)}-{quantize}.gguf"
        try:
            _quantized(written, final)
        finally:
            written.unlink()
        written = final
    config = loaded.config

    def again() -> tuple[Any, Any]:
        return recheck.load_gguf(written, config).to(_device()), loaded.tokenizer

    how = f"{written.name}, read by transformers as float32"
    return _finish(run, recipe, loaded, folder, "gguf", written.name, None, again, how, count, quantize)


def _finish(
    run: RunFolder,
    recipe: Recipe,
    loaded: _Loaded,
    folder: Path,
    kind: str,
    file: str | None,
    faithful: Any,
    again: Any,
    how: str,
    count: int,
    quantize: str | None = None,
) -> Exported:
    """Check the files, write README.md (and Ollama's Modelfile), and raise when the check failed."""
    from grpo_portable.export import card, recheck
    from grpo_portable.scores import scoring

    model, tokenizer = again() if count else (None, loaded.tokenizer)
    checked = recheck.check(run, model, tokenizer, count=count, how=how) if count else None
    builder = recheck.builder_of(recipe, loaded.tokenizer, model)
    subject = card.Subject(
        kind,
        quantize,
        file,
        recipe,
        run.read_json("run.json"),
        scoring.scores_of(run),
        faithful,
        checked,
        loaded.dtype,
        builder.text(card.MARK),
        tuple(builder.tokenizer.decode([i]) for i in builder.stop_ids),
    )
    (folder / "README.md").write_text(card.card(subject), encoding="utf-8")
    if kind == "gguf":
        (folder / "Modelfile").write_text(card.modelfile(subject), encoding="utf-8")
    if checked is not None:
        checked.require({"adapter": "adapter", "merged": "merged model", "gguf": "GGUF file"}[kind])
    return Exported(folder, checked.sentence() if checked else None)


def _save_tokenizer(recipe: Recipe, loaded: _Loaded, folder: Path) -> None:
    """The tokenizer with the chat template that the run used, so that who loads it asks as the run did."""
    from grpo_portable.recipe import is_template

    if is_template(recipe.chat_template):
        loaded.tokenizer.chat_template = recipe.chat_template
    loaded.tokenizer.save_pretrained(str(folder))
    config = folder / "tokenizer_config.json"
    if config.is_file():  # where the tokenizer was read from is a path of this machine
        kept = {k: v for k, v in json.loads(config.read_text(encoding="utf-8")).items() if k != "name_or_path"}
        config.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _output_dtype(stored: str, asked: str) -> str:
    return stored if asked == "auto" else asked


def _file_stem(name: str) -> str:
    return f"{name.rstrip('/').rsplit('/', 1)[-1].removesuffix('.gguf')}-grpo"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _quantize_tool() -> str:
    """llama.cpp's llama-quantize, or what to install."""
    found = shutil.which("llama-quantize")
    if found is None:
        raise ExportError(
            "q4_k_m needs llama.cpp's program `llama-quantize`, which is not on PATH",
            help="brew install llama.cpp, or: git clone https://github.com/ggml-org/llama.cpp && cmake -B build -S llama.cpp "
            "&& cmake --build build --target llama-quantize, then put build/bin on PATH; q8_0 and f16 need nothing",
        )
    return found


def _quantized(source: Path, target: Path) -> None:
    command = [_quantize_tool(), str(source), str(target), "Q4_K_M"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=QUANTIZE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        target.unlink(missing_ok=True)
        because = f"it did not end within {QUANTIZE_LIMIT_S / 60:.0f} minutes"
        raise ExportError("llama-quantize failed", because=because, help="take --quantize q8_0") from None
    if done.returncode or not target.is_file():
        target.unlink(missing_ok=True)  # a part of a file would be taken for one
        last = next((line for line in reversed((done.stderr + done.stdout).splitlines()) if line.strip()), "no output")
        raise ExportError("llama-quantize failed", because=last.strip()[:300], help="take --quantize q8_0")
