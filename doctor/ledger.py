"""Where each fact came from, and why an unknown one is unknown. Sources write here; the facts file keeps both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from doctor.privacy import scrub

T = TypeVar("T")


@dataclass
class Ledger:
    sources: dict[str, str] = field(default_factory=dict)
    unknowns: dict[str, str] = field(default_factory=dict)

    def source(self, key: str, where: str) -> None:
        self.sources[key] = scrub(where)

    def unknown(self, key: str, why: str) -> None:
        self.unknowns[key] = scrub(why)

    def total(self, key: str, look: Callable[[], T | None]) -> T | None:
        """What `look()` finds; None, with the reason written down, when it raises anything at all."""
        try:
            return look()
        except Exception as e:  # the promise of every source: facts or "unknown, because", never a crash
            self.unknown(key, f"{type(e).__name__}: {e}")
            return None
