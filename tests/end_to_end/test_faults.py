"""Faults of every kind in a run under the real supervisor: what ended, where it went on, and that nothing is lost.

The table of `docs/faults.md` is what these tests saw: each compares its row with the page. Written anew by
`FAULTS=write pytest tests/end_to_end/test_faults.py`, with `-n` too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty
import pytest
import several
import tiny
import torch
from fault_table import FAULTS, Fault, in_step
from faulty import Watched, kill, lost, new_run, outcome, recipe, supervised

from grpo_portable.errors import UsageError
from grpo_portable.report import paths, setting
from grpo_portable.run.folder import RunFolder, read_lines
from grpo_portable.training import checkpoint, trainer

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


@pytest.fixture(scope="module")
def inputs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and questions, good ones and others."""
    folder = tmp_path_factory.mktemp("more") / "inputs"
    shutil.copytree(inputs, folder)
    tiny.save(folder / "wide", initializer_range=0.3)
    shutil.copytree(folder / "model", folder / "torn")
    weights = folder / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    shutil.copytree(folder / "sums", folder / "broken")
    file = folder / "broken" / "train.jsonl"
    rows = file.read_text().splitlines()
    rows[2:2] = ['{"question": "1 plus', json.dumps({"question": "What?", "answer": "#### many"})]
    file.write_text("\n".join(rows) + "\n")
    return folder


def made_recipe(inputs: Path, fault: Fault) -> Any:
    changes = {"path": fault.path, "steps": 5, **fault.changes}
    for key in ("data", "model"):
        if key in changes:
            changes[key] = str(inputs / changes[key])
    return recipe(inputs, **changes)


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Fault], RunFolder]:
    """The run of a fault's recipe without the fault."""
    known: dict[str, RunFolder] = {}

    def of(fault: Fault) -> RunFolder:
        wanted = replace(made_recipe(inputs, fault), path="cpu", chat_template="auto", model=str(inputs / "model"))
        if repr(wanted) not in known:
            made = new_run(tmp_path_factory.mktemp("undisturbed") / "run", wanted)
            assert supervised(made).told is None, (made.path / "worker.log").read_text()
            known[repr(wanted)] = made
        return known[repr(wanted)]

    return of


def place(tmp_path: Path, name: str) -> Any:
    """Where the run goes; a full disk is a real one."""
    return faulty.small_disk(tmp_path / "disk") if name == "the disk is full" else contextlib.nullcontext()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_loses_nothing(
    name: str, inputs: Path, undisturbed: Callable[[Fault], RunFolder], tmp_path: Path
) -> None:
    fault = FAULTS[name]
    with place(tmp_path, name):
        made = new_run(tmp_path / "disk" / "run", made_recipe(inputs, fault))
        seen = supervised(made, fault.put_in, every_time=fault.always, limits=fault.limits)
        stopped = seen.told
        if fault.stops:
            assert stopped is not None, seen.log
            fault.repair(made)
            faulty.until_free(made)
            supervised(made, watched=seen)
        assert seen.told is None, f"{seen.told}\n{seen.log}"
        assert tuple(ending.kind for ending in seen.endings) == (*fault.kinds, "done"), seen.log
        assert lost(made) == []
        assert seen.steps_made_again == fault.again, seen.log
        told = " ".join(f"{e['message']} {e.get('error') or ''}" for e in seen.events_of_all()) + f" {stopped}"
        assert fault.says in told
        check_report(seen)
        if fault.same:
            check_same(made, undisturbed(fault), fault.same)
        on_the_page(name, row(name, fault, seen))


def check_report(seen: Watched) -> None:
    """Every way down stands in the report, with the error's own words."""
    text = "\n".join(setting.events(list(read_lines(seen.run.events_file)))).replace("\\", "")
    for event in seen.events("retry", "fallback"):
        assert event["to"] in text
        assert event["error"][:20] in text or event["message"][:60] in text
    warned = paths.warning(seen.run.read_json("run.json"), {"against": "base"})
    # the path was changed after the base had been asked, and before the tuned was
    changed = any(e["from"] != e["to"] and e["step"] for e in seen.events("fallback"))
    assert (warned is not None) == changed


def check_same(made: RunFolder, other: RunFolder, how: str) -> None:
    ours, theirs = outcome(made), outcome(other)
    if how == "bits":
        assert ours == theirs
        return
    assert [m["reward"] for m in ours["metrics"]] == [m["reward"] for m in theirs["metrics"]]
    assert ours["generations"] == theirs["generations"]
    for key in ("grad_norm", "loss"):
        assert [m[key] for m in ours["metrics"]] == pytest.approx(
            [m[key] for m in theirs["metrics"]], rel=1e-3, abs=1e-6
        )
    from safetensors.torch import load_file

    one, two = (load_file(m.adapter / "adapter_model.safetensors") for m in (made, other))
    assert all(torch.allclose(one[key], two[key], rtol=1e-3, atol=1e-5) for key in two)


# --- the page

HEAD = """| fault | what was seen | where it went on | finished steps made again | lost |
|---|---|---|---|---|
"""


