"""For tests only: `python -m faulty_worker RUN_DIR FAULT`, a worker as the launcher starts it, with a fault of fault_table."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    import fault_table
    import faulty

    from grpo_portable import worker

    folder, name = sys.argv[1:]
    faulty.on_the_cpu()
    if name != faulty.NO_FAULT:
        fault_table.FAULTS[name].put_in(Path(folder))
    worker.leave(worker.main([folder]))
