"""The model card of an export: what it is, the run's results, the check of the files, how to load them. Values → text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_portable.export.merge import Faithful
from grpo_portable.export.recheck import Check
from grpo_portable.recipe import Recipe
from grpo_portable.report import results
from grpo_portable.report.markdown import block, code, table
from grpo_portable.scores import verdict

MARK = "QUESTION-STANDS-HERE"
BUILT_IN = "embedded"  # the model that comes with this project: neither a hub id nor a folder, to any other program


@dataclass(frozen=True)
class Subject:
    """What a card is about. `file` is the GGUF file's name; `prompt` a rendered prompt with MARK in the question's place."""

    kind: str  # adapter | merged | gguf
    quantize: str | None
    file: str | None
    recipe: Recipe
    run: Mapping[str, Any]
    scores: Mapping[str, Any]
    faithful: Faithful | None
    check: Check | None
    dtype: str | None
    prompt: str
    stops: tuple[str, ...]


def card(subject: Subject) -> str:
    """README.md of the export's folder."""
    base = str(subject.run.get("base_model") or subject.recipe.model)
    name = base.rstrip("/").rsplit("/", 1)[-1]
    lines = [*_front(subject, base), f"# {name}, tuned with GRPO", "", f"**{verdict.sentence(subject.scores)}**", ""]
    lines += [*results.results(subject.scores, subject.recipe.max_completion_tokens), ""]
    lines += [
        "## What this is",
        "",
        *_what(subject, base),
        "",
        "## The files, loaded again",
        "",
        *_checked(subject),
        "",
    ]
    lines += ["## How to load it", "", *_loading(subject, base), ""]
    lines += ["## The prompt it was trained with", "", *_prompt(subject), ""]
    return "\n".join(lines).rstrip() + "\n"


def modelfile(subject: Subject) -> str:
    """Ollama's Modelfile: the file, and the run's prompt as the template (its syntax: {{ .Prompt }})."""
    before, _, after = subject.prompt.partition(MARK)
    # braces and quotes of its own would open an action, or end the text: they become actions that print them
    before, after = (
        re.sub(r'\{{2,}|"{3,}|[{"]\Z', lambda m: f"{{{{ {json.dumps(m[0])} }}}}", part) for part in (before, after)
    )
    stops = "".join(f'PARAMETER stop "{_escaped(stop)}"\n' for stop in subject.stops if stop.strip())
    return (
        f"FROM ./{subject.file}\n"
        f'TEMPLATE """{before}{{{{ .Prompt }}}}{after}"""\n'
        f"{stops}PARAMETER temperature 0\nPARAMETER num_predict {subject.recipe.max_completion_tokens}\n"
    )


def _front(subject: Subject, base: str) -> list[str]:
    """The block the hub reads. A base that is no hub id is left out: there would be nothing to link to."""
    lines = ["---", "library_name: " + {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}[subject.kind]]
    if base.count("/") == 1 and not base.startswith((".", "/", "~")):
        lines.append(f"base_model: {base}")
    return [*lines, "pipeline_tag: text-generation", "tags: [grpo, trl, grpo-portable]", "---", ""]


def _what(subject: Subject, base: str) -> list[str]:
    recipe = subject.recipe
    kind = (
        "all weights trained"
        if recipe.lora_rank == 0
        else (
            f"{'DoRA' if recipe.dora else 'LoRA'} of rank {recipe.lora_rank}, alpha {recipe.lora_alpha:g}"
            + (", rsLoRA scaling" if recipe.rslora else "")
        )
    )
    form = {
        "adapter": "the adapter alone, float32 safetensors",
        "merged": f"base and adapter as one model, {subject.dtype} safetensors",
        "gguf": f"base and adapter as one GGUF file, {subject.quantize}",
    }[subject.kind]
    lines = [
        f"- **Base:** {base}" + (", the model that comes with grpo-portable" if base == BUILT_IN else ""),
        f"- **Form:** {form}",
        f"- **Training:** {recipe.steps} steps of {recipe.prompts_per_step} questions x {recipe.group_size} completions, loss "
        f"{recipe.loss}, learning rate {recipe.learning_rate:g}, rewards {' + '.join(recipe.rewards)}; {kind}",
        f"- **Data:** {_short(recipe.data)} ({recipe.data_split})",
    ]
    quantized = subject.run.get("quantization")
    if quantized and subject.kind != "adapter":
        lines.append(
            f"- **Merged onto 16-bit weights:** the adapter was trained on {quantized} weights, which differ a little"
        )
    if subject.faithful is not None and subject.faithful.matrices:
        lines.append(
            f"- **Merge:** {subject.faithful.matrices} matrices, added up in float32 and rounded once; the change is "
            f"{100 * subject.faithful.relative_size:.2g} % of the weights, and {100 * subject.faithful.survives:.1f} % of it "
            "survives the rounding"
        )
    return lines


