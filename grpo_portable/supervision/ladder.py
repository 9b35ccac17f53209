"""How a worker ended, and where the run goes on: two pure functions, no process is touched here.

A rung is a path with the two sizes that memory decides, the backend, and the GPUs it runs on, one process each. Below a
backend that is not the project's own lies the same path without it. Groups stay whole on every rung: an out-of-memory error
halves the micro-batch (same groups, same denominator, same gradient up to rounding) or the number of rows generated at once,
before the path is given up. Of several GPUs, those that fail are left out before the path is. A user's mistake is never
retried.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from doctor.diagnosis import CPU_PARAMETERS_LIMIT, PATHS
from doctor.memory import largest_divisor
from doctor.spread import most_sharing
from grpo_portable.errors import brief
from grpo_portable.supervision.phase import LEARNS, SAMPLES, Doing, Phase

# exit codes of the worker, one a cause (`worker.py` uses them, `classify` reads them)
EXIT = {
    "user": 2,
    "oom": 10,
    "engine": 11,
    "nonfinite": 12,
    "reward": 13,
    "disk": 14,
    "collective": 15,  # the processes of a run lost each other: NCCL, gloo, or one of them is gone
    "interrupted": 130,
}
KINDS = ("done", *EXIT, "import", "killed", "hang", "crash")
MOST_ROW_CUT = 16  # rows generated at once are halved to this part; with fewer a lower path is the faster one
SAME_CODE = "vLLM's own code is broken, and every path of vLLM loads it"  # why a path is not even tried


@dataclass(frozen=True)
class Rung:
    """`gpus`: by the doctor's index, one process each; () leaves the one to use to CUDA. `processes`: as many as GPUs."""

    path: str
    micro_batch: int
    rollout_rows: int
    backend: str = "plain"  # plain | server | unsloth
    gpus: tuple[int, ...] = ()
    processes: int = 1


def shown(path: str, backend: str) -> str:
    """What ran, in a word: the path, and the backend where it is not the project's own."""
    return path if backend == "plain" else f"{path} ({backend})"


@dataclass(frozen=True)
class Ending:
    """How a worker ended: `kind` of KINDS, what it was doing, the original error text, and of several its rank."""

    kind: str
    doing: Doing
    error: str
    rank: int | None = None


@dataclass(frozen=True)
class Step:
    """The decision after an ending: the next rung (None: stop here) and why.

    `passed`: the open paths between the two that were left out, each with its reason.
    """

    rung: Rung | None
    reason: str
    passed: Mapping[str, str] = field(default_factory=dict)


OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: can't allocate|Cannot allocate memory"
    r"|std::bad_alloc|No available memory for the cache blocks",
    re.I,
)
DISK = re.compile(r"No space left on device|Disk quota exceeded|File too large \(os error|Errno (?:28|122|27)\b", re.I)
# the worker's last words, for when the disk has no room for failure.json
_TOLD = re.compile(rf"^worker: ({'|'.join(KINDS)}): (.*)$", re.M)
GPU_ERROR = re.compile(r"CUDA error|NCCL error", re.I)
_IMPORT = re.compile(r"^(?:ModuleNotFoundError|ImportError): ")
_BROKEN_CODE = re.compile(
    r"vLLM could not start: .*(ImportError|ModuleNotFoundError|AttributeError|NameError|undefined symbol)"
)
_ENDED = {"killed": "the worker was killed", "crash": "the worker crashed", "hang": "the worker hung"}
_SIGNAL = re.compile(r"died with <Signals\.(SIG\w+)")  # accelerate's words for a worker ended by a signal
# the line of `ranks.py` on the first of several processes to fail
_FIRST = re.compile(r"^rank (\d+) (?:died with <Signals\.(SIG\w+)|returned non-zero exit status (\d+))", re.M)
_FOLLOWS = ("interrupted", "collective", "crash")  # how a process may end because another one did
COLLECTIVE = re.compile(
    r"NCCL|ProcessGroup|DistBackendError|DistNetworkError|DistStoreError|gloo|Connection (?:closed|reset) by peer"
    r"|Watchdog caught collective|Broken pipe",
    re.I,
)
_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?!.*accelerate|.*Command '\[).*$", re.M)
# C++ ends a process by SIGABRT and says on its last lines what was thrown
_THROWN = re.compile(r"^terminate called after throwing an instance of .*$(?:\n\s+what\(\):.*$)?", re.M)
ENGINES = ("vllm", "flashinfer", "unsloth")  # how their modules' names begin, also of what Unsloth writes itself
_ENGINE = re.compile(
    "|".join((*ENGINES, "EngineCore", "get_dummy_lora_warmup_rank", "align_completion_tool_mask", GPU_ERROR.pattern)),
    re.I,
)
# Which kind counts where an error could be of two, for `failure.kind_of` as for words: what cannot be imported on a path
# without an engine is needed below it as well, whatever its name.
ORDER = ("disk", "oom", "collective", "import", "engine")
_WORDS = {"disk": DISK, "oom": OUT_OF_MEMORY, "import": _IMPORT, "engine": _ENGINE}
_PLACE = re.compile(r"\S*[/\\]\S*")  # a folder may be called anything


