"""What a card one does not have could do: assumed facts, the doctor's own diagnosis of them, and an estimate of a step's time.

The assumptions are few and are said in every answer: Linux, the newest driver branch of the table, the newest set of packages
that fits, all of the card's memory free. Nothing is probed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from doctor.cards import Card, cards, find_card
from doctor.diagnosis import PATHS, Diagnosis
from doctor.facts import Driver, Facts, Gpu, Host, Probe, Toolkit
from doctor.install_sets import SETS, PackageSet, refusals
from doctor.memory import DEFAULT, Settled, completions, settle
from doctor.readings import system_gib
from doctor.shapes import Shape, shape_of
from doctor.speed import StepEstimate, step_estimate
from doctor.spread import Spread, arithmetic, spread

WIDTH = 80
DEFAULT_MODEL = "Qwen/Qwen3-4B"
# the oldest branch that every set here runs on, and Pascal's and Volta's last
DRIVER = Driver(version="580.159", cuda="13.0")
HELD_GIB = 0.4  # what a desktop or a container's other processes usually hold
RAM_GIB = 64.0
_CU130_ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_CU126_ARCHES = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


@dataclass(frozen=True)
class WhatIf:
    """One card's answer for one model. `settled`, `step`: None where nothing is open and fits, or the model is unknown."""

    card: Card
    count: int
    model: str
    shape: Shape | None
    packages: PackageSet
    diagnosis: Diagnosis
    settled: Settled | None
    step: StepEstimate | None
    spreads: tuple[Spread, ...] = ()  # of several cards: the same step spread over them, and one that grows with them

    def to_text(self) -> str:
        """The answer in 80 columns."""
        return "\n".join(_page(self))

    def to_json(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        return {
            "schema": 1,
            "card": _card_json(self.card),
            "count": self.count,
            "model": self.model,
            "assumed": list(_assumed(self)),
            "path": self.diagnosis.plan.path,
            "paths": {name: {"open": state.open, "fits": state.fits} for name, state in self.diagnosis.paths.items()},
            "memory": None if self.settled is None else _memory_json(self.settled),
            "micro_batch": self.settled and self.settled.micro_batch,
            "rollout_rows": self.settled and self.settled.rollout_rows,
            "seconds_per_step": None if self.step is None else _step_json(self.step),
            "several": [s.to_json() for s in self.spreads],
            "packages": self.packages.packages("linux"),
            "walls": [
                {"code": w.code, "closes": list(w.closes), "fact": w.fact} for w in self.diagnosis.walls if w.closes
            ],
        }


@dataclass(frozen=True)
class Comparison:
    """One model on every card of the table, fastest first; cards on which nothing fits come last."""

    model: str
    rows: tuple[WhatIf, ...]

    def to_text(self) -> str:
        """One table in 80 columns."""
        head = f"{'card':<29} {'path':<9} {'need':>5} {'have':>5} {'batch':>5} {'rows':>4} {'s/step':>6} range"
        lines = [
            *_wrap(f"{self.model} on one card each: {_completions()} a step, {_lengths()}"),
            *([] if self.rows[0].shape else _wrap(_unknown(self.model))),
            "",
            head,
        ]
        lines += ["-" * WIDTH, *(_row(answer) for answer in self.rows), ""]
        lines += _wrap(
            "Need and have in GiB; batch: completions in one backward pass; rows: generated at once; "
            "cpu: nothing fits the card."
        )
        errors = sorted({answer.step.error for answer in self.rows if answer.step})
        lines += _wrap(_how_wrong(*errors)) if errors else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The table as a JSON object: one answer a card."""
        return {"schema": 1, "model": self.model, "cards": [answer.to_json() for answer in self.rows]}


def answer(text: str, model: str | None = None) -> WhatIf | Comparison:
    """What the card `text` names ("RTX 4090", "8x H100") could do for `model`; `all`: every card. CardError if unknown."""
    wanted = model or DEFAULT_MODEL
    if text.strip().lower() == "all":
        rows = [_answer(card, 1, wanted) for card in cards()]
        return Comparison(wanted, tuple(sorted(rows, key=_slowness)))
    card, count = find_card(text)
    return _answer(card, count, wanted)


def assumed_facts(card: Card, count: int = 1) -> tuple[Facts, PackageSet]:
    """The facts of a machine with this card and the newest set that fits it. What needs trying out stays unknown."""
    bare = _facts(card, count, {}, ())
    chosen = next(s for s in SETS if s.key != "unsloth" and not list(refusals(s, bare)))
    arches: tuple[str, ...] = _CU126_ARCHES if chosen.build == "cu126" else _CU130_ARCHES
    if card.arch == "aarch64" and chosen.build == "cu130":
        arches = ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120")
    packages: dict[str, str | None] = {"vllm": "absent", "unsloth": "absent", **chosen.packages("linux")}
    packages["torch"] = f"{chosen.torch}+{chosen.build}" if chosen.build.startswith("cu") else chosen.torch
    return _facts(card, count, packages, arches), chosen


def _facts(card: Card, count: int, packages: dict[str, str | None], arches: tuple[str, ...]) -> Facts:
    gpu = Gpu(
        vendor="nvidia",
        name=card.name,
        compute_capability=card.capability,
        total_gib=card.usable_gib,
        free_gib=max(0.0, card.usable_gib - (0.1 * card.usable_gib if card.unified else HELD_GIB)),
        mig=False,
        unified_memory=card.unified,
    )
    shown = min(count, 8)
    driver = Driver(version="540.4", cuda="12.6") if card.capability == "8.7" else DRIVER  # JetPack 6
    return Facts(
        host=Host(
            "linux", card.arch, "assumed", "2.35", "3.12", card.usable_gib if card.unified else RAM_GIB, None, False
        ),
        gpus=tuple(Gpu(**{**vars(gpu), "index": index}) for index in range(shown)),
        driver=driver,
        toolkit=Toolkit(state="unknown"),
        packages=MappingProxyType(packages),
        probes=MappingProxyType({"torch_cuda": Probe(ok=True)}) if packages else MappingProxyType({}),
        torch_arch_list=arches or None,
    )


def _answer(card: Card, count: int, model: str) -> WhatIf:
    from doctor.plan import diagnose

    facts, chosen = assumed_facts(card, count)
    sizes = DEFAULT.on(facts)
    diagnosis = diagnose(facts, model, sizes)
    shape, path = shape_of(model), diagnosis.plan.path
    settled = step = None
    if shape is not None and path is not None:
        have = system_gib(facts) if path == "cpu" else (facts.gpus or (Gpu(),))[0].free_gib
        settled = settle(shape, path, have, sizes)
        if settled.fits and path != "cpu":
            step = step_estimate(
                shape, settled.setting, card, prompts=sizes.prompts_per_step, group_size=sizes.group_size
            )
    spreads: tuple[Spread, ...] = ()
    if shape is not None and path is not None and step is not None and count > 1:
        have = (facts.gpus or (Gpu(),))[0].free_gib
        steps = (sizes, replace(sizes, prompts_per_step=sizes.prompts_per_step * count))
        found = [spread(shape, path, have, card, count, step) for step in steps]
        spreads = tuple(s for s in found if s is not None)
    return WhatIf(card, count, model, shape, chosen, diagnosis, settled, step, spreads)


def _page(a: WhatIf) -> Iterator[str]:
    many = f"{a.count} x " if a.count > 1 else ""
    path = a.diagnosis.plan.path
    verdict = "nothing that fits" if path is None else "only the CPU" if path == "cpu" else path
    yield from _wrap(f"{many}{a.card.name}: {a.model} {'takes' if a.shape else 'would take'} {verdict}")
    if a.shape is None:
        yield from _wrap(_unknown(a.model))
    rate = f"{a.card.bf16_tflops:g} TFLOP/s" if a.card.bf16_tflops is not None else "rate not on its data sheet"
    yield from _wrap(
        f"compute capability {a.card.capability}, {a.card.memory_gb:g} GB ({a.card.usable_gib:g} GiB usable), "
        f"{a.card.bandwidth_gb_s:g} GB/s, {rate} ({a.card.source})"
    )
    yield ""
    yield from _wrap("Assumed: " + "; ".join(_assumed(a)))
    if a.settled is not None and path is not None:
        yield ""
        yield from _ledger(a.settled)
    if a.step is not None:
        yield ""
        yield from _step(a, a.step)
    closed = [w for w in a.diagnosis.walls if w.closes]
    if closed:
        yield ""
        yield "Closed paths:"
        for wall in closed:
            yield from _wrap(f"{', '.join(p for p in PATHS if p in wall.closes)}: {wall.fact} ({wall.code})", "- ")
    misfits = [p for p, state in a.diagnosis.paths.items() if state.open and state.fits is False]
    if misfits:
        yield ""
        yield from _wrap(f"Open, but without room for this model: {', '.join(misfits)}")


def _unknown(model: str) -> str:
    return (
        f"The size of {model} is not known: memory is not checked and no time is estimated; name a local folder, or a size "
        "like 7B"
    )


def _ledger(s: Settled) -> Iterator[str]:
    have = "" if s.have_gib is None else f", {s.have_gib:.1f} free"
    yield f"Memory in GiB: {s.need_gib:.1f} needed{have} (at the peak of the {s.phase})"
    for name, gib in s.ledger.items():
        yield f"  {name.replace('_', ' '):<18} {gib:6.2f}"
    again = "" if s.checkpointing else " without recomputing"
    sizes = f"{completions(s.micro_batch)} in a backward pass{again}, {s.rollout_rows} rows generated at once"
    yield from _wrap(f"{s.base} weights, {sizes}")


def _step(a: WhatIf, step: StepEstimate) -> Iterator[str]:
    yield from _wrap(
        f"About {_seconds(step.total_s)} a step ({_seconds(step.low_s)} to {_seconds(step.high_s)}): rollout "
        f"{_seconds(step.rollout_s)} at {step.tokens_per_s:,.0f} tokens/s, update {_seconds(step.update_s)}; "
        f"{_completions()}, {_lengths()}"
    )
    yield from _wrap(_how_wrong(step.error))
    for s in a.spreads:
        yield ""
        same = s.questions == DEFAULT.prompts_per_step
        yield "The same step on several cards:" if same else "A step that grows with the cards:"
        for line in arithmetic(a.card, s):
            yield from _wrap(line, "  ")


def _assumed(a: WhatIf) -> Iterator[str]:
    facts = a.diagnosis.facts
    yield f"Linux, Python {facts.host.python}, driver {facts.driver.version} (CUDA {facts.driver.cuda})"
    vllm = a.packages.pins.get("vllm")
    yield f"torch {a.packages.torch}" + (f" and vLLM {vllm}" if vllm else ", no vLLM") + f" (the {a.packages.key} set)"
    if facts.gpus and facts.gpus[0].free_gib is not None:
        yield f"{facts.gpus[0].free_gib:.1f} GiB of the card free"
    yield f"{facts.host.ram_gib:g} GiB of system memory"


def _how_wrong(error: float, *larger: float) -> str:
    rows = "".join(f", of {e:g} in the rows marked * (no data sheet gives the card's arithmetic rate)" for e in larger)
    return (
        f"Estimate, not a measurement: some constants are from one H200, the others are assumed, and every answer counts at "
        f"full length; take it as good to a factor of {error:g} either way{rows}."
    )


def _completions() -> str:
    return f"{DEFAULT.prompts_per_step} prompts x {DEFAULT.group_size} completions"


def _lengths() -> str:
    s = DEFAULT
    return f"prompts of {s.prompt_tokens} and answers of {s.completion_tokens} tokens, LoRA rank {s.lora_rank}"


def _row(a: WhatIf) -> str:
    path, s, step = a.diagnosis.plan.path, a.settled, a.step
    name = a.card.name.removeprefix("GeForce ")[:29]
    have = f"{(a.diagnosis.facts.gpus or (Gpu(),))[0].free_gib or 0:5.1f}"
    if step is None or s is None:
        return f"{name:<29} {path or 'no room':<9} {'':>5} {have}"
    unsure = "" if a.card.bf16_tflops is not None else " *"
    spread = f"{_short(step.low_s)}-{_short(step.high_s)}{unsure}"
    sizes = f"{s.need_gib:5.1f} {have} {s.micro_batch:>5} {s.rollout_rows:>4}"
    return f"{name:<29} {path:<9} {sizes} {_short(step.total_s):>6} {spread}"


def _slowness(a: WhatIf) -> tuple[bool, float, str]:
    return a.step is None, a.step.total_s if a.step else 0.0, a.card.name


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _seconds(seconds: float) -> str:
    return f"{_short(seconds)} s"


def _wrap(text: str, lead: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def _card_json(card: Card) -> dict[str, Any]:
    names = ("name", "capability", "memory_gb", "usable_gib", "bandwidth_gb_s", "bf16_tflops", "kind", "source")
    return {name: getattr(card, name) for name in names}


def _memory_json(s: Settled) -> dict[str, Any]:
    return {"need_gib": s.need_gib, "have_gib": s.have_gib, "fits": s.fits, "phase": s.phase, "ledger": dict(s.ledger)}


def _step_json(step: StepEstimate) -> dict[str, float]:
    return {
        "estimate": step.total_s,
        "low": step.low_s,
        "high": step.high_s,
        "rollout": step.rollout_s,
        "update": step.update_s,
        "rollout_tokens_per_s": step.tokens_per_s,
        "error_factor": step.error,
    }
