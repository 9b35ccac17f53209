"""One run in one process, or in one a GPU: `python -m grpo_portable.worker RUN_DIR`, started through accelerate (`ranks.py`).

Stages: evaluate base → (bootstrap → evaluate bootstrap) → train → save the adapter → evaluate tuned. A stage whose files
are complete is passed over, so starting the worker again resumes the run. A failure is written to failure.json, with a
kind that the supervisor decides by, and an exit code of its own. Of several processes each samples and learns from its own
groups and asks its own part of the held-out questions; the first one writes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_portable import evaluate, quiet, rewards
from grpo_portable.errors import GrpoPortableError, Interrupted, NonFiniteError
from grpo_portable.models import policy
from grpo_portable.rollout.protocol import Resting
from grpo_portable.run import saved
from grpo_portable.run.folder import RunFolder, open_run, read_lines
from grpo_portable.run.processes import here
from grpo_portable.session import Session, prepare
from grpo_portable.supervision import failure
from grpo_portable.supervision.ladder import EXIT
from grpo_portable.supervision.phase import Phase
from grpo_portable.training import bootstrap, checkpoint, record
from grpo_portable.training.guards import StopSignal, require_finite


def run_stages(run: RunFolder, stop: StopSignal) -> None:
    """Bring the run to its end. Raises; `main` turns what is raised into failure.json and an exit code."""
    task = run.read_json("task.json")
    session = prepare(run, task, stop)
    try:
        if task.get("only") == "evaluate":
            _evaluate_only(session, task)
            return
        trained = _is_saved(session, run.adapter)
        evaluate_stage(session, "base")
        if session.recipe.bootstrap_epochs > 0:
            taught = _is_saved(session, run.bootstrapped)
            if taught or not trained:  # of a run that is trained it was there, and only its answers may be missing
                policy.restore(session.model, run.bootstrapped) if taught else bootstrap_stage(session)
                evaluate_stage(session, "bootstrap")
        policy.restore(session.model, run.adapter) if trained else train_stage(session)
        evaluate_stage(session, "tuned")
    finally:
        session.engine.close()
        record.peak_memory(run)


def _evaluate_only(session: Session, task: dict[str, Any]) -> None:
    """The model as it is, or with the adapter on and, if asked for, off: the same engine and prompts for both."""
    if task.get("base_too") or not task.get("adapter"):
        with policy.without_adapter(session.model):
            evaluate_stage(session, "base")
    if task.get("adapter"):
        evaluate_stage(session, "tuned")


def evaluate_stage(session: Session, stage: str) -> None:
    """Ask the held-out questions of the policy as it is now: greedy, then sampled if the recipe wants it."""
    recipe, run = session.recipe, session.run
    parts = [(stage, 0)] + ([(f"{stage}-sampled", recipe.eval_samples)] if recipe.eval_samples else [])
    parts = [(name, k) for name, k in parts if not evaluate.is_complete(session.held_out, run.generations(name), k)]
    parts = session.processes.as_main_says(parts)
    if not parts:
        return
    from grpo_portable.training.trainer import rollout_mode

    there = sum(1 for name, _ in parts for _ in read_lines(run.generations(name)))
    with record.stage(run, stage, there), rollout_mode(session.model):
        session.engine.sync(session.model)
        for name, samples in parts:

            def tell(seen: evaluate.Progress, name: str = name) -> None:
                doing = f"evaluating {name}, {seen.done}/{seen.total}"
                run.heartbeat(Phase.EVALUATION, doing, stage=name, total=seen.total)

            seen = _ask(session, name, samples, tell)
            if session.processes.is_main:
                print(f"{name}: {seen.correct} of {seen.done} answers are right", flush=True)
        record.memory_held(run, session.model, session.engine)
        if isinstance(session.engine, Resting):
            session.engine.rest()


def _ask(session: Session, name: str, samples: int, tell: Callable[[evaluate.Progress], None]) -> evaluate.Progress:
    """Evaluate into the stage's file; of several processes each asks its chunks into its own, and these are joined.

    The answers stand in the order of the questions, also where those of processes that were killed came first.
    """
    run, processes, held_out = session.run, session.processes, session.held_out
    whole = run.generations(name)

    def asked(file: Path) -> None:
        evaluate.evaluate(
            session.engine,
            session.builder,
            held_out,
            session.recipe,
            file,
            samples=samples,
            progress=tell,
            known=(whole,),
            turn=(processes.rank, processes.count),
        )

    def joined() -> None:
        processes.wait()
        if processes.is_main:
            evaluate.join(held_out, whole)
        processes.wait()

    joined()  # what processes that were killed had asked, however many they were
    asked(whole if processes.count == 1 else evaluate.share_of(whole, processes.rank))
    joined()
    return evaluate.counted(held_out, whole, samples)


def bootstrap_stage(session: Session) -> None:
    """The SFT in the target format, from its newest checkpoint, and its result saved."""
    from grpo_portable.training import arguments
    from grpo_portable.training.sft import SftTrainer

    run, recipe = session.run, session.recipe
    assert session.train is not None
    examples = bootstrap.rows(session.taught or session.train.questions, session.builder, recipe)
    for count, why in (
        (examples.over_length, "are too long"),
        (examples.no_working, "have no working, only an answer"),
    ):
        if count:
            record.tell_once(run, "data", f"{count} answers {why} and were left out of the bootstrap")

    def tell(step: int, steps: int, logs: dict[str, float]) -> None:
        run.heartbeat(Phase.BOOTSTRAP, f"bootstrap, step {step}/{steps}")
        if session.processes.is_main and (step == steps or step % 20 == 0):
            print(f"bootstrap step {step}/{steps} loss {logs['loss']:.4f}", flush=True)

    newest = _newest(run, run.bootstrap_checkpoints, "the bootstrap")
    with record.stage(run, "bootstrap", newest.step if newest else 0):
        trainer = SftTrainer(
            session.model,
            recipe,
            arguments.sft_arguments(
                recipe,
                rows=len(examples.examples),
                output_dir=run.path,
                dtype=session.settings.dtype,
                cpu=session.cpu,
                world=session.processes.count,
            ),
            examples=examples.examples,
            tokenizer=session.builder.tokenizer,
            checkpoints=run.bootstrap_checkpoints,
            stop=session.stop,
            on_step=tell,
            probe=_format_probe(session) if recipe.bootstrap_probe else None,
            processes=session.processes,
        )
        taught = trainer.teach(newest)
        _save(session, run.bootstrapped)
    if session.processes.is_main:
        shutil.rmtree(run.bootstrap_checkpoints, ignore_errors=True)
    share = (
        ""
        if taught.format_share is None
        else f"{100 * taught.format_share:.0f} % of the probe's answers keep the format"
    )
    record.note(run, bootstrap={"steps": taught.steps, "planned": taught.planned, "format_share": taught.format_share})
    if taught.steps < taught.planned:
        record.tell_once(run, "bootstrap", f"it ended after step {taught.steps} of {taught.planned}: {share}")
    elif share and session.processes.is_main:
        print(f"bootstrap: {share}", flush=True)


def _format_probe(session: Session) -> Callable[[int], float]:
    """What asks the probe's questions during the bootstrap; every process hears what the first one found."""
    assert session.train is not None
    asked = bootstrap.probe_prompts(session.train, session.recipe)

    def probe(step: int) -> float:
        session.run.heartbeat(Phase.PROBE, f"bootstrap, probe after step {step}")
        share = bootstrap.format_share(session.engine, session.model, session.builder, asked, session.recipe)
        if isinstance(session.engine, Resting):
            session.engine.rest()
        share = session.processes.as_main_says(share)
        if session.processes.is_main:
            print(f"bootstrap probe after step {step}: {100 * share:.0f} % keep the format", flush=True)
        return share

    return probe


