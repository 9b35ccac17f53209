"""The command line: train, eval, score, report, compare, recipes, bench.

Imports nothing heavy: torch, matplotlib and the doctor's probes are reached inside the commands that need them. Results go to
stdout, progress to stderr. Exit codes: 0 done, 1 the run failed or no path is open, 2 a user's mistake, 130 interrupted.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_portable.errors import GrpoPortableError, PathClosed, RunFolderError, UsageError, wrapped
from grpo_portable.recipe import parsed
from grpo_portable.run.stops import as_interrupts

app = typer.Typer(
    name="grpo-portable",
    help="Train a language model with GRPO on the machine you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one field of the recipe")
]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="a recipe's name or file; see `grpo-portable recipes`")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="choose path, model and sizes by what this machine can do")
    ] = False,
    model: Annotated[str | None, typer.Option(help="hub id, folder, or GGUF file, instead of the recipe's")] = None,
    data: Annotated[str | None, typer.Option(help="hub id or JSONL/parquet/CSV file, instead of the recipe's")] = None,
    settings: Settings = None,
    path: Annotated[str | None, typer.Option(help="take this path and no better one")] = None,
    out: Annotated[
        Path | None, typer.Option(help="run folder; default runs/<recipe, or data and model>-<time>")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="stop after plan, memory and minutes; fails where a start would be refused"),
    ] = False,
    facts: Annotated[
        str | None, typer.Option(metavar="FILE", help="with --dry-run: plan for the machine of this facts file")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out (default: the newest)")] = False,
    retry_fast: Annotated[
        bool, typer.Option("--retry-fast", help="with --resume: try the path the run began with once more")
    ] = False,
    no_fallback: Annotated[bool, typer.Option("--no-fallback", help="stop instead of going one path lower")] = False,
    gpus: Annotated[
        str | None, typer.Option(metavar="0,1", help="train on these, one process each; default: the equal ones")
    ] = None,
) -> None:
    """Train: diagnose, plan, evaluate the base, GRPO, evaluate the tuned, report."""
    from grpo_portable import launch
    from grpo_portable.plan import gpus as chosen_gpus

    named = chosen_gpus.parsed(gpus)
    if resume:
        chosen = {"a recipe": recipe, "--model": model, "--data": data, "--set": settings, "--path": path}
        _settled_already("run", {**chosen, "--facts": facts, "--dry-run": dry_run})
        launch.resume(out, fallback=not no_fallback, retry_fast=retry_fast, gpus=named)
        return
    if retry_fast:
        raise UsageError("--retry-fast goes on with a run", help="add --resume, and --out RUN unless it is the newest")
    overrides = [*list(settings or []), *_as_settings(model=model, data=data, path=path)]
    code = launch.train(
        recipe,
        auto=auto,
        overrides=overrides,
        out=out,
        dry_run=dry_run,
        fallback=not no_fallback,
        facts_file=facts,
        gpus=named,
    )
    raise typer.Exit(code)


@app.command("launch")
def launch_nodes(
    recipe: Annotated[str, typer.Argument(help="a recipe's name or file")],
    nodes: Annotated[int, typer.Option(min=2, help="machines, with the run folder on a file system all of them see")],
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", min=1, help="default: the equal ones of this machine, or of --facts"),
    ] = None,
    facts: Annotated[
        str | None, typer.Option(metavar="FILE", help="a node's facts, saved there by `grpo-doctor --save-facts`")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="run folder; default runs/<recipe, or data and model>-<time>")
    ] = None,
    hours: Annotated[int, typer.Option(min=1, help="time limit of the job")] = 24,
    only_print: Annotated[bool, typer.Option("--print", help="print both files and write nothing")] = False,
) -> None:
    """Write the accelerate configuration and the Slurm script of a run on several machines."""
    from grpo_portable.cluster import job

    typer.echo(
        job.launch_nodes(
            recipe,
            count=nodes,
            gpus=gpus_per_node,
            overrides=list(settings or []),
            out=out,
            facts_file=facts,
            hours=hours,
            only_print=only_print,
        )
    )


@app.command("eval")
def evaluate(
    model: Annotated[
        str | None, typer.Option(help="hub id, folder, GGUF file, or `embedded`; default: that of the adapter's run")
    ] = None,
    data: Annotated[str | None, typer.Option(help="held-out questions: hub id, file, or `arithmetic`")] = None,
    adapter: Annotated[Path | None, typer.Option(help="adapter folder to put on the model, or its run")] = None,
    base_too: Annotated[
        bool, typer.Option("--base-too", help="ask the model without the adapter as well, and give the delta")
    ] = False,
    recipe: Annotated[
        str | None, typer.Option(help="recipe whose prompt and limits are used; default: that of the adapter's run")
    ] = None,
    settings: Settings = None,
    path: Annotated[str | None, typer.Option(help="path to take; default: the best open one")] = None,
    out: Annotated[Path | None, typer.Option(help="run folder; default runs/eval-<time>")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the answers in --out")] = False,
) -> None:
    """Evaluate any model on any questions, with the prompt, extractor and statistics of training."""
    from grpo_portable import launch
    from grpo_portable.eval_task import eval_task

    if resume:
        chosen = {"--model": model, "--data": data, "--adapter": adapter, "--recipe": recipe, "--set": settings}
        _settled_already("evaluation", {**chosen, "--path": path})
        launch.resume_evaluation(out, base_too=base_too)
        return
    changes = [*list(settings or []), *_as_settings(path=path)]
    task = eval_task(recipe, model=model, data=data, adapter=adapter, settings=changes, base_too=base_too)
    launch.evaluate(task, out=out)


def _as_settings(**options: str | None) -> list[str]:
    """Options that stand for a field of the recipe, as settings. RecipeError names the option of a value it cannot have."""
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        parsed([f"{key}={value}"], f"--{key}")
    return [f"{key}={value}" for key, value in given.items()]


def _settled_already(what: str, chosen: Mapping[str, Any]) -> None:
    """UsageError for anything that `--resume` would otherwise pass over in silence."""
    named = next((name for name, value in chosen.items() if value), None)
    if named is not None:
        raise UsageError(
            f"--resume does not go with {named}",
            because=f"the {what} goes on as it was settled",
            help=f"leave {named} out, or start another {what} without --resume",
        )


@app.command()
def score(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Score the saved generations of a run again, offline, and print the scores as JSON."""
    import json

    from grpo_portable.run import folder as run_folder
    from grpo_portable.scores import scoring

    folder = run_folder.open_run(run)
    scoring.require_answers(folder)
    typer.echo(json.dumps(scoring.score_run(folder), indent=1, ensure_ascii=False))


