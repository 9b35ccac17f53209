"""A tokenizer as GGUF metadata: its tokens, merges and special ids, and llama.cpp's name for how it cuts text before merging.

llama.cpp knows pre-tokenizers by name only. Which name fits is found by behaviour: each candidate's expressions are put on the
same merges, and the first that gives the same ids on every probe text is taken; none is a refusal, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_portable.errors import ExportError
from grpo_portable.models.pretokenizers import CUTS, with_cut

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType

PROBES = (
    "Natalia sold 48/2 = 24 clips in May.\n\nShe sold 1,234.50 in all; that's $18 each!\n#### 72",
    "It's  I'LL we've\tTabs\r\nand   spaces   \n \n  x=(3+4)*5²;  y^2_{10} -> 99% …",
    "12345 678 9 0007 3.14159 −7 ½ 1e-5",
    "Ünïcödé, 漢字かな 한국어 русский عربى 🙂🙂 naïve café",
    "def f(x):\n    return {'a': [1, 2], \"b\": None}  # done\n",
)


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF keeps of a tokenizer. `types` are gguf.TokenType values, one a token."""

    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    bos: int | None
    eos: int | None
    pad: int | None
    unknown: int | None
    adds_bos: bool


def vocabulary(tokenizer: Any, rows: int, texts: Iterable[str] = ()) -> Vocabulary:
    """The tokenizer's vocabulary, filled up to the `rows` of the embedding. ExportError when llama.cpp could not read text so.

    `texts` are probed beside the built-in ones: give what the model is asked.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    raw = json.loads(inner.to_str()) if inner is not None else {}
    model = raw.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _unknown(f"its model is {model.get('type') or 'not a fast one'}, and only byte-level BPE is written here")
    added = {entry["id"]: entry for entry in raw.get("added_tokens") or ()}
    by_id = {index: token for token, index in model["vocab"].items()} | {i: e["content"] for i, e in added.items()}
    size = max(rows, max(by_id) + 1)
    if size > rows:
        raise _unknown(f"it has {size} tokens, and the model's embedding only {rows} rows")
    types = [
        (CONTROL if added[i].get("special") else USER_DEFINED) if i in added else NORMAL if i in by_id else UNUSED
        for i in range(size)
    ]
    start = tokenizer("x")["input_ids"]
    return Vocabulary(
        pre=cut_of(raw, [*PROBES, *texts]),
        tokens=tuple(by_id.get(i, f"[PAD{i}]") for i in range(size)),
        types=tuple(types),
        merges=tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]),
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        unknown=tokenizer.unk_token_id,
        adds_bos=tokenizer.bos_token_id is not None and start[:1] == [tokenizer.bos_token_id],
    )


def cut_of(raw: dict[str, Any], texts: Sequence[str]) -> str:
    """llama.cpp's name of the pre-tokenizer under which these merges give the tokenizer's own ids on all texts."""
    from tokenizers import Tokenizer

    def ids(one: Any) -> list[list[int]]:
        return [encoding.ids for encoding in one.encode_batch(list(texts), add_special_tokens=False)]

    wanted = ids(Tokenizer.from_str(json.dumps(raw)))
    for cut in CUTS:
        if ids(with_cut({**raw, "normalizer": None}, cut)) == wanted:  # llama.cpp normalises nothing
            return cut.name
    raise _unknown("none of the pre-tokenizers known here cuts text as it does")


def _unknown(because: str) -> ExportError:
    return ExportError(
        "this tokenizer cannot be written to GGUF here",
        because=because,
        help="export with --to merged, then convert that folder with llama.cpp's convert_hf_to_gguf.py",
    )
