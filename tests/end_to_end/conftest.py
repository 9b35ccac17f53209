"""What the whole runs share: a model and questions, made once a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and questions."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny.save(folder / "model")
    tiny.questions_folder(folder / "sums")
    return folder
