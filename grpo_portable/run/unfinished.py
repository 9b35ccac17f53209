"""Which run goes on where none is named: the newest that is not finished."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_portable.errors import GrpoPortableError, RunFolderError, wrapped
from grpo_portable.run import saved
from grpo_portable.run.folder import RUNS, RunFolder, open_run

# kinds of failure (`ladder.KINDS`) that come again until the user has put them right
REFUSALS = ("user", "reward", "import")


@dataclass(frozen=True)
class Taken:
    """The run that goes on. `told`: which and why, and what else was interrupted, as lines. `waiting`: those, newest first."""

    run: RunFolder
    told: str
    waiting: tuple[RunFolder, ...] = ()


def take(*, trains: bool) -> Taken:
    """The newest run that is not finished: one that was at work before one that never got there.

    Where all are finished, the newest. `trains` is False for evaluations: neither goes on with the other. RunFolderError
    where there is none.
    """
    runs = _runs(trains=trains)
    open_ = [run for run in runs if _is_open(run)]
    begun = [run for run in open_ if not _never_began(run)]
    taken, *others = begun or open_ or runs
    kind = "run" if trains else "evaluation"
    if not open_:
        return Taken(taken, f"every {kind} in {RUNS}/ is finished; the newest is {taken.path}")
    if not begun:
        why = f"going on with {taken.path}, whose start was refused; no other {kind} in {RUNS}/ was interrupted"
        return Taken(taken, "\n".join(wrapped(why, "  ")))
    told = wrapped(f"going on with {taken.path}, the newest that is not finished", "  ")
    if others:
        told += wrapped("interrupted too: " + ", ".join(f"`--out {run.word}`" for run in others), "  ")
    return Taken(taken, "\n".join(told), tuple(others))


def newest(*, trains: bool) -> RunFolder:
    """The newest training run, or the newest evaluation. RunFolderError where there is none."""
    return _runs(trains=trains)[0]


def _is_open(run: RunFolder) -> bool:
    """Whether something is left to do, also of a run whose files cannot be read: who goes on with it is told what is wrong."""
    try:
        return bool(saved.missing(run)) or not saved.is_reported(run)
    except GrpoPortableError:
        return True


def _never_began(run: RunFolder) -> bool:
    """Whether the run's start was refused: it stopped for what only the user can put right before it had made anything."""
    try:
        return run.read_json("failure.json").get("kind") in REFUSALS and not any(saved.made(run))
    except GrpoPortableError:
        return False


def _runs(*, trains: bool) -> list[RunFolder]:
    """The training runs, or the evaluations, newest first. RunFolderError where there is none."""
    files = sorted(RUNS.glob("*/recipe.yaml"), key=lambda f: f.stat().st_mtime, reverse=True)
    runs = [run for run in (open_run(f.parent) for f in files) if _trains(run) == trains]
    if not runs:
        kind = "run" if trains else "evaluation"
        raise RunFolderError(
            f"there is no {kind} to go on with", because="runs/ holds none", help="name its folder with --out"
        )
    return runs


def _trains(run: RunFolder) -> bool:
    """Whether a run trains; one whose task cannot be read counts as a training: an old one stands in nobody's way."""
    try:
        return run.trains()
    except GrpoPortableError:
        return True
