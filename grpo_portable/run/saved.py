"""Whether a saved adapter is whole, what a run has made so far, and what it has still to make. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_portable.run import manifest
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.run.forms import read

_LENGTH_BYTES = 8  # of a safetensors file, before its header: how long that is


def is_whole(folder: Path) -> bool:
    """Whether what `models.policy.save` wrote into `folder` can be read: its configuration, and weights as they were saved."""
    configurations = [file for file in folder.glob("*.json") if file.name != manifest.NAME]
    try:
        whole = all(read(file.read_bytes()) for file in configurations)
    except (OSError, ValueError):
        return False
    return any(folder.glob("*.safetensors")) and bool(configurations) and whole and torn(folder) is None


def torn(folder: Path) -> Path | None:
    """The first file in `folder`, of weights or an adapter's configuration, that is gone, cut or not as it was saved, or None.

    By the manifest `models.policy.save` leaves; where nothing is written down, weights have at least the length their headers
    say, and a configuration can be read.
    """
    known = manifest.known(folder)
    files = {*folder.glob("*.safetensors"), *folder.glob(manifest.CONFIGURATION)}
    files |= {folder / name for name in known if name.endswith((".safetensors", manifest.CONFIGURATION))}
    return next((file for file in sorted(files) if not _as_saved(file, known.get(file.name))), None)


def _as_saved(file: Path, known: Any) -> bool:
    try:
        readable = manifest.fingerprint(file) if file.name == manifest.CONFIGURATION else _has_its_length(file)
        return bool(readable) and (known is None or known == manifest.fingerprint(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_trained(run: RunFolder) -> bool:
    """Whether its steps are all made, since its adapter was saved; something may have torn that since."""
    return run.adapter.is_dir()


def adapter_fault(run: RunFolder) -> str | None:
    """Why what a run has trained cannot be used, None where it can."""
    if not is_trained(run):
        return "it has no adapter yet"
    return None if is_whole(run.adapter) else "its adapter is torn"


def made(run: RunFolder) -> tuple[int, ...]:
    """What the run has so far: steps, answers, steps of the bootstrap, whole stages."""
    answers = sum(1 for file in (run.path / "generations").glob("*.jsonl") for _ in read_lines(file))
    taught = max(
        (int(f.name[5:]) for f in run.bootstrap_checkpoints.glob("step-*") if f.name[5:].isdecimal()), default=0
    )
    whole = sum(folder.is_dir() for folder in (run.bootstrapped, run.adapter))
    return steps_done(run), answers, taught, whole


def steps_done(run: RunFolder) -> int:
    """The last optimizer step that has its line in metrics.jsonl, 0 before the first."""
    return max((m["step"] for m in read_lines(run.metrics_file)), default=0)


def missing(run: RunFolder) -> tuple[str, ...]:
    """What a run has still to make, in words; () where nothing is left to do.

    That is when every stage has its answers and, of a run that trains, the adapter is whole. Never of a run that does not
    say how many questions it asks.
    """
    trains, samples = run.trains(), run.recipe().eval_samples
    fault = adapter_fault(run) if trains else None
    questions = ((run.read_json("run.json").get("data") or {}).get("eval") or {}).get("used")
    if not isinstance(questions, int):
        return (*filter(None, [fault]), "it does not say how many questions it asks")
    stages = _trained(run) if trains else _asked(run.read_json("task.json"))
    wanted = dict.fromkeys(stages, questions)
    wanted |= {f"{stage}-sampled": questions * samples for stage in stages if samples}
    found = {stage: _answers(run, stage) for stage in wanted}
    short = [
        f"{stage} has {found[stage]} of {count} answers" for stage, count in wanted.items() if found[stage] < count
    ]
    return (*filter(None, [fault]), *short)


def is_reported(run: RunFolder) -> bool:
    """Whether its report is written, and no answer is newer: a worker whose command was killed ends without one."""
    report, answers = run.path / "report.md", (run.path / "generations").glob("*.jsonl*")
    return report.is_file() and all(file.stat().st_mtime <= report.stat().st_mtime for file in answers)


def _trained(run: RunFolder) -> tuple[str, ...]:
    """The stages of a run that trains. A bootstrap that is lost once the run is trained is not made again, nor its answers."""
    lost = is_whole(run.adapter) and not is_whole(run.bootstrapped)
    return ("base", "bootstrap", "tuned") if run.recipe().bootstrap_epochs and not lost else ("base", "tuned")


def _asked(task: Mapping[str, Any]) -> tuple[str, ...]:
    """The stages of a run that only evaluates."""
    if not task.get("adapter"):
        return ("base",)
    return ("base", "tuned") if task.get("base_too") else ("tuned",)


def _answers(run: RunFolder, stage: str) -> int:
    return len({(r["id"], r.get("sample", 0)) for r in read_lines(run.generations(stage))})


def _has_its_length(weights: Path) -> bool:
    with weights.open("rb") as file:
        header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        size = weights.stat().st_size - _LENGTH_BYTES - header
        if size < 0:
            return False
        tensors = read(file.read(header))
    return size == max((t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"), default=0)