def row(name: str, fault: Fault, seen: Watched) -> str:
    bad = [ending for ending in seen.endings if ending.kind != "done"]
    first = bad[0] if bad else None
    what = f"`{first.kind}` while {tidy(str(first.doing))}: {tidy(first.error)}" if first else noticed(seen)
    result = {"bits": "nothing; the same bits", "rounding": "nothing; the same but for rounding", "": "nothing"}
    return f"| {name} | {what} | {went_on(fault, seen)} | {seen.steps_made_again} | {result[fault.same]} |"


def noticed(seen: Watched) -> str:
    if all(m["zero_spread"] == 1 for m in read_lines(seen.run.metrics_file)):
        return "no group has a spread in any step (`zero_spread` 1): no weight moves"
    messages = [tidy(e["message"]) for e in seen.events("nonfinite", "reward", "data", "plateau")]
    return messages[0] if messages else "nothing"


def went_on(fault: Fault, seen: Watched) -> str:
    if fault.stops:
        return "stops and says so; `--resume` once it is put right"
    moves = []
    for event in seen.events("retry", "fallback"):
        change = re.search(r": (.*), groups stay whole", event["message"])
        same_path = f"{change[1]}" if change else "same path"
        moves.append(f"`{event['from']}` → `{event['to']}`" if event["from"] != event["to"] else same_path)
    resumed = [f"from step {e['step']}" for e in seen.events("resume") if "step" in e]
    return ", ".join(["; ".join(moves) or "in the same process", *resumed[-1:]])


def tidy(text: str) -> str:
    """Without places of this machine and numbers that vary."""
    text = re.sub(r"(?<![\w.])(?:/[\w.-]+)+/([\w.-]+)", r"\1", text)
    for varies, instead in (
        (r"\b\d+\.\d+ nats\b", "... nats"),
        (r"starting, \d+ s$", "starting"),
        (r" in [\w.]*fault_table\.", " in fault_table."),
        (r", line \d+$", ""),
        (r"\.\d+\.part", ".part"),
    ):
        text = re.sub(varies, instead, text)
    return text.replace("|", "\\|")[:170]


def writing() -> bool:
    return os.environ.get("FAULTS") == "write"


@contextlib.contextmanager
def alone_with_the_page() -> Iterator[None]:
    """With `-n` several processes write rows."""
    with PAGE.open(encoding="utf-8") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        yield


def on_the_page(name: str, found: str) -> None:
    with alone_with_the_page():
        rows = page_rows()
        if writing():
            rows[name] = found
            text = PAGE.read_text(encoding="utf-8").partition(HEAD)[0] + HEAD
            order = [*FAULTS, *OTHERS]
            PAGE.write_text(text + "".join(f"{rows[n]}\n" for n in order if n in rows), encoding="utf-8")
    assert rows.get(name) == found


def page_rows() -> dict[str, str]:
    table = PAGE.read_text(encoding="utf-8").partition(HEAD)[2]
    return {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}


LAUNCHED = "vLLM's engine dies in a rollout"  # one in every run of the tests, the others with --slow
NOT_LAUNCHED = ("the disk is full", "vLLM hangs at its start", "a worker hangs", "a reward hangs")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == LAUNCHED else [pytest.mark.slow])
        for name in FAULTS
        if name not in NOT_LAUNCHED
    ],
)
def test_a_fault_in_a_worker_that_accelerate_launches(name: str, inputs: Path, tmp_path: Path) -> None:
    fault = FAULTS[name]
    made = new_run(tmp_path / "run", made_recipe(inputs, fault))
    limits = replace(fault.limits, start_s=300, silence_s=120)
    seen = supervised(made, fault.put_in, every_time=fault.always, limits=limits, launched=name)
    if fault.stops:
        assert seen.told is not None
        fault.repair(made)
        supervised(made, watched=seen, limits=limits, launched=name)
    assert seen.told is None, f"{seen.told}\n{seen.log}"
    assert tuple(ending.kind for ending in seen.endings) == (*fault.kinds, "done"), seen.log
    assert lost(made) == []
    assert seen.steps_made_again == fault.again, seen.log


# --- faults around the workers


def test_a_supervisor_that_is_killed_leaves_a_worker_that_finishes(
    inputs: Path, undisturbed: Callable[[Fault], RunFolder], tmp_path: Path
) -> None:
    name = "the supervisor is killed"
    made = new_run(tmp_path / "run", made_recipe(inputs, Fault()))
    with faulty.supervising(made) as supervisor:
        os.kill(supervisor, signal.SIGKILL)
    faulty.until_free(made)
    seen = supervised(made)
    assert seen.told is None and lost(made) == []
    check_same(made, undisturbed(Fault()), "bits")
    again = seen.steps_made_again
    assert again == 0
    assert "was killed" in seen.events("resume")[0]["message"]
    what = "the worker works on by itself and finishes"
    then = "until then `--resume` says so, and how to wait or to end it; then it writes the report"
    on_the_page(name, f"| {name} | {what} | {then} | {again} | nothing; the same bits |")


