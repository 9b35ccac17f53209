"""All walls of a machine: which rules run when, and what several cards make of them. Pure: facts in, walls out.

With several cards the best one decides: a path is closed only when it is closed on every card. One cause gives one wall;
where there is no card at all, what software would make of one is not told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from doctor import walls_fp8, walls_gpu, walls_model, walls_several, walls_stack, walls_torch, walls_vllm
from doctor.diagnosis import PATHS, VLLM_PATHS, Wall
from doctor.facts import Facts
from doctor.readings import Card, cards, hidden
from doctor.versions import Pair
from doctor.walls_locks import lock_walls
from doctor.walls_model import Model
from doctor.walls_proof import proof_walls

NO_MODEL = Model()
# Codes of walls that no software lifts: what they close stays closed in `after_fix`.
LASTING = frozenset(
    {
        "GPU-NONE", "GPU-INTEL", "GPU-APPLE", "BF16-HARDWARE", "FP8-HARDWARE", "FP8-AMD", "FP8-HF-UNPROVEN",
        "VLLM-MACOS", "VLLM-CAPABILITY", "VLLM-GPU-TOO-OLD", "MODEL-FLOAT16",
    }
)  # fmt: skip


def find_walls(facts: Facts, model: Model = NO_MODEL) -> tuple[Wall, ...]:
    """Every wall, those that close most first, warnings last."""
    found = [*machine_walls(facts, model), *_of_all_cards(facts, model)]
    usable = walls_vllm.without_unusable(facts)
    found += [w for w in lock_walls(usable) if _matters(facts, w)]
    found += _warnings(usable)
    distinct = list({(w.code, w.fact): w for w in found}.values())
    return tuple(sorted(distinct, key=lambda w: (not w.closes, -len(w.closes))))


def machine_walls(facts: Facts, model: Model = NO_MODEL) -> list[Wall]:
    """Walls that hold for every card alike."""
    absent, nothing = walls_torch.torch_absent(facts), walls_gpu.no_card(facts)
    if absent is not None:
        return [w for w in (absent, nothing or walls_vllm.platform_wall(facts)) if w is not None]
    proofs = proof_walls(facts)
    stack = walls_torch.import_wall(facts), *walls_stack.stack_walls(facts), walls_model.unread_wall(facts, model.name)
    broken = [w for w in stack if w is not None]
    if nothing is not None:
        return [*broken, nothing, *(w for w in proofs if "cpu" in w.closes)]
    return [
        *broken,
        *proofs,
        *walls_torch.torch_walls(facts),
        *walls_vllm.vllm_walls(facts),
        *filter(None, (walls_fp8.matmul_wall(facts), walls_stack.bitsandbytes_wall(facts))),
    ]


def card_walls(facts: Facts, card: Card, model: Model = NO_MODEL) -> list[Wall]:
    """Walls of one card: its silicon, what the installed software has for it, and what the model would do on it."""
    if walls_gpu.no_card(facts) is not None:
        return []
    software = walls_torch.arch_wall(facts, card), walls_fp8.gate_wall(facts, card), walls_vllm.card_wall(facts, card)
    silicon = list(walls_gpu.card_walls(facts, card))
    float16 = walls_model.float16_wall(model.name) if any(w.code == "BF16-HARDWARE" for w in silicon) else None
    return [*silicon, *filter(None, (*software, walls_gpu.unproven_fp8(card, model.shape), float16))]


def closed_on(facts: Facts, card: Card | None, walls: Iterable[Wall], model: Model = NO_MODEL) -> frozenset[str]:
    """The paths that are closed on one card; `walls` are the machine's own, with TRL's lock among them."""
    own = card_walls(facts, card, model) if card is not None else []
    return frozenset(path for wall in (*walls, *own) for path in wall.closes)


def _of_all_cards(facts: Facts, model: Model) -> list[Wall]:
    """The cards' walls, each closing only what is closed on every card; told by the best card, the others after it."""
    by_card = [(card, card_walls(facts, card, model)) for card in sorted(cards(facts) or (), key=better, reverse=True)]
    closed = [frozenset(p for w in walls for p in w.closes) for _, walls in by_card]
    everywhere = frozenset(PATHS).intersection(*closed) if closed else frozenset()
    # Another build of torch or CUDA is advice for the best card; of the others only what their silicon closes is told.
    told = LASTING | {w.code for w in by_card[0][1]} if by_card else LASTING
    merged: dict[str, Wall] = {}
    for _, walls in by_card:
        for wall in walls:
            closes = tuple(p for p in wall.closes if p in everywhere)
            if not closes or wall.code not in told:
                continue
            first = merged.get(wall.code)
            merged[wall.code] = replace(wall, closes=closes) if first is None else _joined(first, wall, closes)
    return list(merged.values())


def _joined(first: Wall, other: Wall, closes: tuple[str, ...]) -> Wall:
    both = tuple(p for p in PATHS if p in first.closes or p in closes)
    more = () if other.fact == first.fact else (other.fact,)
    return replace(first, closes=both, because=tuple(dict.fromkeys((*first.because, *more))))


def better(card: Card) -> tuple[Pair, float]:
    """Sort key of cards: capability first, then memory."""
    return card.capability or (0, 0), card.gpu.total_gib or 0.0


def _matters(facts: Facts, wall: Wall) -> bool:
    """TRL's lock closes vLLM paths only where there is something to run them on."""
    return not (set(wall.closes) & set(VLLM_PATHS)) or walls_gpu.no_card(facts) is None


def _warnings(facts: Facts) -> list[Wall]:
    if facts.absent("torch"):
        return [*walls_gpu.warnings(facts), *walls_several.warnings(facts), *walls_stack.warnings(facts)]
    if walls_gpu.no_card(facts) is not None and not hidden(facts):
        own = [*walls_several.warnings(facts), *walls_stack.warnings(facts)]
        return [w for w in own if w.code != "UNSLOTH-IMPORT"]  # it wants a GPU
    return [
        *walls_torch.warnings(facts),
        *walls_vllm.warnings(facts),
        *walls_fp8.warnings(facts),
        *filter(None, (walls_fp8.on_the_fly(facts),)),
        *walls_gpu.warnings(facts),
        *walls_several.warnings(facts),
        *walls_stack.warnings(facts),
    ]


def lasting(walls: Iterable[Wall]) -> list[Wall]:
    """The walls that stay when every help that needs no new hardware was followed."""
    return [w for w in walls if w.code in LASTING]


def codes_closing(walls: Iterable[Wall]) -> Mapping[str, tuple[str, ...]]:
    """Path → codes of the walls that close it."""
    found = list(walls)
    return {path: tuple(dict.fromkeys(w.code for w in found if path in w.closes)) for path in PATHS}