def train_stage(session: Session) -> None:
    """GRPO from the newest whole checkpoint, or from the start; then the adapter is saved."""
    from grpo_portable.training import arguments
    from grpo_portable.training.trainer import GrpoTrainer

    run, recipe, stop = session.run, session.recipe, session.stop
    assert session.train is not None
    newest = _newest(run, run.checkpoints, "training")
    with record.stage(run, "train", newest.step if newest else 0):
        run.heartbeat(Phase.TRAINING, "training")
        trainer = GrpoTrainer(
            session.model,
            recipe,
            arguments.training_arguments(
                recipe,
                output_dir=run.path,
                dtype=session.settings.dtype,
                cpu=session.cpu,
                world=session.processes.count,
            ),
            data=session.train,
            prompts=session.builder,
            rewards=rewards.resolve(
                recipe.rewards, recipe.answer_style, max_completion_tokens=recipe.max_completion_tokens
            ),
            engine=session.engine,
            run=run,
            stop=stop,
            correct_sampler=session.settings.samples_from_other_weights,
            processes=session.processes,
        )
        try:
            with stop.deferred():
                trainer.start(newest)
        except KeyboardInterrupt:
            if session.processes.is_main:
                trainer.save_now()  # a rollout was dropped; the weights are those of the last whole step
        except Exception as error:  # whatever it was, the steps made so far are kept
            if not isinstance(error, NonFiniteError):  # then the last good step was saved when the bad ones began
                # a card that failed may not give its weights; its error is the news
                with contextlib.suppress(Exception):
                    trainer.save_if_whole()
            raise
        # also where the signal went to another handler than ours, as a library may put one
        if trainer.state.global_step < recipe.steps:
            raise _interrupted(run, f"training was interrupted after step {trainer.state.global_step} and saved")
        session.model.eval()
        require_finite(policy.trainable(session.model).items(), "the adapter")
        _save(session, run.adapter)


