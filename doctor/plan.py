"""Facts + walls + memory → the choice, with its reasons. Pure.

Each card is judged by itself: which paths are open on it, what fits its free memory; then the best path of all cards wins.
float16 paths count only on cards without bfloat16. Memory never closes a path: `open` and `fits` are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from doctor import walls_gpu, walls_vllm
from doctor.diagnosis import (
    BF16_OF,
    BF16_PATHS,
    FP8_PATHS,
    GPU_PATHS,
    PATHS,
    VLLM_PATHS,
    About,
    Diagnosis,
    Memory,
    PathState,
    Plan,
    Reason,
    Wall,
)
from doctor.facts import Facts
from doctor.install_lines import after_install, torch_reaches
from doctor.memory import DEFAULT, Settled, Sizes, settle
from doctor.readings import Card, card_memory, cards_or_unknown, system_gib
from doctor.shapes import Shape, shape_of
from doctor.together import Together, together
from doctor.walls import better, card_walls, closed_on, codes_closing, find_walls, lasting, machine_walls
from doctor.walls_locks import lock_walls
from doctor.walls_model import Model, warnings

_RANK = {path: place for place, path in enumerate(PATHS)}


@dataclass(frozen=True)
class _Place:
    """One place to train: a card, or the system (`card` None). `fits` per path, None where nobody knows."""

    card: Card | None
    have_gib: float | None
    closed: frozenset[str]
    settled: Mapping[str, Settled]
    refused: bool  # a start of vLLM was refused for memory there

    def fits(self, path: str) -> bool | None:
        if self.refused and path in VLLM_PATHS:
            return False
        return self.settled[path].fits if path in self.settled else None

    def best(self) -> str | None:
        """The best path that is open here and fits."""
        for path in PATHS:
            counts = path not in BF16_OF or BF16_OF[path] in self.closed
            if path not in self.closed and self.fits(path) is not False and counts:
                return path
        return None


@dataclass(frozen=True)
class _Choice:
    """What was looked at, and what came of it: the place and the path, with the cards that take it together."""

    model: Model
    places: list[_Place]
    place: _Place
    team: Together | None
    path: str | None
    walls: tuple[Wall, ...]
    states: Mapping[str, PathState]


def diagnose(facts: Facts, model: str | None = None, sizes: Sizes = DEFAULT) -> Diagnosis:
    """The diagnosis of a machine, for a model if one is named.

    Unknown memory or an unknown model counts as fitting; nothing is looked up on a network.
    """
    sizes = sizes.on(facts)
    shape = shape_of(model)
    asked = Model(model, shape)
    walls = find_walls(facts, asked)
    own = [*machine_walls(facts, asked), *lock_walls(facts)]
    places = _places(facts, asked, own, sizes)
    place = min(places, key=_preference)
    path = place.best()
    walls = (*walls, *warnings(model, shape, path))
    closing = codes_closing(walls)
    states = {p: PathState(open=not closing[p], fits=_anywhere(places, p), walls=closing[p]) for p in PATHS}
    after = _after_fix(facts, asked, own, sizes, states, path)
    next_step = _after_install(facts, asked, sizes) if facts.absent("torch") else None
    team = _team(facts, shape, place, path, sizes)
    if team is not None and path is not None and team.have_gib != place.have_gib and place.card is not None:
        known = card_memory(facts, place.card.gpu)[1]
        settled = {**place.settled, **_settle(shape, (path,), team.have_gib, known, sizes)}
        place = replace(place, have_gib=team.have_gib, settled=settled)
    choice = _Choice(asked, places, place, team, path, walls, states)
    return Diagnosis(_plan(choice, _promises(next_step, after, path)), walls, states, after, facts)


def _team(facts: Facts, shape: Shape | None, place: _Place, path: str | None, sizes: Sizes) -> Together | None:
    """The cards that take the path together; None where none is used."""
    if place.card is None or path is None:
        return None

    def room(have: float | None) -> bool:
        return shape is None or settle(shape, path, have, sizes).fits is not False

    return together(facts, place.card, lambda card: card_memory(facts, card.gpu)[0], room)


def _promises(installed: str | None, after: str | None, now: str | None) -> tuple[Reason, ...]:
    """What this machine becomes: once the set is installed, and once every help was followed."""
    said = []
    if installed:
        said.append(f"Once torch and its set are installed this machine takes {installed}")
    if after and after not in (now, installed):
        said.append(f"With {'all' if installed else 'the'} helps followed it could take {after}")
    return tuple(Reason(About.PROMISE, text) for text in said)


def _after_install(facts: Facts, model: Model, sizes: Sizes) -> str | None:
    """The best path once the help of TORCH-ABSENT alone was followed."""
    then = after_install(facts, walls_vllm.newest_fitting(facts)[0])
    if then is None:
        return None
    own = [*machine_walls(then, model), *lock_walls(then)]
    return min(_places(then, model, own, sizes), key=_preference).best()


def _preference(place: _Place) -> tuple[int, float, bool]:
    path = place.best()
    screen = place.card is not None and bool(place.card.gpu.display)
    return (_RANK[path] if path else len(PATHS), -(place.have_gib or 0.0), screen)


def _places(facts: Facts, model: Model, own: Iterable[Wall], sizes: Sizes) -> list[_Place]:
    """The cards, best first, and the system itself for the `cpu` path."""
    own = list(own)
    refused = walls_vllm.memory_refused(facts)
    found = []
    for card in sorted(cards_or_unknown(facts), key=better, reverse=True):
        have, known_free = card_memory(facts, card.gpu)
        closed = closed_on(facts, card, own, model) | {"cpu"}
        settled = _settle(model.shape, PATHS[:-1], have, known_free, sizes)
        found.append(_Place(card, have, closed, settled, refused))
    closed = frozenset(PATHS[:-1]) | closed_on(facts, None, own)
    free = system_gib(facts)
    found.append(_Place(None, free, closed, _settle(model.shape, ("cpu",), free, True, sizes), False))
    return found


def _settle(
    shape: Shape | None, paths: Iterable[str], have: float | None, known: bool, sizes: Sizes
) -> dict[str, Settled]:
    """What each path would settle on. Where only the total is known, what exceeds it does not fit; the rest is unknown."""
    if shape is None:
        return {}
    settled = {path: settle(shape, path, have, sizes) for path in paths}
    if known:
        return settled
    unknown = {path: settle(shape, path, None, sizes) for path in paths}
    return {path: s if s.fits is False else unknown[path] for path, s in settled.items()}


def _anywhere(places: Iterable[_Place], path: str) -> bool | None:
    """Whether a path fits some place: where it is open if it is open anywhere."""
    found = list(places)
    kind = [p for p in found if (p.card is None) == (path == "cpu")]
    said = [p.fits(path) for p in ([p for p in kind if path not in p.closed] or kind)]
    if True in said:
        return True
    return None if None in said or not said else False


def _after_fix(
    facts: Facts,
    model: Model,
    own: Iterable[Wall],
    sizes: Sizes,
    states: Mapping[str, PathState],
    now: str | None,
) -> str | None:
    """The best path once the helps that need no new hardware were followed: software set right, memory free."""
    best = [now] if now else []
    for card in cards_or_unknown(facts):
        closed = {p for w in lasting((*own, *card_walls(facts, card, model))) for p in w.closes} | {"cpu"}
        if not walls_vllm.reachable(facts, card) and not all(states[p].open for p in VLLM_PATHS if p not in closed):
            closed |= set(VLLM_PATHS)
        if not torch_reaches(facts, card):
            closed |= {p for p in GPU_PATHS if not states[p].open}
        have, known = card_memory(facts, card.gpu)
        held = walls_gpu.held_gib(card)
        if have is not None and held is not None:
            have += held
        place = _Place(card, have, frozenset(closed), _settle(model.shape, PATHS[:-1], have, known, sizes), False)
        best += [found] if (found := place.best()) else []
    ram = facts.host.ram_gib
    if _Place(None, ram, frozenset(PATHS[:-1]), _settle(model.shape, ("cpu",), ram, True, sizes), False).best():
        best.append("cpu")
    return min(best, key=_RANK.__getitem__, default=None)


def _plan(c: _Choice, promises: tuple[Reason, ...]) -> Plan:
    place, path = c.place, c.path
    settled = place.settled.get(path) if path else None
    memory = None
    if settled is not None:
        memory = Memory(settled.need_gib, place.have_gib, settled.ledger)
    return Plan(
        path=path,
        engine=None if path is None else "vllm" if path in VLLM_PATHS else "portable",
        dtype=_dtype(path, place.closed),
        quantization=None if path is None else "fp8" if path in FP8_PATHS else "nf4" if path == "qlora-hf" else None,
        gpus=c.team.gpus if c.team is not None else (),
        model=c.model.name,
        memory=memory,
        micro_batch=settled.micro_batch if settled else None,
        rollout_rows=settled.rollout_rows if settled else None,
        reasons=tuple(_reasons(c, promises)),
    )


def _dtype(path: str | None, closed: frozenset[str]) -> str | None:
    if path is None:
        return None
    if path == "cpu":
        return "float32"
    if path in BF16_OF or (path == "qlora-hf" and set(BF16_PATHS) <= closed):
        return "float16"
    return "bfloat16"


def _reasons(c: _Choice, promises: tuple[Reason, ...]) -> Iterable[Reason]:
    """What was chosen and why, why nothing better, what was assumed."""
    place, path = c.place, c.path
    where = place.card.label if place.card is not None else "the CPU"
    if path is None:
        left = "No path is open and fits" if any(s.open for s in c.states.values()) else "No path is open"
        yield Reason(About.CHOICE, left)
    else:
        yield Reason(About.CHOICE, f"{path} on {where} is the best path that is open and fits")
        if settled := place.settled.get(path):
            yield Reason(About.MEMORY if settled.fits else About.UNKNOWN, settled.reason)
    yield from _why_nothing_better(c)
    if c.model.name and c.model.shape is None:
        unknown = (
            f"{c.model.name} is not known here, so nothing is said about memory; name a local folder, or a size like 7B"
        )
        yield Reason(About.UNKNOWN, unknown)
    if place.card is not None and place.have_gib is None and path:
        yield Reason(About.UNKNOWN, "Free memory is unknown and counts as enough")
    if len([p for p in c.places if p.card is not None]) > 1 and c.team is not None:
        yield from (Reason(About.GPUS, text) for text in _together(where, c.team))
    yield from promises


def _together(where: str, team: Together) -> Iterable[str]:
    """Which of several cards are used, and why the others are not."""
    if len(team.gpus) == 1:
        yield f"One card is used, the best for this: {where}"
    else:
        least = (
            f"; the least free on any of them, {team.have_gib:.1f} GiB, decides" if team.have_gib is not None else ""
        )
        yield f"{len(team.gpus)} equal cards are used, one process each: GPU {', '.join(map(str, team.gpus))}{least}"
    yield from team.reasons


def _why_nothing_better(c: _Choice) -> Iterable[Reason]:
    """Why each better path was not taken; paths with the same reason in one sentence."""
    together: dict[Reason, list[str]] = {}
    old = any("BF16-HARDWARE" in c.states[p].walls for p in BF16_PATHS)
    for candidate in PATHS[: _RANK[c.path] if c.path else len(PATHS)]:
        counts = candidate not in BF16_OF or old or c.path is None
        if counts and (reason := _why_not(candidate, c)):
            together.setdefault(reason, []).append(candidate)
    for reason, candidates in together.items():
        which = "Every path" if len(candidates) == len(PATHS) else ", ".join(candidates)
        are = "are" if 1 < len(candidates) < len(PATHS) else "is"
        yield replace(reason, text=f"{which} {are} {reason.text}")


def _why_not(path: str, c: _Choice) -> Reason | None:
    """Why one path was not taken, as what stands after `is`; None where it was only not the best."""
    state = c.states[path]
    if not state.open:
        wall = next(w for w in c.walls if path in w.closes)
        return Reason(About.CLOSED, f"closed: {wall.fact} ({wall.code})", wall.code)
    if state.fits is not False:
        return None
    if path in VLLM_PATHS and any(p.refused for p in c.places):
        return Reason(About.ROOM, "open, but vLLM's start was refused for want of memory")
    settled = [s for p in c.places if (s := p.settled.get(path)) and path not in p.closed]
    least = min(settled, key=lambda s: s.need_gib, default=None)
    return Reason(About.ROOM, "open, but too large" + (f": {least.reason}" if least else ""))
