"""A wait is alive as long as bytes move, and only then."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny

from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Sampling, Ticking
from grpo_portable.run import pulse
from grpo_portable.run.folder import RunFolder, create
from grpo_portable.supervision.phase import Phase


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = create(tmp_path / "run", Recipe())
    made.heartbeat(Phase.STARTING, "loading a model")
    return made


def beats(run: RunFolder, work: object) -> int:
    """How often the heartbeat was renewed while `work` ran."""
    seen = {run.heartbeat_file.stat().st_mtime_ns}
    with pulse.while_bytes_move(run, every=0.05):
        for _ in range(20):
            work()  # type: ignore[operator]
            time.sleep(0.025)
            seen.add(run.heartbeat_file.stat().st_mtime_ns)
    return len(seen) - 1


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="nobody counts bytes here")
def test_only_a_wait_in_which_bytes_move_is_alive(run: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "download"
    assert beats(run, lambda: file.write_bytes(bytes(200_000))) >= 2
    assert beats(run, lambda: None) == 0


def test_where_nobody_counts_the_wait_has_a_limit(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_COUNTERS", Path("/nowhere"))
    assert beats(run, lambda: None) >= 2
    monkeypatch.setattr(pulse, "BLIND_LIMIT_S", 0.0)
    assert beats(run, lambda: None) == 0


@pytest.mark.parametrize("engine", ["portable", "reference"])
def test_an_engine_tells_that_it_is_writing(engine: str) -> None:
    made = tiny.model()
    opened = importlib.import_module(f"grpo_portable.rollout.{engine}")
    rollout: Any = (opened.PortableRollout if engine == "portable" else opened.ReferenceRollout)(
        made, tiny.tokenizer(), rows=2
    )
    ticks_at_all = isinstance(rollout, Ticking)
    assert ticks_at_all
    ticks = []
    rollout.tick = lambda: ticks.append(1)
    rollout.generate([[10, 11], [12]], 2, Sampling(max_tokens=40, seed=1))
    assert len(ticks) >= 10


def test_a_tick_renews_the_heartbeat_now_and_then(run: RunFolder) -> None:
    before, tick = run.heartbeat_file.stat().st_mtime_ns, pulse.Tick(run, every=0.2)
    tick()
    assert run.heartbeat_file.stat().st_mtime_ns == before
    time.sleep(0.25)
    tick()
    assert run.heartbeat_file.stat().st_mtime_ns > before
    assert json.loads(run.heartbeat_file.read_text())["doing"] == "loading a model"


def test_a_heartbeat_that_cannot_be_renewed_ends_nothing(run: RunFolder) -> None:
    run.heartbeat_file.unlink()
    run.beat()
    assert not run.heartbeat_file.exists()