def classify(
    returncode: int,
    failure: Mapping[str, Any],
    log_tail: str,
    doing: Doing,
    hung: bool = False,
    *,
    processes: int = 1,
    silent: int = 0,
) -> Ending:
    """The ending of a worker from its exit status, the failure it wrote (may be empty), and the end of its log.

    What the worker says of itself counts (`failure.kind_of`), and is not looked for in words: accelerate's launcher exits
    with 1 whatever its worker's code was, and a log holds warnings. Only of one that could say nothing its last error is read.
    Of several `processes` the first to fail counts, whatever the others died of; `silent` is the rank that hung.
    """
    if processes > 1:
        return _of_several(returncode, failure, log_tail, doing, silent if hung else None)
    doing = Doing.told(failure) if "phase" in failure else doing
    error = str(failure.get("fact") or _error_line(log_tail) or f"exit status {returncode}")
    if hung:
        return Ending("hang", doing, f"no sign of life while {doing}")
    if returncode == 0:
        return Ending("done", doing, "")
    by_code = {code: kind for kind, code in EXIT.items()}
    if told := failure.get("kind") if failure.get("kind") in KINDS else by_code.get(returncode):
        return Ending(str(told), doing, error)
    if signal := _ended_by(returncode, log_tail):  # nobody has last words who was killed
        thrown = _THROWN.findall(log_tail) if signal == "SIGABRT" else []
        if thrown and OUT_OF_MEMORY.search(thrown[-1]):
            return Ending("oom", doing, " ".join(thrown[-1].split()))
        return Ending("killed", doing, f"the worker was ended by {signal}")
    if not failure and (words := _TOLD.findall(log_tail)):
        kind, error = words[-1]
        return Ending(kind, doing, error)
    return Ending(_kind_of_words(error), doing, error)


def _kind_of_words(error: str) -> str:
    """What kind of ending an error's own line speaks of; places in it are passed over."""
    said = _PLACE.sub("", error)
    return next((kind for kind in ORDER if kind in _WORDS and _WORDS[kind].search(said)), "crash")


def _of_several(returncode: int, failure: Mapping[str, Any], log_tail: str, doing: Doing, silent: int | None) -> Ending:
    """As `classify`: the rank that hung, else one that told why it failed, else one that was killed, else the first to go."""
    if silent is not None:
        return replace(classify(returncode, {}, log_tail, doing, True), rank=silent)
    if returncode == 0:
        return Ending("done", doing, "")
    first = _FIRST.search(log_tail)
    if first and first[2] and (not failure or failure.get("kind") in _FOLLOWS):
        return Ending("killed", doing, f"the process of rank {first[1]} was ended by {first[2]}", int(first[1]))
    code = int(first[3]) if first and first[3] else returncode
    told = failure.get("rank", first[1] if first else None)
    ending = classify(code, failure, log_tail, doing)
    return ending if told is None else replace(ending, rank=int(told), error=f"rank {told}: {ending.error}")


def next_step(
    rung: Rung,
    ending: Ending,
    rungs: Sequence[str],
    retries: int,
    first: Rung | None = None,
    step: tuple[int, int] = (1, 1),
    spread: bool = False,
) -> Step:
    """The rung to go on with. `rungs`: open paths, best first. `retries`: times this rung was restarted without progress.

    `first`: the rung the run began on. A lower path begins with its sizes again: one that was halved for a path with less
    room would only make the next one slow. GPUs that were left out stay out. `step`: its questions, and completions of each.
    `spread`: the weights lie in parts on all these GPUs, so that neither fewer of them nor another engine is a way on.
    """
    first = first or rung
    if ending.kind in ("user", "reward", "disk", "interrupted", "done"):
        return Step(None, f"{ending.kind}: a lower path would not change it")
    if ending.kind == "hang" and ending.doing.phase is Phase.REWARDS:
        return Step(None, "a reward does not return: a lower path would not change it")
    if ending.kind == "import" and rung.backend == "plain" and not rung.path.endswith("-vllm"):
        return Step(None, "a package the lower paths need as well cannot be imported")
    if ending.kind == "oom":
        smaller = _smaller(rung, ending.doing.phase, first)
        if smaller is not None:
            return Step(smaller, f"out of memory while {ending.doing}: {_change(rung, smaller)}, groups stay whole")
    if ending.kind in ("killed", "crash", "hang") and retries == 0 and not rung.path.endswith("-vllm"):
        return Step(rung, f"{_ENDED[ending.kind]} ({ending.doing}); one more try on the same path")
    if spread:
        return Step(None, "weights in parts need all their GPUs, and a server to sample from")
    if ending.kind in ("killed", "crash", "hang", "collective") and rung.processes > 1:
        fewer = _fewer(rung, ending, step)
        return Step(fewer, f"{_what_failed(ending)}; {_change(rung, fewer)}, groups stay whole")
    kept = replace(first, backend="plain", gpus=rung.gpus, processes=rung.processes)
    if rung.backend != "plain":
        return Step(shared(replace(kept, path=rung.path), step), _failed(f"the {rung.backend} backend", ending))
    open_below = [p for p in rungs if PATHS.index(p) > PATHS.index(rung.path)]
    passed = {p: SAME_CODE for p in open_below if p.endswith("-vllm")} if _same_code(ending) else {}
    below = next((p for p in open_below if p not in passed), None)
    if below is None:
        return Step(None, f"no path is open below {rung.path}")
    lower = replace(kept, path=below) if below != PATHS[-1] else replace(kept, path=below, gpus=(), processes=1)
    return Step(shared(lower, step), _failed(rung.path, ending), passed)


