"""A wait is alive as long as bytes move, and only then."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo_portable import pulse
from grpo_portable.recipe import Recipe
from grpo_portable.run import RunFolder, create


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = create(tmp_path / "run", Recipe())
    made.heartbeat("loading a model")
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


def test_a_heartbeat_that_cannot_be_renewed_ends_nothing(run: RunFolder) -> None:
    run.heartbeat_file.unlink()
    run.beat()
    assert not run.heartbeat_file.exists()
