"""CUDA graphs of a step or a prefill, captured when asked for, all in one memory pool. Without CUDA the step just runs.

A replay repeats the kernels of the capture on the same addresses; whatever differs from step to step must lie in tensors that
are filled in place. The first size asked for is the largest, so later captures reuse its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


def free_to_repeat() -> Callable[[], None]:
    """The `still` of a step that leaves the same however often it runs."""
    return lambda: None


class Graphs:
    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device, self.enabled = device, enabled and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: Hashable, step: Callable[[], None], still: Callable[[], Callable[[], None]]) -> None:
        """Do `step` once. A new `key` is captured first; from `still()` to the call of its result no step leaves a trace."""
        if not self.enabled:
            step()
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(step, still)
        self._graphs[key].replay()

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _capture(self, step: Callable[[], None], still: Callable[[], Callable[[], None]]) -> torch.cuda.CUDAGraph:
        go_on = still()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            step()  # libraries choose and load their kernels here, which a capture must not
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: what other threads do meanwhile (pinning a batch, say) does not spoil the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        go_on()
        return graph