@app.command()
def report(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Rebuild report.md and the charts of a run from its files alone."""
    from grpo_portable.report import page
    from grpo_portable.run import folder as run_folder

    typer.echo(str(page.write_report(run_folder.open_run(run))))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="two or more run folders", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text")] = False,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the runs' reward curves as a PNG")] = None,
) -> None:
    """Two runs: the paired difference of their answers. More: memory, time, accuracy and reward side by side."""
    import json

    from grpo_portable.report import compare, side_by_side
    from grpo_portable.run import folder as run_folder

    if len(runs) < 2:
        raise UsageError("one run cannot be compared", help="name two or more run folders")
    folders = [run_folder.open_run(run) for run in runs]
    comparison: Any = compare.compare(*folders) if len(folders) == 2 else side_by_side.side_by_side(folders)
    typer.echo(json.dumps(comparison.to_json(), indent=1, ensure_ascii=False) if as_json else comparison.to_text())
    if chart is not None:
        from grpo_portable.report import charts

        if charts.curves(chart, side_by_side.side_by_side(folders).curves) is None:
            raise UsageError("no chart was drawn", because="matplotlib is not installed or no run has steps")
        typer.echo(f"wrote {chart}", err=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a finished run")],
    to: Annotated[str, typer.Option("--to", help="adapter, merged or gguf")],
    out: Annotated[Path | None, typer.Option(help="folder to write; default RUN/export/...")] = None,
    quantize: Annotated[str, typer.Option(help="of a GGUF file: q8_0, f16 or q4_k_m")] = "q8_0",
    base: Annotated[
        str | None, typer.Option(help="where the base model lies now, if not where the recipe says")
    ] = None,
    dtype: Annotated[str, typer.Option(help="of a merged model: auto, bfloat16, float16 or float32")] = "auto",
    check: Annotated[int, typer.Option(min=0, help="held-out questions the export is asked; 0 asks none")] = 20,
) -> None:
    """Write a run's adapter, merged model or GGUF file, load it again, and compare its answers with the run's."""
    from grpo_portable import export
    from grpo_portable.run import folder as run_folder

    for name, value, known in (
        ("--to", to, export.KINDS),
        ("--quantize", quantize, export.QUANTIZE),
        ("--dtype", dtype, ("auto", "bfloat16", "float16", "float32")),
    ):
        if value not in known:
            raise UsageError(f"{name} cannot be `{value}`", help=f"one of: {', '.join(known)}")
    folder = run_folder.open_run(run)
    done = export.export(folder, to, out=out, quantize=quantize, base=base, dtype=dtype, count=check)
    typer.echo(f"wrote {done.folder}")
    typer.echo("\n".join(wrapped(f"check: {done.check}", "  ")) if done.check else "not checked")


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="show this recipe, or copy it with --copy")] = None,
    copy: Annotated[Path | None, typer.Option("--copy", help="write the recipe to this file")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="names and purposes only; looks at nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the list as JSON")] = False,
    facts: Annotated[str | None, typer.Option(metavar="FILE", help="for the machine of this facts file")] = None,
) -> None:
    """List the recipes with what fits here, on which path and for how long; show one, or copy one out."""
    from grpo_portable import launch
    from grpo_portable.plan import catalogue

    if name is None and copy is not None:
        raise UsageError("--copy copies one recipe", help=f"name it: grpo-portable recipes NAME --copy {copy}")
    if name is not None and (plain or as_json or facts):
        option = "--plain" if plain else "--json" if as_json else "--facts"
        raise UsageError(f"{option} is for the list of recipes", help="leave the name out")
    if name is None:
        typer.echo(launch.recipes(plain=plain, as_json=as_json, facts_file=facts))
    elif copy is None:
        typer.echo(catalogue.find(name).read_text(encoding="utf-8"), nl=False)
    else:
        catalogue.copy_out(name, copy)
        typer.echo(f"wrote {copy}; run it with: grpo-portable train {copy} --auto")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure rollout engines side by side, or a whole step beside TRL's: `bench rollout --shape qwen3-4b --engines
    portable,reference,vllm --json`, `bench step --shape qwen3-4b --path bf16-hf`."""
    from grpo_portable.bench import cli

    raise typer.Exit(cli.main(context.args))


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"grpo-portable {version('grpo-portable')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def _not_installed(error: ModuleNotFoundError) -> PathClosed | None:
    """What to tell of a package that an export or a measurement needs; None where the module is our own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "grpo_portable", "grpo_portable_recipes", "doctor"):
        return None
    return PathClosed(
        f"{package} is not installed",
        because="the base install is only the doctor, so that the right torch can be chosen first",
        help="`grpo-doctor --install-plan` prints the commands for this machine",
    )


OTHER_PLACE = {  # command → where else it can write
    "export": "another --out",
    "compare": "another file for --chart",
    "recipes": "another file for --copy",
    "report": "a copy of the run",
    "score": "a copy of the run",
}


def _place_help(file: Path, command: str) -> str:
    there = next((folder for folder in file.absolute().parents if folder.is_dir()), file.parent)
    return f"make `{there}` a folder that can be written, or take {OTHER_PLACE.get(command, 'another place')}"


def _where_commands_lie(error: GrpoPortableError) -> list[str]:
    """How the commands that an error's help names come onto PATH, where this one was started by the path of its file."""
    folder = Path(sys.argv[0]).parent
    if "grpo-" not in (error.help or "") or shutil.which("grpo-portable") or not (folder / "activate").is_file():
        return []
    return [f"(first: . {folder / 'activate'})"]


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; errors a user can act on are one to three lines on stderr and an exit code."""
    try:
        try:
            with as_interrupts():
                app(arguments)
        except OSError as error:
            if not error.filename:
                raise
            raise RunFolderError(
                f"`{error.filename}` cannot be used",
                because=error.strerror,
                help=_place_help(Path(str(error.filename)), *(sys.argv[1:] if arguments is None else arguments)[:1]),
            ) from error
        except ModuleNotFoundError as error:
            if told := _not_installed(error):
                raise told from error
            raise
    except GrpoPortableError as error:
        for line in [*error.shown(), *_where_commands_lie(error)]:
            print(line, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