def _newest(run: RunFolder, folder: Path, what: str) -> checkpoint.Checkpoint | None:
    """The newest whole checkpoint, told as an event."""
    newest = checkpoint.newest(
        folder, lambda torn: run.event("resume", f"checkpoint {torn.name} is torn; the one before is used")
    )
    if newest is not None and here().is_main:
        run.event("resume", f"{what} goes on from step {newest.step}", step=newest.step)
    return newest


def _is_saved(session: Session, folder: Path) -> bool:
    """Whether `_save` has filled the folder, as the first process sees it: what follows all must do alike.

    A torn one is told and counts as none: it is made again, and replaced then.
    """
    there = session.processes.is_main and folder.is_dir()
    whole = session.processes.as_main_says(there and saved.is_whole(folder))
    if there and not whole:
        record.tell_once(
            session.run, "resume", f"{folder.name}/ is torn; it is made again from what was made before it"
        )
    return whole


def _save(session: Session, folder: Path) -> None:
    if session.processes.is_main:
        policy.save(session.model, folder, session.loaded.name)
    session.processes.wait()


def _interrupted(run: RunFolder, fact: str) -> Interrupted:
    return Interrupted(fact, help=f"go on with: grpo-portable train --resume --out {run.word}")


def main(arguments: list[str] | None = None) -> int:
    """Run RUN_DIR; 0 when it is done, else the exit code of its kind of failure."""
    folder = (arguments if arguments is not None else sys.argv[1:])[0]
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = open_run(Path(folder), here().rank)
    stop = StopSignal()
    quiet.libraries()
    try:
        with stop.installed():
            try:
                run_stages(run, stop)
            except KeyboardInterrupt:
                raise _interrupted(run, "the run was interrupted; what it has made so far is kept") from None
        return 0
    except BaseException as error:  # the process edge: whatever ended the run must reach the supervisor
        kind = failure.write(run, error)
        with contextlib.suppress(OSError):  # the log is on the same disk: what the supervisor reads there comes first
            print(f"worker: {kind}: {error}", file=sys.stderr, flush=True)
            if kind != "disk" and not isinstance(error, GrpoPortableError):
                traceback.print_exc()
        return EXIT.get(kind, 1)


def leave(code: int) -> None:
    """End the process. With vLLM in it at once: freeing its CUDA memory while the interpreter is taken down may crash."""
    if "vllm" in sys.modules:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
