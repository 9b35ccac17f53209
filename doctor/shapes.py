"""The shape of a model: its dimensions and parameter counts, without torch, without the network.

`shape_of` knows hub ids from a table (`shapes.json`), local folders and GGUF files from their headers (`doctor.shape_files`),
and guesses from a size in the name ("7B"), saying so in `Shape.basis`. It knows nothing of memory: bytes are
`doctor.memory`'s business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """One decoder-only transformer. Counts are parameters, never bytes.

    `params` is the published or computed total; `beside` is the part of it outside the text model (a vision tower).
    `stored` is how the checkpoint keeps its weights where its name or config says so: fp8, nf4 or int4. `basis` says where
    the shape comes from: table, config, gguf, or an estimate (`similar name`, `size in the name`).
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    params: int
    qk_norm: bool = False
    qkv_bias: bool = False
    norms: int = 2  # norm vectors of `hidden` a layer
    fused: bool = False  # qkv and gate-up are one linear each (Phi-3)
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    beside: int = 0
    stored: str | None = None
    basis: str = "table"

    @property
    def estimated(self) -> bool:
        """True when the dimensions were guessed from the name."""
        return self.basis in ("similar name", "size in the name")

    @property
    def embedding_params(self) -> int:
        """Embedding and, where it is not tied, the LM head: the part 4-bit quantisation leaves alone."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def linear_params(self) -> int:
        """Weights of the linear layers inside the blocks: the part that is quantised. Scaled where `params` is a guess."""
        counted = self.layers * (self._attention_weights() + self._mlp_weights())
        room = self.params - self.beside - self.embedding_params
        return max(0, min(counted, room)) if not self.estimated else max(0, room)

    @property
    def active_params(self) -> int:
        """Parameters one token passes through in the text model, embedding lookup left out (for speed)."""
        if not self.experts:
            return max(0, self.params - self.beside - (0 if self.tied else self.vocab * self.hidden))
        idle = (self.experts - self.experts_per_token) * 3 * self.hidden * self.moe_intermediate
        return max(0, self.params - self.beside - self.layers * idle - (0 if self.tied else self.vocab * self.hidden))

    @property
    def kv_values_per_token(self) -> int:
        """Numbers one token keeps in the KV cache over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """In and out features of one block's linear layers, by the adapter's target name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (
            {"qkv": (self.hidden, q + 2 * kv), "o": (q, self.hidden)}
            if self.fused
            else {"q": (self.hidden, q), "k": (self.hidden, kv), "v": (self.hidden, kv), "o": (q, self.hidden)}
        )
        if self.experts:  # experts are stacked parameters, not linear layers: "all-linear" does not reach them
            return attention
        wide = self.intermediate
        if self.fused:
            return {**attention, "gate_up": (self.hidden, 2 * wide), "down": (wide, self.hidden)}
        return {**attention, "gate": (self.hidden, wide), "up": (self.hidden, wide), "down": (wide, self.hidden)}

    def adapter_params(self, rank: int, *, dora: bool = False) -> int:
        """Trainable parameters of a LoRA of this rank on every linear layer of every block (Hu et al. 2021: r(in + out))."""
        each = sum(rank * (i + o) + (o if dora else 0) for i, o in self.linears().values())
        return self.layers * each

    def _attention_weights(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def _mlp_weights(self) -> int:
        if self.experts:
            return 3 * self.experts * self.hidden * self.moe_intermediate
        return 3 * self.hidden * self.intermediate


# The model that comes with grpo_portable. A folder or a model of the hub that is called so is another.
BUILT_IN = Shape("embedded", 128, 4, 4, 4, 32, 384, 512, True, 918_656)


def count(shape: Shape) -> int:
    """Parameters computed from the dimensions of a Llama-like model; equals the published count for the whole table."""
    bias = (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.qkv_bias else 0
    small = bias + (2 * shape.head_dim if shape.qk_norm else 0) + shape.norms * shape.hidden
    router = shape.experts * shape.hidden
    block = shape._attention_weights() + shape._mlp_weights() + router + small
    return shape.embedding_params + shape.layers * block + shape.hidden + shape.beside


# Words of a hub name that change how weights are kept or tuned, never the shape.
_NEUTRAL = frozenset(
    (
        *("instruct", "base", "it", "pt", "chat", "hf", "thinking", "reasoning", "plus", "latest"),
        *("fp8", "block", "dynamic", "static", "w8a8", "w8a16", "bf16", "fp16", "awq", "gptq", "int4", "int8", "w4a16"),
        *("bnb", "4bit", "8bit", "nf4", "bitsandbytes", "unsloth", "gguf", "mlx", "quantized", "qat"),
        *("4k", "8k", "128k", "1m"),
    )
)
_STORED = (
    ("nf4", re.compile(r"bnb|4bit|nf4")),
    ("fp8", re.compile(r"fp8|w8a8")),
    ("int4", re.compile(r"awq|gptq|int4|w4a16")),
)
_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,2})x)?(\d{1,4}(?:\.\d+)?)([bm])(?![a-z0-9])")


def shape_of(model: str | None) -> Shape | None:
    """The shape of a hub id, a local folder (its config.json) or a GGUF file; None when unknown."""
    if not model or not model.strip():
        return None
    if model == BUILT_IN.name:
        return BUILT_IN
    from doctor.shape_files import shape_from_path

    try:
        path = Path(model).expanduser()
        local = path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL, or of a user that is not there: no path
        local = False
    if local:
        found = shape_from_path(path)  # a report names the model, not where it lies
        return found and replace(found, name=path.resolve().name)
    if model.startswith((".", "/", "~")) or "\\" in model:
        return None
    return _from_name(model)


def known_models() -> tuple[str, ...]:
    """Hub ids of the table, in its order."""
    return tuple(name for row in _rows() for name in row["names"])


def _from_name(model: str) -> Shape | None:
    words = _words(model)
    stored = _stored(model)
    table = _table()
    found = table.get(words)
    if found:
        return replace(found, name=model, stored=stored)
    inside = [key for key in table if _contains(words, key)]
    if inside:
        nearest = table[max(inside, key=len)]
        return replace(nearest, name=model, stored=stored, basis="similar name")
    params = size_in(model)
    return None if params is None else replace(_like(params), name=model, stored=stored)


def size_in(name: str) -> int | None:
    """Parameters named in a model's name: "7B", "135M", "8x7B" (experts share attention: 0.83 of the product); None without."""
    for found in _SIZE.finditer(name.rsplit("/", 1)[-1].lower()):
        experts, number, unit = found.groups()
        size = float(number) * (1e9 if unit == "b" else 1e6)
        if experts:
            size *= int(experts) * 0.83
        if 1e6 <= size <= 2e12:
            return int(size)
    return None


