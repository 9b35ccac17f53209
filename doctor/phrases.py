"""The sentences that text, markdown and notebook share: verdict, paths, memory, facts in a few lines.

Every value is scrubbed on its way out, since a replayed facts file is somebody else's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from doctor import speed_cpu
from doctor.diagnosis import GPU_PATHS, PATHS, About, Diagnosis, Help, Wall
from doctor.facts import ABSENT, Facts, Gpu, Probe
from doctor.privacy import scrub
from doctor.readings import cards

_BASE = {None: "16-bit base + LoRA", "fp8": "16-bit base + LoRA, FP8 copy for rollouts", "nf4": "4-bit NF4 base + LoRA"}
_ENGINE = {"vllm": "vLLM", "portable": "the portable engine"}


def verdict(d: Diagnosis) -> str:
    """One sentence: the path chosen, for what and on what; or that none is open or none has room.

    Of a model of unknown size it is not said that it runs.
    """
    plan = d.plan
    if plan.path is not None:
        if plan.model and plan.memory is None:
            unknown = f"the size of {scrub(plan.model)} is not known, so memory is not checked"
            return f"{plan.path}: would be taken {place(d)}; {unknown}"
        slow = any(wall.code == "MODEL-CPU" for wall in d.walls)
        does = "would run on the CPU for days to weeks" if slow else f"runs {place(d)}"
        return f"{plan.path}: {scrub(plan.model) if plan.model else 'training'} {does}"
    if any(state.open for state in d.paths.values()):
        what = scrub(plan.model) if plan.model else "the model"
        return f"no room: paths are open, but {what} fits into the free memory of none"
    return "no path is open on this machine as it is"


def place(d: Diagnosis) -> str:
    """Where the plan runs: `on NVIDIA L4 (21.9 GiB free)`, `on 2 x ...`, `on the CPU`."""
    chosen = [card.gpu for card in cards(d.facts) or () if card.index in d.plan.gpus]
    if d.plan.path == "cpu":
        return "on the CPU"
    if not chosen:
        return "on a GPU of which nothing is known"
    name, free = scrub(chosen[0].name or "the GPU"), chosen[0].free_gib
    room = f" ({free:.1f} GiB free)" if free is not None else ""
    return f"on {name}{room}" if len(chosen) == 1 else f"on {len(chosen)} cards, first {name}{room}"


def how(d: Diagnosis) -> str | None:
    """The plan in words: base, adapter, compute type, engine."""
    plan = d.plan
    if plan.path is None:
        return None
    base = _BASE.get(plan.quantization, scrub(str(plan.quantization)))
    if plan.dtype == "float32" and plan.quantization is None:
        base = "32-bit base + LoRA"
    engine = _ENGINE.get(plan.engine or "", scrub(plan.engine or "an engine"))
    return f"{base}, computes in {plan.dtype or 'an unknown type'}, rollouts by {engine}"


def memory(d: Diagnosis) -> str | None:
    """Need and have, and the parts largest first, in one sentence."""
    m = d.plan.memory
    if m is None or m.need_gib is None:
        return None
    parts = sorted(((k, v) for k, v in m.ledger.items() if v >= 0.05), key=lambda kv: -kv[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in parts)
    have = f" of {m.have_gib:.1f}" if m.have_gib is not None else ""
    return f"needs {m.need_gib:.1f}{have} GiB" + (f": {listed}" if listed else "")


def batch(d: Diagnosis) -> str | None:
    """Micro-batch and rollout rows, where the plan settled them."""
    plan = d.plan
    parts = []
    if plan.micro_batch:
        parts.append(f"{plan.micro_batch} completion{'s' * (plan.micro_batch > 1)} in a backward pass")
    if plan.rollout_rows:
        parts.append(f"{plan.rollout_rows} generated at once")
    return ", ".join(parts) or None


def path_rows(d: Diagnosis) -> list[tuple[str, str, str]]:
    """(path, state, why) for each path, best first."""
    rows = []
    for name in (*(p for p in PATHS if p in d.paths), *(p for p in d.paths if p not in PATHS)):
        state = d.paths[name]
        if not state.open:
            rows.append((name, "closed", ", ".join(state.walls)))
        elif name == d.plan.path:
            rows.append((name, "chosen", ""))
        else:
            rows.append((name, "open", "does not fit into memory" if state.fits is False else ""))
    return rows


def closed_by(d: Diagnosis) -> list[str]:
    """`GPU-NONE closes fp8-vllm, ...` for each set of walls that closes something, paths together."""
    paths: dict[str, list[str]] = {}
    for name, state, why in path_rows(d):
        if state == "closed":
            paths.setdefault(why or "an unnamed wall", []).append(name)
    return [f"{why}: {_named(names)}" for why, names in paths.items()]


def _named(paths: Iterable[str]) -> str:
    """`every path`, `every GPU path` or the paths by name."""
    names = list(paths)
    if set(names) >= set(PATHS):
        return "every path"
    return "every GPU path" if set(names) == set(GPU_PATHS) else ", ".join(names)


def better_walls(d: Diagnosis) -> tuple[list[Wall], list[Wall], list[Wall]]:
    """Walls that close a path better than the chosen one, walls that close only others, and warnings."""
    paths = list(PATHS)
    rank = paths.index(d.plan.path) if d.plan.path in paths else len(paths)
    better = set(paths[:rank])
    closing = [w for w in d.walls if w.closes]
    above = [w for w in closing if better & set(w.closes)]
    return above, [w for w in closing if w not in above], [w for w in d.walls if not w.closes]


def passed_over(d: Diagnosis) -> bool:
    """Whether a better path than the chosen one is open all the same (no room, a refused start): then warnings explain."""
    rank = PATHS.index(d.plan.path) if d.plan.path in PATHS else len(PATHS)
    return any(p in d.paths and d.paths[p].open for p in PATHS[:rank])


def further_reasons(d: Diagnosis) -> list[str]:
    """The plan's reasons but those that the verdict, the memory line or a wall on the same page already give."""
    said, told = (About.CHOICE, About.MEMORY, About.PROMISE), {w.code for w in d.walls}
    return [reason.text for reason in d.plan.reasons if reason.about not in said and reason.wall not in told]


