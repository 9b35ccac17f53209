"""Cards one may not have: capability, memory, bandwidth and arithmetic of NVIDIA cards from V100-class to B300, by name.

Numbers are the vendor's (`Card.source`), none is measured here. What such a card can do is `doctor.what_if`'s business.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class CardError(ValueError):
    """A card that is not in the table; the message is one line with the nearest names."""


@dataclass(frozen=True)
class Card:
    """One card. Memory in GB as sold and in GiB as torch sees it, bandwidth in GB/s, dense 16-bit tensor rate in TFLOP/s."""

    name: str
    key: frozenset[str]
    capability: str
    memory_gb: float
    usable_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float | None
    kind: str  # desktop | laptop | workstation | server | embedded
    arch: str  # of the host it usually sits in: x86_64 | aarch64
    unified: bool
    source: str

    @property
    def pair(self) -> tuple[int, int]:
        """The capability as (major, minor)."""
        major, minor = self.capability.split(".")
        return int(major), int(minor)

    @property
    def tflops(self) -> float:
        """The 16-bit rate; where no datasheet says it, a cautious 0.15 TFLOP/s for each GB/s, the low end of the table."""
        return self.bf16_tflops if self.bf16_tflops is not None else 0.15 * self.bandwidth_gb_s


# Words that name no card: makers, brands, casing, memory kinds.
_NOISE = frozenset(
    (
        *(
            "nvidia",
            "geforce",
            "tesla",
            "rtx",
            "gtx",
            "graphics",
            "gpu",
            "gpus",
            "card",
            "cards",
            "tm",
            "jetson",
            "dgx",
        ),
        *("blackwell", "ampere", "hopper", "generation", "gen", "edition", "workstation", "founders", "tensor", "core"),
        *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7"),
    )
)
_SOFT = frozenset(
    ("pcie", "developer", "kit", "t5000", "design", "with", "hgx", "a", "an", "the", "superchip", "agx", "480gb")
)
MOST = 9999  # cards of one question
_NUMBER = re.compile(r"^\s*(\d{1,30})\s*[x×*]", re.IGNORECASE)
_SEVERAL_KINDS = re.compile(r"\s(?:\+|and|&)\s", re.IGNORECASE)
_COUNT_BEFORE = re.compile(r"^\s*(\d{1,4})\s*[x×*]\s*(?=\D|\d{4})", re.IGNORECASE)
# the x of RTX and GTX counts nothing
_COUNT_AFTER = re.compile(r"\s*(?<!rt)(?<!gt)[x×*]\s*(\d{1,3})\s*$", re.IGNORECASE)
_SAME = {"mobile": "laptop", "notebook": "laptop", "spark": "gb10", "s": "super"}


def find_card(text: str) -> tuple[Card, int]:
    """The card a text names and how many of it ("8x H100", "RTX 4090 laptop"); CardError names the nearest ones."""
    name, count = _count(text)
    words = _words(name)
    if words:
        for card in cards():
            if card.key == words:
                return card, count
        inside = [card for card in cards() if card.key <= words and _says_no_more(words - card.key, card)]
        if inside:
            return max(inside, key=lambda card: len(card.key)), count
    raise CardError(f"`{text.strip()}` {_why_not(text, name, words)}")


@cache
def cards() -> tuple[Card, ...]:
    """Every card of the table, older architectures first."""
    table = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
    return tuple(_card(row) for row in table["cards"])


def _card(row: Mapping[str, object]) -> Card:
    memory = float(str(row["memory_gb"]))
    rate = row["bf16_tflops"]
    return Card(
        name=str(row["name"]),
        key=frozenset(str(row["key"]).split()),
        capability=str(row["capability"]),
        memory_gb=memory,
        usable_gib=float(str(row.get("usable_gib", round(0.98 * memory, 1)))),
        bandwidth_gb_s=float(str(row["bandwidth_gb_s"])),
        bf16_tflops=None if rate is None else float(str(rate)),
        kind=str(row["kind"]),
        arch=str(row.get("arch", "x86_64")),
        unified=bool(row.get("unified", False)),
        source=str(row["source"]),
    )


def _count(text: str) -> tuple[str, int]:
    before = _COUNT_BEFORE.search(text)
    if before and int(before[1]) > 0:
        return text[before.end() :], int(before[1])
    after = _COUNT_AFTER.search(text)
    if after and int(after[1]) > 0:
        return text[: after.start()], int(after[1])
    return text, 1


def _why_not(text: str, name: str, words: frozenset[str]) -> str:
    number = _NUMBER.search(text)
    if not words or (number and not text[number.end() :].strip()):
        return "names no card; say one as `RTX 4090` or `8x H100`"
    if _SEVERAL_KINDS.search(text):
        return "names cards of more than one kind; only equal ones train together, so ask for each kind by itself"
    if number and not 0 < int(number[1]) <= MOST:
        return f"asks for {'no card' if int(number[1]) == 0 else f'over {MOST:,} cards'}; say one as `RTX 4090` or `8x H100`"
    return f"is not a card known here; nearest: {', '.join(_nearest(name))}"


def _words(text: str) -> frozenset[str]:
    plain = re.sub(r"\((?:r|tm|c)\)|[®™]", " ", text.lower())
    plain = re.sub(r"max-?\s?q", "maxq", plain)
    plain = re.sub(r"(?<![a-z\d])(\d+)\s*(?:gib|gb)\b", r"\1gb ", plain)
    plain = re.sub(r"\b(?:rtx|gtx)(?=[a\d])", " ", plain)
    plain = re.sub(r"\b(\d{4})(ti|super|s|d|m)(?![a-z])", r"\1 \2", plain)
    plain = plain.replace(" m ", " laptop ") if re.search(r"\d{4} m\b", plain) else plain
    words = {_SAME.get(w, w) for w in re.findall(r"[a-z0-9]+", re.sub(r"(\d{4}) m\b", r"\1 laptop", plain))}
    if "maxq" in words and "pro" not in words:
        words = (words - {"maxq"}) | {"laptop"}
    if "quadro" in words and not words & {"4000", "5000", "6000", "8000"}:
        words -= {"quadro"}
    if "8000" in words:
        words |= {"quadro"}
    if words & {"orin"} and not words & {"agx", "nx", "nano"}:
        words |= {"agx"}
    return frozenset(words - _NOISE)


def _says_no_more(words: frozenset[str], card: Card) -> bool:
    """Whether what a text says beyond the card's key agrees with that card: its own memory size, its casing."""
    for word in words - _SOFT:
        size = re.fullmatch(r"(\d+)gb", word)
        if not size or abs(int(size[1]) - card.memory_gb) > 0.1 * card.memory_gb:
            return False
    return True


def _nearest(name: str) -> list[str]:
    names = {re.sub(r"^(geforce|tesla|quadro)\s+", "", card.name.lower()): card.name for card in cards()}
    wanted = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower()).strip()
    found = difflib.get_close_matches(wanted, names, n=3, cutoff=0.3)
    return [names[key] for key in found] or ["GeForce RTX 4090", "A100 80GB", "H100"]
