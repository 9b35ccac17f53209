"""One thread for torch and BLAS (two contended threads can be thirty times slower than one), no network, no trackers."""

import gc
import os
from collections.abc import Iterator

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_DISABLED": "true",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Libraries and collected tests are not walked at each of the many collections that trainers and engines ask for.

    A worker forked by a test walks less still: a walk copies the pages it shares with the test's process.
    """
    gc.collect()
    gc.freeze()
    yield
