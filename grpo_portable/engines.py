"""What each of the doctor's paths means here: number format, quantisation, and the engine that makes the rollouts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from doctor.diagnosis import FP8_PATHS, VLLM_PATHS
from grpo_portable.errors import EngineError
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Rollout
from grpo_portable.run.deadline import deadline
from grpo_portable.run.folder import RunFolder
from grpo_portable.supervision import failure
from grpo_portable.supervision.ladder import EXIT
from grpo_portable.supervision.phase import Phase

if TYPE_CHECKING:  # each engine is imported where its path is taken: it loads what other paths do without
    from grpo_portable.fast import Shared

START_LIMIT_S = 900.0  # of vLLM; compiling kernels the first time can take minutes


@dataclass(frozen=True)
class PathSettings:
    """`dtype`: of the update's arithmetic and of frozen weights. `copy`: the engine's own weights (auto, none, fp8)."""

    path: str
    engine: str  # vllm | portable | server
    dtype: str  # bfloat16 | float16 | float32
    quantization: str | None  # of the policy's frozen weights: nf4 or None
    copy: str
    backend: str = "plain"  # plain | server | unsloth

    @property
    def samples_from_other_weights(self) -> bool:
        """Whether sampler and trainer differ by more than rounding, so that the importance ratio must be corrected."""
        return self.engine in ("vllm", "server") or self.copy == "fp8"


def path_settings(path: str, *, bfloat16: bool, backend: str = "plain") -> PathSettings:
    """The settings of a path. `bfloat16`: whether the card computes in it (compute capability 8.0 or higher)."""
    engine = "server" if backend == "server" else "vllm" if path in VLLM_PATHS else "portable"
    if path == "cpu":
        return PathSettings(path, engine, "float32", None, "auto", backend)
    half = "float16" if path.startswith("fp16") or not bfloat16 else "bfloat16"
    quantization, copy = "nf4" if path == "qlora-hf" else None, "fp8" if path in FP8_PATHS else "auto"
    return PathSettings(path, engine, half, quantization, copy, backend)


@contextlib.contextmanager
def starting(what: str, run: RunFolder, limit_s: float = START_LIMIT_S) -> Iterator[None]:
    """Inside, an engine starts. It may hang where no exception reaches: after `limit_s` the process ends as after its error."""

    def expired(where: str) -> None:
        failure.write(run, EngineError(f"{what} did not start within {limit_s:.0f} s: it hung in {where}"))
        os._exit(EXIT["engine"])  # the main thread cannot be reached; the supervisor goes on below

    doing = "rollout engine starting"
    run.heartbeat(Phase.ENGINE, doing)
    with deadline(limit_s, beat=lambda s: run.heartbeat(Phase.ENGINE, f"{doing}, {s:.0f} s"), expired=expired):
        yield


def share_weights(settings: PathSettings, recipe: Recipe, *, run: RunFolder) -> Shared | None:
    """The policy on the weights of a vLLM that Unsloth starts, None on the other backends."""
    if settings.backend != "unsloth":
        return None
    with starting("Unsloth", run):
        from grpo_portable import fast

        fp8 = settings.copy == "fp8"
        return fast.load(recipe, rows=int(recipe.rollout_rows), dtype=settings.dtype, fp8=fp8)


def open_engine(
    settings: PathSettings,
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    *,
    run: RunFolder,
    limit_s: float = START_LIMIT_S,
    shared: Shared | None = None,
) -> Rollout:
    """The engine of a path over `model`. A model the portable one does not know gets the reference engine, with an event.

    `shared`: what `share_weights` gave.
    """
    if shared is not None:
        from grpo_portable import fast

        return fast.engine(shared, model, recipe, rows=int(recipe.rollout_rows))
    if settings.engine == "server":
        from grpo_portable.rollout import server

        run.heartbeat(Phase.STARTING, f"asking the vLLM server at {recipe.vllm_server}")
        return server.make(model, tokenizer, recipe, dtype=settings.dtype, tick=run.beat)
    rows = int(recipe.rollout_rows)
    if settings.engine == "vllm":
        from grpo_portable.rollout import vllm

        with starting("vLLM", run, limit_s):
            return vllm.make(model, tokenizer, recipe, rows=rows, copy=settings.copy, dtype=settings.dtype)
    from grpo_portable.rollout import portable

    engine = portable.make(model, tokenizer, rows=rows, copy=settings.copy)
    because = getattr(engine, "because", None)
    if because:
        run.event("engine", f"rollouts are made by the {engine.name} engine, which is slower", error=because)
    return engine
