"""One step spread over several cards, and a step that grows with them: memory of each, seconds, and the arithmetic in words.

Each card takes whole groups of a step, so at most as many cards share it as its questions are divided by. What is added to one
card's time for its share: the gradients' way between the cards, and the share of a step that was seen to be lost where two
measured cards met (`MEASURED`). Pure.

Legend: k cards, B questions a step, G completions a question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from doctor.cards import Card
from doctor.memory import Settled, Sizes, largest_divisor, settle
from doctor.shapes import Shape
from doctor.speed import StepEstimate, step_estimate

CARDS_A_NODE = 8
LINK_GB_S = {"server": 150.0}  # assumed, of what an all-reduce gets between cards with NVLink
PCIE_GB_S = 12.0  # assumed, the same through the host
NETWORK_GB_S = 20.0  # assumed, of one node's network
ROUND_S = 30e-6  # assumed: one round of an all-reduce, whatever it sends


@dataclass(frozen=True)
class Measured:
    """One and two cards of a kind on the same global batch. `lost`: seconds on two over half of those on one, minus 1."""

    card: str
    what: str
    one_s: float
    two_s: float
    source: str

    @property
    def lost(self) -> float:
        return self.two_s / (self.one_s / 2) - 1


MEASURED: tuple[Measured, ...] = (  # whole steps of reports/
    Measured(
        "H200", "qwen3-4b, bf16-hf, 32 x 16 completions of 256 tokens", 14.934, 7.782, "reports/two-h200/step.json"
    ),
)


@dataclass(frozen=True)
class Spread:
    """`used` of `cards` cards take `questions` questions a step together. `settled` is of each card, `alone` of one for all.

    `exchange_s` and `lost_s` are within `step_s`; the truth is expected within `low_s` to `high_s`.
    """

    cards: int
    used: int
    nodes: int
    questions: int
    group: int
    settled: Settled
    alone_s: float
    share: StepEstimate
    exchange_s: float
    lost_s: float
    step_s: float
    low_s: float
    high_s: float

    @property
    def times(self) -> float:
        """How many times as fast as one card that does all of it."""
        return self.alone_s / self.step_s

    def to_json(self) -> dict[str, Any]:
        """The prediction as a JSON object; memory is of each card."""
        return {
            "cards": self.cards,
            "used": self.used,
            "nodes": self.nodes,
            "questions_per_step": self.questions,
            "memory_each": {"need_gib": self.settled.need_gib, "ledger": dict(self.settled.ledger)},
            "seconds_per_step": {"estimate": self.step_s, "low": self.low_s, "high": self.high_s},
            "one_card": self.alone_s,
            "share_of_one_card": self.share.total_s,
            "exchange": self.exchange_s,
            "lost": self.lost_s,
            "times_one_card": self.times,
        }


def spread(shape: Shape, path: str, have_gib: float | None, card: Card, cards: int, sizes: Sizes) -> Spread | None:
    """The prediction for a step of these sizes on `cards` cards of a kind; None where the share does not fit a card."""
    questions, group = sizes.prompts_per_step, sizes.group_size
    used = most_sharing(cards, questions)
    mine = settle(shape, path, have_gib, replace(sizes, prompts_per_step=questions // used))
    whole = settle(shape, path, have_gib, sizes)
    if mine.fits is False or whole.fits is False:
        return None
    share = step_estimate(shape, mine.setting, card, prompts=questions // used, group_size=group)
    at_once = step_estimate(shape, whole.setting, card, prompts=questions, group_size=group)
    alone = min(at_once.total_s, used * share.total_s)  # one card can also take the shares one after the other
    exchange = exchange_s(mine, card, used)
    lost = share.total_s * lost_share(card) * math.log2(used)
    step = share.total_s + exchange + lost
    return Spread(
        cards,
        used,
        nodes(used),
        questions,
        group,
        mine,
        alone,
        share,
        exchange,
        lost,
        step,
        step / share.error,
        step * share.error,
    )


def most_sharing(cards: int, questions: int) -> int:
    """The most cards, one process each, that share a step evenly: each takes the same number of whole groups."""
    return largest_divisor(questions, cards)


def nodes(cards: int) -> int:
    """Machines of eight cards."""
    return -(-cards // CARDS_A_NODE)


def gradient_gib(settled: Settled) -> float:
    """What the cards send each other once a step: the gradients of what is trained, in float32."""
    return settled.ledger.get("gradients", 0.0)


def exchange_s(settled: Settled, card: Card, cards: int) -> float:
    """Seconds of a ring all-reduce of the gradients: each card sends and receives 2 (k-1)/k of them, in 2 (k-1) rounds."""
    if cards == 1:
        return 0.0
    share = 2 * (cards - 1) / cards
    return gradient_gib(settled) * 2**30 * share / (_rate(card, cards) * 1e9) + _rounds(cards) * ROUND_S


def _rounds(cards: int) -> int:
    return 2 * (cards - 1)


def _rate(card: Card, cards: int) -> float:
    """GB/s of the slowest way between them."""
    inside = LINK_GB_S.get(card.kind, PCIE_GB_S)
    return min(inside, NETWORK_GB_S) if nodes(cards) > 1 else inside


def lost_share(card: Card) -> float:
    """The share of a step lost where two cards met, as measured: on this kind of card, else on any; 0 where nobody measured."""
    seen = [m for m in MEASURED if m.card == card.name] or list(MEASURED)
    return max(0.0, sum(m.lost for m in seen) / len(seen)) if seen else 0.0


def arithmetic(card: Card, s: Spread) -> Iterator[str]:
    """How the seconds come about, a sentence a line."""
    each = s.questions // s.used
    of = f" of {s.cards}" if s.used < s.cards else ""
    yield (
        f"{s.used}{of} cards share {s.questions} questions x {s.group}: {each} x {s.group} completions each, "
        f"{s.settled.need_gib:.1f} GiB on each card"
    )
    more = s.used * s.share.total_s > 1.05 * s.alone_s
    why = "; a share takes more than its part, since every token reads all weights however few the rows" if more else ""
    yield f"one card's time for its share {_s(s.share.total_s)} (for all of it {_s(s.alone_s)}{why})"
    if s.used > 1:
        where = "between the cards" if s.nodes == 1 else f"between {s.nodes} nodes"
        yield (
            f"+ gradients {gradient_gib(s.settled):.2f} GiB x {2 * (s.used - 1) / s.used:.2f} at {_rate(card, s.used):g} GB/s "
            f"{where}, and {_rounds(s.used)} rounds of {1e6 * ROUND_S:g} us = {_s(s.exchange_s)} (rates and rounds assumed)"
        )
        yield _lost_words(card, s)
    yield f"= {_s(s.step_s)} a step ({_s(s.low_s)} to {_s(s.high_s)}), {s.times:.1f} times as fast as one card"


def _lost_words(card: Card, s: Spread) -> str:
    if not MEASURED:
        return (
            "+ nothing for waiting on the slowest: no two cards have been measured yet, so take this as the best case"
        )
    of = ", ".join(f"{m.what} on {m.card}: {m.one_s:g} s on one, {m.two_s:g} s on two" for m in MEASURED)
    return (
        f"+ {100 * lost_share(card):.1f} % x log2({s.used}) for meeting and waiting = {_s(s.lost_s)} (measured, {of}; "
        "beyond two cards the logarithm is assumed)"
    )


def _s(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