def test_the_end_of_a_job_is_a_step_that_is_saved(
    inputs: Path, undisturbed: Callable[[Fault], RunFolder], tmp_path: Path
) -> None:
    name = "the job is ended (SIGTERM)"
    made = new_run(tmp_path / "run", made_recipe(inputs, Fault()))

    def until_it_is_heard(made: Any, *_: Any) -> None:
        end = time.monotonic() + 60
        while not made.stop.wanted and time.monotonic() < end:
            time.sleep(0.02)

    waiting = lambda folder: in_step(4, trainer.GrpoTrainer, "_sampling", until_it_is_heard)  # noqa: E731
    with faulty.supervising(made, waiting, steps=3) as supervisor:
        os.kill(supervisor, signal.SIGTERM)
    faulty.until_free(made)
    assert [e["kind"] for e in read_lines(made.events_file)] == ["interrupted"]
    saved = checkpoint.newest(made.checkpoints)
    assert saved is not None and saved.step == 3  # no multiple of save_every
    seen = supervised(made)
    assert seen.told is None and lost(made) == []
    check_same(made, undisturbed(Fault()), "bits")
    again = seen.steps_made_again
    assert again == 0
    what = "the worker saves and goes; so with Ctrl-C and a closed terminal"
    on_the_page(name, f"| {name} | {what} | `--resume`, from step 3 | {again} | nothing; the same bits |")


def of_hub(hub: faulty.Hub, tmp_path: Path, put_in: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        faulty.ask_hub(hub.address, tmp_path / "cache")
        put_in(folder)

    return both


def test_a_hub_that_is_gone_in_the_middle_is_not_missed(
    inputs: Path, undisturbed: Callable[[Fault], RunFolder], tmp_path: Path
) -> None:
    name, hub = "the hub is gone in the middle", faulty.Hub(inputs / "model")

    def gone(*_: Any, **__: Any) -> None:
        if not (tmp_path / "gone").exists():
            (tmp_path / "gone").touch()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{hub.address}/quit", timeout=5).close()
            kill()()

    put_in = of_hub(hub, tmp_path, lambda folder: in_step(4, trainer.GrpoTrainer, "_note_rollout", gone))
    made = new_run(tmp_path / "run", replace(made_recipe(inputs, Fault()), model="tests/model"))
    seen = supervised(made, put_in, every_time=True)
    assert seen.told is None, f"{seen.told}\n{seen.log}"
    assert [ending.kind for ending in seen.endings] == ["killed", "done"]
    with pytest.raises(OSError):
        urllib.request.urlopen(hub.address, timeout=5)
    assert lost(made) == []
    check_same(made, undisturbed(Fault()), "bits")
    what = "the worker is killed, and the hub cannot be reached when the next one loads the model"
    moved = f"same path, by the local cache, from step 2 | {seen.steps_made_again} | nothing; the same bits"
    on_the_page(name, f"| {name} | {what} | {moved} |")


def test_a_hub_that_cannot_be_reached_is_told(
    inputs: Path, undisturbed: Callable[[Fault], RunFolder], tmp_path: Path
) -> None:
    name, hub = "the hub cannot be reached", faulty.Hub(inputs / "model")
    hub.close()
    port = hub.server.server_port
    made = new_run(tmp_path / "run", replace(made_recipe(inputs, Fault()), model="tests/model"))
    seen = supervised(made, of_hub(hub, tmp_path, lambda folder: None))
    told = seen.told
    assert isinstance(told, UsageError)
    for words in ("`tests/model` could not be loaded", "the hub and its local cache were tried", "--model FOLDER"):
        assert words in " ".join(told.lines())
    hub = faulty.Hub(inputs / "model", port)
    supervised(made, of_hub(hub, tmp_path, lambda folder: None), watched=seen)
    hub.close()
    assert seen.told is None and lost(made) == []
    check_same(made, undisturbed(Fault()), "bits")
    on_the_page(name, row(name, Fault(stops=True, same="bits"), seen))


OTHERS = (
    "the supervisor is killed",
    "the job is ended (SIGTERM)",
    "the hub is gone in the middle",
    "the hub cannot be reached",
)


def test_rows_that_are_written_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, names = tmp_path / "faults.md", [*FAULTS, *OTHERS]
    page.write_text("What is above the table.\n\n" + HEAD, encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.PAGE", page)
    monkeypatch.setenv("FAULTS", "write")
    read = page_rows

    def read_slowly() -> dict[str, str]:
        rows = read()
        time.sleep(0.02)  # time for another process to write
        return rows

    monkeypatch.setattr(f"{__name__}.page_rows", read_slowly)

    def work(rank: int) -> int:
        for name in names[rank::4]:
            on_the_page(name, f"| {name} | seen by {rank} |")
        return 0

    assert several.forked(4, work, tmp_path / "log") == [0] * 4, (tmp_path / "log").read_text()
    assert list(page_rows()) == names
    assert page.read_text(encoding="utf-8").startswith("What is above")


@pytest.mark.skipif(writing(), reason="the page is being written")
def test_the_page_holds_these_faults_and_no_others() -> None:
    assert list(page_rows()) == [*FAULTS, *OTHERS]
    assert len(page_rows()) >= 20