def _failed(what: str, ending: Ending) -> str:
    return f"{what} failed ({ending.doing}): {ending.error}"


def _what_failed(ending: Ending) -> str:
    told = "the processes lost each other" if ending.kind == "collective" else _ENDED[ending.kind]
    return f"{told} ({ending.error})"


def _fewer(rung: Rung, ending: Ending, step: tuple[int, int]) -> Rung:
    """The rung without the GPU of the rank that was killed or hung; one GPU where any of them may be to blame."""
    left, count = rung.gpus, 1
    if ending.rank is not None and ending.kind in ("killed", "hang"):
        left = tuple(gpu for rank, gpu in enumerate(rung.gpus) if rank != ending.rank)
        count = most_sharing(rung.processes - 1, step[0])
    return shared(replace(rung, gpus=left[:count], processes=count), step)


def shared(rung: Rung, step: tuple[int, int]) -> Rung:
    """The rung with a micro-batch that divides what one process has of a step."""
    completions = step[0] * step[1] // rung.processes
    return replace(rung, micro_batch=math.gcd(rung.micro_batch, completions)) if step != (1, 1) else rung


def rungs_from_answer(answer: Mapping[str, Any], start: str, parameters: int | None) -> tuple[str, ...]:
    """Open paths from `start` downwards, best first, from the doctor's JSON answer; the CPU only for a model it can serve."""
    paths = answer.get("paths") or {}
    tail = PATHS[PATHS.index(start) :]
    is_open = [
        p
        for p in tail
        if p == start or ((paths.get(p) or {}).get("open") and (paths.get(p) or {}).get("fits") is not False)
    ]
    too_big = parameters is not None and parameters > CPU_PARAMETERS_LIMIT
    return tuple(p for p in is_open if p == start or p != "cpu" or not too_big)


def _same_code(ending: Ending) -> bool:
    """Whether vLLM broke on its own code, which its other number formats load as well."""
    return ending.kind in ("engine", "import") and bool(_BROKEN_CODE.search(ending.error))


def _smaller(rung: Rung, phase: Phase, first: Rung) -> Rung | None:
    """The rung with less of what ran out of memory; None where neither number would have helped, as in loading a model."""
    if phase in SAMPLES:
        least = max(1, first.rollout_rows // MOST_ROW_CUT)
        return replace(rung, rollout_rows=rung.rollout_rows // 2) if rung.rollout_rows > least else None
    if phase in LEARNS and rung.micro_batch > 1:
        # accumulation then grows by a whole factor, and the step holds the same completions
        return replace(rung, micro_batch=largest_divisor(rung.micro_batch, rung.micro_batch // 2))
    return None


def _change(old: Rung, new: Rung) -> str:
    if new.processes != old.processes:
        what = "GPUs" if old.gpus else "processes"
        named = f" ({', '.join(map(str, new.gpus))})" if new.gpus else ""
        return f"{what} {old.processes} → {new.processes}{named}"
    if new.micro_batch != old.micro_batch:
        return f"micro-batch {old.micro_batch} → {new.micro_batch}"
    return f"rows generated at once {old.rollout_rows} → {new.rollout_rows}"


def _ended_by(returncode: int, log_tail: str) -> str | None:
    if named := _SIGNAL.search(log_tail):
        return named[1]
    number = -returncode if returncode < 0 else returncode - 128
    return signal.Signals(number).name if number in (4, 6, 7, 8, 9, 11, 15) else None


def _error_line(text: str) -> str:
    """The last line that names an exception, the launcher's own apart; else the last line."""
    found = _ERROR_LINE.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return brief(found[-1] if found else lines[-1] if lines else "")