def _checked(subject: Subject) -> list[str]:
    if subject.check is None:
        return ["Not checked: the export was made with `--check 0`."]
    rows = [
        [
            a.id,
            a.gold,
            a.saved or "none",
            a.now or "none",
            "yes" if a.same else "**no**",
            "yes" if a.same_text else "no",
        ]
        for a in subject.check.answers
    ]
    head = ["question", "gold", "answer in the run", "answer of this export", "same answer", "same text"]
    return [f"{subject.check.how}: {subject.check.sentence()}.", "", *table(head, rows)]


def _loading(subject: Subject, base: str) -> list[str]:
    if subject.kind == "gguf":
        return _gguf_loading(subject)
    source = f'"{base}"' if subject.kind == "adapter" else '"."'
    python = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    python += ["from peft import PeftModel"] if subject.kind == "adapter" else []
    if subject.kind == "adapter" and base == BUILT_IN:
        source = "model_folder()"
        python.append(_IMPORT)
    python += [
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        f'model = AutoModelForCausalLM.from_pretrained({source}, dtype="auto")',
    ]
    python += ['model = PeftModel.from_pretrained(model, ".")'] if subject.kind == "adapter" else []
    vllm = "vllm serve ."
    if subject.kind == "adapter":
        rank = _served_rank(subject.recipe.lora_rank)
        served = f'"$(python -c "{_FOLDER}")"' if base == BUILT_IN else base
        vllm = f"vllm serve {served} --enable-lora --max-lora-rank {rank} --lora-modules tuned=."
    lines = ["transformers:", "", "```python", *python, "```", "", "vLLM:", "", "```sh", vllm, "```"]
    if subject.kind == "adapter" and subject.recipe.dora:
        lines[-4:] = ["vLLM serves no DoRA adapters: export with `--to merged`."]
    if subject.kind == "adapter" and base == BUILT_IN:
        lines += [
            "",
            "`embedded`, as adapter_config.json names the base, is a model of grpo-portable's own, on no hub: for where "
            "that is not installed, export with `--to merged`.",
        ]
    return [*lines, "", "llama.cpp and Ollama read GGUF: export with `--to gguf`."]


_IMPORT = "from grpo_portable.embedded import model_folder"
_FOLDER = f"{_IMPORT}; print(model_folder())"


def _gguf_loading(subject: Subject) -> list[str]:
    return [
        "llama.cpp:", "", "```sh",
        f"llama-cli -m {subject.file} --temp 0 -n {subject.recipe.max_completion_tokens} -no-cnv -f prompt.txt",
        f"llama-server -m {subject.file} --jinja", "```", "",
        "Ollama (the Modelfile here holds the run's prompt as its template):", "", "```sh",
        "ollama create tuned -f Modelfile && ollama run tuned", "```", "",
        "transformers:", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="{subject.file}")',
        f'model = AutoModelForCausalLM.from_pretrained(".", gguf_file="{subject.file}")', "```", "",
        "vLLM:", "", "```sh", f"vllm serve ./{subject.file}", "```",
    ]  # fmt: skip


def _prompt(subject: Subject) -> list[str]:
    shown = subject.prompt.replace(MARK, "{question}")
    ends = ", ".join(code(stop) for stop in subject.stops)
    fence = block(shown)[0]
    return [
        f"{fence}text",
        shown,
        fence,
        "",
        f"Answers end at {ends}; at most {subject.recipe.max_completion_tokens} tokens, greedy.",
    ]


def _served_rank(rank: int) -> int:
    """The smallest rank vLLM can be told that holds this one."""
    return next((known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


def _short(source: str) -> str:
    return source.rstrip("/").rsplit("/", 1)[-1] if source.startswith((".", "/", "~")) else source


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