def closes(wall: Wall) -> str:
    """`every path`, `every GPU path` or the paths by name."""
    return _named(wall.closes)


def help_text(help: Help) -> str:
    """The help with its confidence, unless that is certain."""
    text = help.text.strip()
    return text if help.confidence == "certain" else f"{text} ({help.confidence})"


def after(d: Diagnosis) -> str | None:
    """What the machine becomes, when the helps would change it."""
    if d.after_fix is None or d.after_fix == d.plan.path:
        return None
    return f"Then this machine can take {d.after_fix}."


def fact_lines(facts: Facts) -> list[str]:
    """The machine in a few lines, fit for a bug report."""
    lines = [_host_line(facts), *map(_gpu_line, facts.gpus or ())]
    if facts.gpus is None:
        lines.append("GPU: nobody could say")
    elif not facts.gpus:
        lines.append("GPU: none")
        if (rates := speed_cpu.rates(facts)) is not None:
            lines.append(f"CPU: torch reaches {rates.gflops:.0f} Gflop/s in float32 and reads {rates.gb_s:.0f} GB/s")
    lines += [_driver_line(facts), *_package_lines(facts), *_probe_lines(facts), *_holder_lines(facts)]
    lines.append("; ".join(f"{k}={v}" for k, v in facts.env.items() if v is not None))
    return [scrub(line, None) for line in lines if line]


def _known(parts: Iterable[str | None]) -> str:
    return ", ".join(p for p in parts if p)


def _host_line(facts: Facts) -> str:
    h = facts.host
    return _known(
        [
            " ".join(p for p in (h.platform, h.arch) if p),
            h.os,
            f"glibc {h.glibc}" if h.glibc else None,
            f"Python {h.python}" if h.python else None,
            _ram(h.ram_gib, h.free_gib),
            f"/dev/shm {h.shm_gib:{'.0f' if h.shm_gib >= 10 else '.2g'}} GiB" if h.shm_gib is not None else None,
            "in a container" if h.container else None,
        ]
    )


def _ram(total: float | None, free: float | None) -> str | None:
    if total is None:
        return None
    return f"RAM {total:.0f} GiB" + ("" if free is None else f" ({free:.0f} free)")


def _gpu_line(gpu: Gpu) -> str:
    free, total = gpu.free_gib, gpu.total_gib
    return f"GPU {gpu.index if gpu.index is not None else '?'}: " + _known(
        [
            gpu.name or gpu.vendor or "unknown",
            gpu.compute_capability or gpu.gfx,
            f"{free:.1f} of {total:.1f} GiB free" if free is not None and total is not None else "memory unknown",
            "MIG slice" if gpu.mig else None,
            "unified memory" if gpu.unified_memory else None,
        ]
    )


