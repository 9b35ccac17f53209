"""What each of the doctor's paths means here: number format, quantisation, and the engine that makes the rollouts."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from doctor.diagnosis import FP8_PATHS, VLLM_PATHS
from grpo_portable import failure
from grpo_portable.deadline import deadline
from grpo_portable.errors import EngineError
from grpo_portable.ladder import EXIT
from grpo_portable.recipe import Recipe
from grpo_portable.rollout.protocol import Rollout
from grpo_portable.run import RunFolder

START_LIMIT_S = 900.0  # of vLLM; compiling kernels the first time can take minutes


@dataclass(frozen=True)
class PathSettings:
    """`dtype`: of the update's arithmetic and of frozen weights. `copy`: the engine's own weights (auto, none, fp8)."""

    path: str
    engine: str  # vllm | portable | server
    dtype: str  # bfloat16 | float16 | float32
    quantization: str | None  # of the policy's frozen weights: nf4 or None
    copy: str

    @property
    def samples_from_other_weights(self) -> bool:
        """Whether sampler and trainer differ by more than rounding, so that the importance ratio must be corrected."""
        return self.engine in ("vllm", "server") or self.copy == "fp8"


def path_settings(path: str, *, bfloat16: bool, backend: str = "plain") -> PathSettings:
    """The settings of a path. `bfloat16`: whether the card computes in it (compute capability 8.0 or higher)."""
    engine = "server" if backend == "server" else "vllm" if path in VLLM_PATHS else "portable"
    if path == "cpu":
        return PathSettings(path, engine, "float32", None, "none")
    half = "float16" if path.startswith("fp16") or not bfloat16 else "bfloat16"
    return PathSettings(
        path, engine, half, "nf4" if path == "qlora-hf" else None, "fp8" if path in FP8_PATHS else "auto"
    )


def open_engine(
    settings: PathSettings,
    model: Any,
    tokenizer: Any,
    recipe: Recipe,
    *,
    run: RunFolder,
    limit_s: float = START_LIMIT_S,
) -> Rollout:
    """The engine of a path over `model`. A model the portable one does not know gets the reference engine, with an event.

    vLLM may hang while it starts, in code no exception reaches: after `limit_s` the process ends as after an engine's error.
    """
    if settings.engine == "server":
        server = importlib.import_module("grpo_portable.rollout.server")
        run.heartbeat(f"asking the vLLM server at {recipe.vllm_server}")
        return server.make(model, tokenizer, recipe, dtype=settings.dtype, tick=run.beat)
    rows = int(recipe.rollout_rows)
    if settings.engine == "vllm":
        vllm = importlib.import_module("grpo_portable.rollout.vllm")  # only this path needs vLLM's wrapper

        def expired(where: str) -> None:
            error = EngineError(f"vLLM did not start within {limit_s:.0f} s: it hung in {where}")
            failure.write(run, error)
            os._exit(EXIT["engine"])  # the main thread cannot be reached; the supervisor goes on below

        run.heartbeat("rollout engine starting")  # a phase whose want of memory fewer rows cure
        with deadline(limit_s, beat=lambda s: run.heartbeat(f"rollout engine starting, {s:.0f} s"), expired=expired):
            return vllm.make(model, tokenizer, recipe, rows=rows, copy=settings.copy, dtype=settings.dtype)
    from grpo_portable.rollout import portable

    engine = portable.make(model, tokenizer, rows=rows, copy=settings.copy)
    because = getattr(engine, "because", None)
    if because:
        run.event("engine", f"rollouts are made by the {engine.name} engine, which is slower", error=because)
    return engine