def _like(params: int) -> Shape:
    """A shape of `params` parameters, like the nearest dense model of the table, with as many layers as the size asks for."""
    dense = [s for s in _table().values() if not s.experts and not s.beside]
    nearest = min(dense, key=lambda s: abs(s.params - params) / min(s.params, params))
    blocks = max(1, (nearest.params - nearest.embedding_params) // nearest.layers)
    layers = max(1, round((params - nearest.embedding_params) / blocks))
    return replace(nearest, params=params, layers=layers, basis="size in the name")


def _words(model: str) -> tuple[str, ...]:
    parts = re.split(r"[-_/\s]+", model.strip().rstrip("/").rsplit("/", 1)[-1].lower())
    return tuple(p for p in parts if p and p not in _NEUTRAL and not re.fullmatch(r"2[3-9]\d\d", p))


def _contains(words: tuple[str, ...], key: tuple[str, ...]) -> bool:
    # One word is too little to recognise a model by ("phi").
    return len(key) > 1 and any(words[i : i + len(key)] == key for i in range(len(words) - len(key) + 1))


def _stored(model: str) -> str | None:
    name = model.rsplit("/", 1)[-1].lower()
    return next((kind for kind, pattern in _STORED if pattern.search(name)), None)


@cache
def _rows() -> tuple[Mapping[str, Any], ...]:
    table = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    return tuple(row for family in table["families"].values() for row in family)


@cache
def _table() -> Mapping[tuple[str, ...], Shape]:
    found: dict[tuple[str, ...], Shape] = {}
    for row in _rows():
        fields = {key: value for key, value in row.items() if key != "names"}
        for name in row["names"]:
            found.setdefault(_words(name), Shape(name=name, **fields))
    return found
