"""For tests only: `python -m faulty_worker RUN_DIR FAULT`, a worker as the launcher starts it, with a fault of test_faults."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    import faulty
    import test_faults

    from grpo_portable import worker

    folder, name = sys.argv[1:]
    faulty.on_the_cpu()
    if name != faulty.NO_FAULT:
        test_faults.FAULTS[name].put_in(Path(folder))
    worker.leave(worker.main([folder]))
