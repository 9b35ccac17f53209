"""Which cards train together, one process each: equal ones that have room, none that draws a screen. Pure.

Each card holds all of the model and its own rollouts; what goes between them are the gradients of what is trained, once a step.
The slowest card and the one with the least free memory decide for all, so unequal cards are no gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from doctor.facts import Facts
from doctor.readings import Card, cards
from doctor.walls_several import no_several

ALIKE = 0.03  # share by which the memory of cards of one kind may differ
LEAST_SHARE = 0.5  # of the freest card's free memory; less would slow all of them down


@dataclass(frozen=True)
class Together:
    """Indices of the cards, the least that is free on any of them, and a sentence for each card left out."""

    gpus: tuple[int, ...]
    have_gib: float | None
    reasons: tuple[str, ...]


def together(
    facts: Facts, best: Card, have: Callable[[Card], float | None], room: Callable[[float | None], bool]
) -> Together:
    """`best` and the cards that can work beside it.

    `have`: GiB a run could have on a card; `room`: whether so much is enough for the path that runs. Unknown counts as enough.
    """
    found = [c for c in cards(facts) or () if c.index != best.index]
    why = {card.index: _left_out(facts, card, best, have, room) for card in found}
    alone = no_several(facts)
    if best.gpu.mig:
        alone = f"{best.label} is a MIG slice"
    chosen = [best] if alone else [best, *(c for c in found if why[c.index] is None)]
    reasons = [told for told in why.values() if told]
    if alone and any(told is None for told in why.values()):
        reasons.append(f"One card is used, though others are equal: {alone}")
    free = [gib for card in chosen if (gib := have(card)) is not None]
    return Together(tuple(sorted(c.index for c in chosen)), min(free, default=None), tuple(reasons))


def _left_out(
    facts: Facts,
    card: Card,
    best: Card,
    have: Callable[[Card], float | None],
    room: Callable[[float | None], bool],
) -> str | None:
    """Why a card does not work beside the best one, None when it does."""
    if error := broken(facts, card):
        return f"{card.label} is left out: torch cannot use it ({error})"
    if not equal(card, best):
        return f"{card.label} is left out: it is no equal of {best.label}"
    if card.gpu.display:
        return f"{card.label} is left out: it draws the screen"
    free, freest = have(card), have(best)
    if not room(free):
        return f"{card.label} is left out: the {free:.1f} GiB free on it are not enough"
    if free is not None and freest is not None and free < LEAST_SHARE * freest:
        return f"{card.label} is left out: {free:.1f} GiB are free on it, and {freest:.1f} on {best.label}"
    return None


def equal(one: Card, other: Card) -> bool:
    """Whether two cards are of one kind: name, capability, memory."""
    a, b = one.gpu.total_gib, other.gpu.total_gib
    same_size = a is None or b is None or abs(a - b) <= ALIKE * max(a, b)
    return (
        (one.gpu.name, one.capability, one.gpu.gfx, one.gpu.mig)
        == (other.gpu.name, other.capability, other.gpu.gfx, other.gpu.mig)
    ) and same_size


def broken(facts: Facts, card: Card) -> str | None:
    """What torch said of a card it could not use, None where it said nothing."""
    seen = facts.extra.get("devices")
    if not isinstance(seen, (list, tuple)) or card.index >= len(seen) or not isinstance(seen[card.index], dict):
        return None
    error = seen[card.index].get("error")
    return str(error) if error else None