def _driver_line(facts: Facts) -> str:
    d, t = facts.driver, facts.toolkit
    driver = f"driver {d.version}" if d.version else "driver unknown" if facts.gpus else None
    nvcc = {
        "absent": "no nvcc",
        "present": f"nvcc {t.nvcc or 'of unknown version'}" + (f" ({t.where})" if t.where else ""),
    }.get(t.state or "")
    return _known([driver, f"CUDA {d.cuda}" if d.cuda else None, nvcc])


def _package_lines(facts: Facts) -> list[str]:
    there = [f"{n} {v}" for n, v in facts.packages.items() if v not in (None, ABSENT)]
    gone = [n for n, v in facts.packages.items() if v == ABSENT]
    lines = [", ".join(there)] if there else []
    return [*lines, "not installed: " + ", ".join(gone)] if gone else lines


def _probe_lines(facts: Facts) -> list[str]:
    tried = {n: p for n, p in facts.probes.items() if p.ok is not None}
    if facts.gpus == () and not facts.extra.get("torch_import"):
        tried.pop("torch_cuda", None)  # without a card there is nothing that CUDA could fail at
    good = [n for n, p in tried.items() if p.ok]
    lines = ["works: " + ", ".join(good)] if good else []
    return lines + [f"fails: {n}: {p.error or 'no message'}" for n, p in tried.items() if not p.ok]


def _holder_lines(facts: Facts) -> list[str]:
    lines = []
    for holder in _rows(facts.extra.get("memory_holders"))[:4]:
        gib = holder.get("gib")
        size = f"{gib:.1f} GiB" if isinstance(gib, (int, float)) else "an unknown part"
        lines.append(f"GPU {holder.get('gpu')}: {holder.get('name')} holds {size}")
    return lines


def _rows(raw: Any) -> list[Mapping[str, Any]]:
    return [r for r in raw if isinstance(r, Mapping)] if isinstance(raw, (list, tuple)) else []


def all_facts(facts: Facts) -> list[tuple[str, str]]:
    """(key, value with source or reason) for everything known of the machine, for -v."""
    sources, unknown = (_texts(facts.extra.get(k)) for k in ("sources", "unknown"))
    rows: list[tuple[str, str]] = []

    def add(key: str, value: Any) -> None:
        section = key.split(".")[0]
        if value is None:
            why = unknown.get(key) or unknown.get(section)
            rows.append((key, f"unknown, because {why}" if why else "unknown"))
        else:
            where = sources.get(key) or (sources.get(section) if section != "host" else None)
            rows.append((key, f"{_shown(value)} [{where}]" if where else _shown(value)))

    for section in ("host", "driver", "toolkit"):
        for name, value in vars(getattr(facts, section)).items():
            add(f"{section}.{name}", value)
    for i, gpu in enumerate(facts.gpus or ()):
        for name, value in vars(gpu).items():
            if value is not None:
                add(f"gpus[{i}].{name}", value)
    for section, values in (("packages", facts.packages), ("env", facts.env)):
        for name, value in values.items():
            add(f"{section}.{name}", "unset" if section == "env" and value is None else value)
    for name, probe in facts.probes.items():
        add(f"probes.{name}", _probe_text(probe))
    add("torch_arch_list", " ".join(facts.torch_arch_list) if facts.torch_arch_list is not None else None)
    for key, value in facts.extra.items():
        if key not in ("sources", "unknown"):
            rows += _extra_rows(key, value)
    shown = {key for key, _ in rows}
    rows += [(key, f"unknown, because {why}") for key, why in unknown.items() if key not in shown]
    return [(scrub(k), scrub(v)) for k, v in rows]


def _extra_rows(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(f"{key}.{k}", _shown(v)) for k, v in value.items() if v not in (None, [], {})]
    return [(key, _shown(value))]


def _texts(raw: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in raw.items()} if isinstance(raw, Mapping) else {}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(_shown(v) for v in value)
    return str(value)


def _probe_text(probe: Probe) -> str | None:
    if probe.ok is None:
        return None
    return "works" if probe.ok else f"fails: {probe.error or 'no message'}"
