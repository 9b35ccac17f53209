"""For tests only: the faults, each with how it is put into a worker and what must come of it."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import faulty
import standin_vllm
import tiny
import torch
from faulty import at_call, kill, throw

from grpo_portable import engines, evaluate, session
from grpo_portable.models import policy
from grpo_portable.rollout import portable
from grpo_portable.rollout.protocol import Completion
from grpo_portable.run import folder as run_folder
from grpo_portable.run.folder import RunFolder
from grpo_portable.supervision import supervisor
from grpo_portable.training import checkpoint, saving, trainer

GPU_FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB"
NO_NVCC = "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
NO_WARM_UP = "'LRUCacheWorkerLoRAManager' object has no attribute 'get_dummy_lora_warmup_rank'"


@dataclass(frozen=True)
class Fault:
    """`kinds`: how the workers must end, the last good one left out. `again`: finished steps that are made again.

    `put_in` is called in the first worker, with `always` in every one. `stops`: the run must stop, and go on after `repair`
    and --resume. `same`: the result must be the undisturbed run's, bit for bit, or up to rounding.
    """

    put_in: Callable[[Path], None] = lambda folder: None
    kinds: tuple[str, ...] = ()
    path: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    always: bool = False
    again: int = 0
    stops: bool = False
    repair: Callable[[RunFolder], None] = lambda made: None
    same: str = ""  # bits | rounding
    says: str = ""  # words that an event or the error must hold
    limits: supervisor.Limits = faulty.LIMITS


# --- faults of vLLM


def vllm_cannot_be_imported(folder: Path) -> None:
    package = folder / ".broken" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.path.insert(0, str(package.parent))
    importlib.invalidate_caches()


def in_vllm(call: str, number: int, error: BaseException) -> Callable[[Path], None]:
    return lambda folder: at_call(standin_vllm.LLM, call, number, throw(error))


def vllm_hangs_at_start(folder: Path) -> None:
    start = engines.open_engine
    session.open_engine = lambda *a, **o: start(*a, limit_s=1.0, **o)
    engines.deadline.__wrapped__.__kwdefaults__["every"] = 0.1  # type: ignore[attr-defined]
    at_call(standin_vllm.LLM, "__init__", 1, lambda *_, **__: time.sleep(600))


def vllm_drifts(folder: Path) -> None:
    def double(llm: Any, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            for parameter in llm.model.parameters():
                parameter.mul_(2.0)

    at_call(standin_vllm.LLM, "generate", 4, double)


# --- memory


def rung_of(folder: Path) -> Any:
    return run_folder.open_run(folder).recipe()


def in_step(number: int, owner: Any, name: str, do: Callable[..., None]) -> None:
    """`do` as a method of the trainer begins, from optimizer step `number` on."""

    def when(made: Any, *arguments: Any, **options: Any) -> None:
        if made.state.global_step + 1 >= number:
            do(made, *arguments, **options)

    at_call(owner, name, 1, when, every=True)


def room_for_rows(rows: int) -> Callable[[Path], None]:
    def put_in(folder: Path) -> None:
        if int(rung_of(folder).rollout_rows) > rows:
            in_step(4, trainer.GrpoTrainer, "_sampling", throw(torch.OutOfMemoryError(GPU_FULL)))

    return put_in


def room_for_answers(rows: int) -> Callable[[Path], None]:
    def put_in(folder: Path) -> None:
        if int(rung_of(folder).rollout_rows) > rows:
            at_call(portable.PortableRollout, "generate", 1, throw(torch.OutOfMemoryError(GPU_FULL)))

    return put_in


def after(owner: Any, name: str, step: int, micro_batch: int, folder: Path) -> None:
    """Out of memory as a call ends, in a step and with more rows in a micro-batch than there is room for."""
    if int(rung_of(folder).micro_batch) <= micro_batch:
        return
    steps, original = [0], getattr(owner, name)
    in_step(1, trainer.GrpoTrainer, "training_step", lambda made, *_, **__: steps.append(made.state.global_step + 1))

    def full(*arguments: Any, **options: Any) -> Any:
        made = original(*arguments, **options)
        if steps[-1] >= step:
            raise torch.OutOfMemoryError(GPU_FULL)
        return made

    setattr(owner, name, full)


def no_room_in_backward(folder: Path) -> None:
    from accelerate import Accelerator

    after(Accelerator, "backward", 4, 2, folder)


def no_room_in_the_optimizer(folder: Path) -> None:
    after(torch.optim.AdamW, "step", 4, 2, folder)


def no_room_in_the_bootstrap(folder: Path) -> None:
    from transformers import Trainer

    if int(rung_of(folder).micro_batch) > 2:
        at_call(Trainer, "training_step", 6, throw(torch.OutOfMemoryError(GPU_FULL)))


def no_room_to_load(folder: Path) -> None:
    if rung_of(folder).path == "bf16-hf":
        at_call(policy, "load", 1, throw(torch.OutOfMemoryError(GPU_FULL)))


# --- numbers and rewards


def nan_gradient(*steps: int, path: str = "cpu") -> Callable[[Path], None]:
    def poison(made: Any, *_: Any) -> None:
        if made.state.global_step + 1 in steps:
            next(p.grad for p in policy.trainable(made.model).values() if p.grad is not None)[0] = float("nan")

    def put_in(folder: Path) -> None:
        if rung_of(folder).path == path:
            at_call(trainer.GrpoTrainer, "_clip_grad_norm", 1, poison, every=True)

    return put_in


def in_the_reward(do: Callable[..., None]) -> Callable[[Path], None]:
    """From the fourth step on."""

    def put_in(folder: Path) -> None:
        calls, digits = [0], tiny.digits

        @functools.wraps(digits)
        def faulty_digits(completions: list[str], **options: Any) -> list[float]:
            calls[0] += len(completions) > 1
            if calls[0] > 3:
                do()
            return digits(completions, **options)

        tiny.digits = faulty_digits

    return put_in


def nothing_is_written(folder: Path) -> None:
    faulty.changed(
        portable.PortableRollout,
        "generate",
        lambda groups: [[Completion((), (), "stop") for _ in group] for group in groups],
    )


# --- disk


def disk_fills(folder: Path) -> None:
    def fill(*_: Any, **__: Any) -> None:
        with (folder / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    in_step(4, trainer.GrpoTrainer, "_note_rollout", fill)


def files_must_be_small(folder: Path) -> None:
    import resource

    in_step(1, trainer.GrpoTrainer, "save_now", lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000,) * 2))


def folder_is_locked(folder: Path) -> None:
    faulty.obey_permissions()
    in_step(4, trainer.GrpoTrainer, "_note_rollout", lambda *_, **__: folder.chmod(0o500))


def checkpoint_is_torn(folder: Path) -> None:
    def tear(*_: Any, **__: Any) -> None:
        file = folder / "checkpoints" / "step-000004" / "weights.safetensors"
        file.write_bytes(file.read_bytes()[:100])
        kill()()

    in_step(5, trainer.GrpoTrainer, "_note_rollout", tear)


# --- time, silence


def clock_jumps(folder: Path) -> None:
    real = time.time
    heartbeat = run_folder.RunFolder.heartbeat

    def jump(*_: Any, **__: Any) -> None:
        time.time = lambda: real() - 86_400

        def dated(made: RunFolder, *told: Any, **more: Any) -> None:
            heartbeat(made, *told, **more)
            os.utime(made.heartbeat_file, (real() - 86_400,) * 2)

        run_folder.RunFolder.heartbeat = dated  # type: ignore[method-assign, assignment]

    in_step(3, trainer.GrpoTrainer, "_note_rollout", jump)


def hangs(*_: Any, **__: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)


def killed_in_the_bootstrap(folder: Path) -> None:
    from transformers import Trainer

    saving.OVERDUE_S = 0.0
    at_call(Trainer, "training_step", 10, kill())


def killed(owner: Any, name: str, number: int) -> Callable[[Path], None]:
    return lambda folder: at_call(owner, name, number, kill())


TAUGHT = {"bootstrap_epochs": 2.0, "bootstrap_batch": 4, "bootstrap_learning_rate": 2e-2, "max_completion_tokens": 24}
SILENT = replace(faulty.LIMITS, silence_s=8.0, stop_s=0.5)


def of_vllm(put_in: Callable[[Path], None], says: str, **changes: Any) -> Fault:
    return Fault(put_in, ("engine",), "bf16-vllm", changes, says=says)


FAULTS: dict[str, Fault] = {
    "vLLM cannot be imported": of_vllm(vllm_cannot_be_imported, "libcudart.so.13"),
    "vLLM crashes at its start": of_vllm(
        in_vllm("__init__", 1, RuntimeError("Engine core initialization failed")), "Engine core"
    ),
    "vLLM hangs at its start": of_vllm(vllm_hangs_at_start, "did not start within"),
    "flashinfer wants nvcc": of_vllm(in_vllm("__init__", 1, RuntimeError(NO_NVCC)), "nvcc"),
    "LoRA warm-up attribute is missing": of_vllm(in_vllm("__init__", 1, AttributeError(NO_WARM_UP)), "warmup"),
    "vLLM's engine dies in a rollout": of_vllm(
        in_vllm("generate", 5, RuntimeError("EngineCore encountered an issue")), "EngineCore"
    ),
    "vLLM refuses the adapter": of_vllm(in_vllm("_add_lora", 4, ValueError("unexpected modules")), "adapter"),
    "vLLM samples from something else than the policy": of_vllm(
        vllm_drifts,
        "no longer samples from the policy",
        prompts_per_step=8,
        max_completion_tokens=24,
        model="wide",
    ),
    "vLLM's process gets a segmentation fault": Fault(
        lambda folder: at_call(standin_vllm.LLM, "generate", 5, kill(signal.SIGSEGV)), ("killed",), "bf16-vllm", again=1
    ),
    "out of memory in a rollout": Fault(room_for_rows(2), ("oom", "oom"), "bf16-hf", always=True, same="rounding"),
    "out of memory in the backward pass": Fault(no_room_in_backward, ("oom",), "bf16-hf", always=True, same="rounding"),
    "out of memory in the optimizer's step": Fault(
        no_room_in_the_optimizer, ("oom",), "bf16-hf", always=True, again=1, same="rounding"
    ),
    "out of memory in an evaluation": Fault(room_for_answers(4), ("oom",), "bf16-hf", always=True, same="rounding"),
    "out of memory while the model is loaded": Fault(no_room_to_load, ("oom",), "bf16-hf", always=True, same="bits"),
    "CUDA error in an update": Fault(
        lambda folder: in_step(
            4,
            trainer.GrpoTrainer,
            "_clip_grad_norm",
            throw(RuntimeError("CUDA error: an illegal memory access was encountered")),
        ),
        ("engine",),
        "bf16-hf",
        same="bits",
    ),
    "one gradient is NaN": Fault(nan_gradient(3), says="is not finite"),
    "gradients are NaN three times in a row": Fault(
        nan_gradient(3, 4, 5, path="bf16-hf"), ("nonfinite",), "bf16-hf", always=True, again=2, same="bits"
    ),
    "a reward is NaN for one completion": Fault(
        changes={"prompts_per_step": 5, "rewards": ("faulty:one_is_nan",)}, says="left out of their groups"
    ),
    "a reward raises": Fault(
        in_the_reward(throw(KeyError("answer"))), ("reward",), stops=True, same="bits", says="KeyError"
    ),
    "a reward calls sys.exit": Fault(
        in_the_reward(throw(SystemExit(1))), ("reward",), stops=True, same="bits", says="SystemExit"
    ),
    "a reward hangs": Fault(
        in_the_reward(hangs), ("hang",), stops=True, again=1, same="bits", says="does not return", limits=SILENT
    ),
    "completions are empty": Fault(nothing_is_written),
    "all rewards are equal": Fault(changes={"rewards": ("faulty:same",)}),
    "SIGKILL while the base is evaluated": Fault(killed(evaluate, "append_line", 6), ("killed",), same="bits"),
    "SIGKILL in the bootstrap": Fault(
        killed_in_the_bootstrap, ("killed",), changes=TAUGHT, same="bits", says="the bootstrap goes on from step 9"
    ),
    "out of memory in the bootstrap": Fault(
        no_room_in_the_bootstrap,
        ("oom",),
        "bf16-hf",
        changes=TAUGHT,
        always=True,
        says="the bootstrap goes on from step 5",
    ),
    "SIGKILL in a rollout": Fault(killed(trainer.GrpoTrainer, "_note_rollout", 4), ("killed",), again=1, same="bits"),
    "SIGKILL in an update": Fault(killed(trainer.GrpoTrainer, "_clip_grad_norm", 4), ("killed",), again=1, same="bits"),
    "SIGKILL while a checkpoint is written": Fault(killed(checkpoint, "_sync", 11), ("killed",), again=2, same="bits"),
    "SIGKILL while the adapter is saved": Fault(killed(policy, "_flush", 1), ("killed",), same="bits"),
    "SIGKILL while the tuned is evaluated": Fault(killed(evaluate, "append_line", 13), ("killed",), same="bits"),
    "a checkpoint is torn": Fault(checkpoint_is_torn, ("killed",), again=2, same="bits", says="is torn"),
    "the disk is full": Fault(
        disk_fills, ("disk",), stops=True, again=1, same="bits", repair=lambda made: (made.path / "ballast").unlink()
    ),
    "files may not grow (ulimit -f)": Fault(files_must_be_small, ("disk",), stops=True, again=2, same="bits"),
    "the run folder may no longer be written": Fault(
        folder_is_locked, ("disk",), stops=True, same="bits", repair=lambda made: made.path.chmod(0o700)
    ),
    "a worker hangs": Fault(
        lambda folder: in_step(4, trainer.GrpoTrainer, "_sampling", hangs),
        ("hang",),
        again=1,
        same="bits",
        limits=SILENT,
    ),
    "the clock jumps back a day": Fault(clock_jumps, same="bits"),
    "rows of the data are broken": Fault(changes={"data": "broken"}, says="row 3"),
    "the chat template leaves the question out": Fault(
        changes={"chat_template": "{{ messages[0].role }}"},
        kinds=("user",),
        stops=True,
        repair=lambda made: made.settle(chat_template="none"),
        same="bits",
        says="leaves the question out",
    ),
    "the model's file is torn": Fault(
        changes={"model": "torn"},
        kinds=("user",),
        stops=True,
        repair=lambda made: made.settle(model=made.recipe().model.replace("torn", "model")),
        same="bits",
    ),
}
