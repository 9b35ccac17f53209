"""How byte-level tokenizers cut text before merging, by the names llama.cpp gives them (src/llama-vocab.cpp).

A GGUF file keeps only such a name. transformers does not read it and cuts every Llama file as GPT-2's text was, so that
numbers and rare characters get other tokens than the model was trained with; `as_named` puts the right one back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """Expressions applied in turn. `whole_words_first`: a piece that is a token is taken as it is, without merges."""

    name: str
    expressions: tuple[str, ...]
    whole_words_first: bool = False


CUTS = (
    Cut("qwen2", (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),)),
    Cut("llama-bpe", (_LLAMA3,), whole_words_first=True),
    Cut("smollm", (r"\p{N}", _GPT2)),
    Cut("gpt-2", (_GPT2,)),
)
_ALSO = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2", "smollm2": "smollm"}


def cut_named(name: str | None) -> Cut | None:
    """The cut of a name, None for one that is not known here."""
    wanted = _ALSO.get(name or "", name)
    return next((cut for cut in CUTS if cut.name == wanted), None)


def with_cut(raw: dict[str, Any], cut: Cut) -> Any:
    """A tokenizer (of the library tokenizers) from its JSON, cutting as `cut` says."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    changed = {**raw, "model": {**raw["model"], "ignore_merges": cut.whole_words_first}}
    made = Tokenizer.from_str(json.dumps(changed))
    pieces = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in cut.expressions]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return made


def as_named(tokenizer: Any, name: str | None) -> None:
    """Let a tokenizer read from GGUF cut text as the file's own name for it says. Unknown names change nothing."""
    cut, inner = cut_named(name), getattr(tokenizer, "backend_tokenizer", None)
    raw = json.loads(inner.to_str()) if inner is not None else {}
    if cut is None or (raw.get("model") or {}).get("type") != "BPE" or raw["model"].get("byte_fallback"):
        return
    tokenizer._tokenizer = with_cut(raw, cut)
