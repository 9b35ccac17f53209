"""`grpo-doctor`: the verdict on this machine, or on a saved one.

Exit codes: 0 a path is open; 1 none is, or `--require PATH` is closed, or `--strict` and there is a warning; 2 usage or an
unreadable facts file (one line on stderr); 3 the doctor itself failed. With `--json` stdout holds the answer alone.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn

from doctor import __version__

if TYPE_CHECKING:
    from doctor.diagnosis import Diagnosis
    from doctor.facts import Facts

OPEN, CLOSED, USAGE, FAILED = 0, 1, 2, 3
SECTIONS = {"driver", "env", "gpus", "host", "packages", "probes", "schema", "toolkit"}  # of a facts file
_LARGEST = 10_000_000  # of a group, a length, a rank


class UsageProblem(Exception):
    """Something the user can put right; the message is one line."""


class Parser(argparse.ArgumentParser):
    """argparse, saying what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"{message} (see grpo-doctor --help)")


def parser() -> Parser:
    from doctor.memory import Sizes

    p = Parser(
        prog="grpo-doctor",
        usage="%(prog)s [--model NAME] [--prove [PATH]] [options]",
        description="What can this machine do for GRPO, which walls block the faster paths, and what helps.",
        epilog="exit codes: 0 a path is open, 1 none is (or the required one is not), 2 usage, 3 the doctor failed",
        allow_abbrev=False,
    )
    p.add_argument("--model", metavar="NAME", help="hub id, folder or GGUF file to plan for")
    p.add_argument("--prove", nargs="?", const="chosen", metavar="PATH", help="run one tiny real step of a path first")
    p.add_argument("--require", metavar="PATH", help="exit 1 unless this path is open")
    p.add_argument("--strict", action="store_true", help="exit 1 on warnings too")

    shown = p.add_argument_group("output")
    form = shown.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the answer as JSON, alone on stdout")
    form.add_argument("--markdown", action="store_true", help="the answer as markdown")
    shown.add_argument("-v", "--verbose", action="store_true", help="every wall and every fact with its source")

    facts = p.add_argument_group("facts")
    facts.add_argument("--facts", metavar="FILE", help="judge a saved machine (- is stdin) and look at nothing here")
    facts.add_argument("--save-facts", metavar="FILE", help="write what was seen; it replays with --facts")
    facts.add_argument(
        "--no-children", action="store_true", help="start no trial of torch, vLLM, unsloth, bitsandbytes"
    )
    facts.add_argument("--timeout", type=_seconds, default=12, metavar="S", help="seconds for each trial step (12)")

    run = p.add_argument_group("the run to plan for")
    for name, default, what in (
        ("group-size", Sizes.group_size, "completions a prompt"),
        ("prompt-tokens", Sizes.prompt_tokens, "longest prompt"),
        ("completion-tokens", Sizes.completion_tokens, "longest completion"),
        ("lora-rank", Sizes.lora_rank, "LoRA rank"),
    ):
        run.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{what} ({default})")

    pages = p.add_argument_group("instead of a diagnosis")
    page = pages.add_mutually_exclusive_group()
    page.add_argument("--explain", metavar="CODE", help="the page of one wall")
    page.add_argument("--list-walls", action="store_true", help="every wall the doctor knows")
    page.add_argument("--what-if", metavar="CARD", help='answer for a card not here ("RTX 4090", or all)')
    page.add_argument("--install-plan", action="store_true", help="the exact set to install here, as commands")
    pages.add_argument("--pip-args", action="store_true", help="with --install-plan: only pip's arguments for torch")
    p.add_argument("--version", action="version", version=f"grpo-doctor {__version__}")
    return p


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number from 0.1 to 3600, not {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {_LARGEST}, not {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; prints to stdout and, for problems, one line to stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(parser().parse_args(arguments))
    except UsageProblem as e:
        return _fail(f"error: {e}", USAGE)
    except BrokenPipeError:  # `grpo-doctor | head`: not the doctor's failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OPEN
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ModuleNotFoundError as e:
        if e.name != "packaging":
            return _crashed(e, arguments)
        return _fail("error: the package `packaging` is missing; install it with: pip install packaging", FAILED)
    except Exception as e:  # process edge: the doctor's own failure has a code of its own
        return _crashed(e, arguments)


def _fail(line: str, code: int) -> int:
    print(f"grpo-doctor: {line}", file=sys.stderr)
    return code


def _crashed(error: Exception, arguments: list[str]) -> int:
    from doctor.privacy import scrub

    if "-v" in arguments or "--verbose" in arguments:
        import traceback

        traceback.print_exception(error)
    said = scrub(f"{type(error).__name__}: {error}")
    return _fail(f"error: the doctor itself failed, please report it: {said} (-v shows where)", FAILED)


def _run(args: argparse.Namespace) -> int:
    from doctor.diagnosis import PATHS

    for option, path in (("--require", args.require), ("--prove", args.prove)):
        if path not in (None, "chosen", *PATHS):
            raise UsageProblem(f"{option}: {path!r} is no path{_near(path, PATHS)}; the paths are {', '.join(PATHS)}")
    if args.pip_args and not args.install_plan:
        raise UsageProblem("--pip-args goes with --install-plan")
    if args.prove and args.facts:
        raise UsageProblem("--prove tries this machine, --facts judges another: give one of them")
    if args.save_facts and args.save_facts != "-" and not os.path.isdir(os.path.dirname(args.save_facts) or "."):
        # before minutes of proof
        raise UsageProblem(f"--save-facts {args.save_facts}: cannot be written: no such folder")
    if args.explain is not None or args.list_walls:
        return _explain(args)
    if args.model and not args.facts:  # another machine has its own files
        from doctor.shape_files import no_model

        if why := no_model(args.model):
            raise UsageProblem(str(why))
    if args.what_if is not None:
        from doctor.what_if import answer

        return _show_page(answer, (args.what_if, args.model), args.json)
    return _diagnose(args)


def _near(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.lower(), words, 1, 0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _explain(args: argparse.Namespace) -> int:
    from doctor.explain import CODES, page

    if args.list_walls:
        width = max(map(len, CODES))
        _out(
            json.dumps(dict(CODES), indent=2)
            if args.json
            else "\n".join(f"{c:<{width}}  {t}" for c, t in CODES.items())
        )
        return OPEN
    code = args.explain.upper()
    if code not in CODES:
        raise UsageProblem(f"no wall is called {args.explain!r}{_near(code.lower(), [c.lower() for c in CODES])}; "
                           "grpo-doctor --list-walls names them all")  # fmt: skip
    _out(json.dumps({"code": code, "title": CODES[code], "page": page(code)}, indent=2) if args.json else page(code))
    return OPEN


def _show_page(make: Any, inputs: tuple[Any, ...], as_json: bool) -> int:
    """Prints a page that knows its own text and JSON; a ValueError or LookupError of its inputs is the user's."""
    try:
        made = make(*inputs)
    except (ValueError, LookupError) as e:
        raise UsageProblem(str(e.args[0] if e.args else e)) from e
    _out(json.dumps(made.to_json(), indent=2) if as_json else made.to_text())
    return OPEN


def _diagnose(args: argparse.Namespace) -> int:
    from doctor.facts import FactsError, facts_to_json

    try:
        facts = _facts(args)
    except FactsError as e:
        raise UsageProblem(f"{args.facts}: {e}") from e
    if args.install_plan:
        return _install_plan(facts, args)
    diagnosis = _judged(facts, args)
    if args.prove:
        diagnosis = _proved(diagnosis, args)
    if args.save_facts:
        _save(args.save_facts, facts_to_json(diagnosis.facts))
    _show(diagnosis, args)
    return exit_code(diagnosis, args.require, args.strict)


def _judged(facts: Facts, args: argparse.Namespace) -> Diagnosis:
    from doctor.memory import Sizes
    from doctor.plan import diagnose

    given = {k: getattr(args, k) for k in ("group_size", "prompt_tokens", "completion_tokens", "lora_rank")}
    return diagnose(facts, args.model, Sizes(**given))


def _proved(diagnosis: Diagnosis, args: argparse.Namespace) -> Diagnosis:
    from doctor.prove import prove

    path = None if args.prove == "chosen" else args.prove
    return prove(diagnosis, lambda facts: _judged(facts, args), path=path, say=_progress)


def exit_code(d: Diagnosis, require: str | None, strict: bool) -> int:
    """0 or 1, as the contract has it."""
    if require is not None:
        state = d.paths.get(require)
        if state is None or not state.open:
            return CLOSED
    elif d.plan.path is None:
        return CLOSED
    return CLOSED if strict and any(not w.closes for w in d.walls) else OPEN


def _install_plan(facts: Facts, args: argparse.Namespace) -> int:
    from doctor import install

    if args.pip_args:
        words = install.torch_requirement(facts)
        _out(json.dumps(words) if args.json else " ".join(words))
        return OPEN
    return _show_page(install.install_plan, (facts,), args.json)


def _facts(args: argparse.Namespace) -> Facts:
    from doctor.facts import FactsError, facts_from_json

    if args.facts is None:
        from doctor.probes import probe

        trials = not args.no_children and not args.install_plan  # what to install depends on nothing that is installed
        return probe(children=trials, timeout_s=args.timeout, say=_progress)
    try:
        if args.facts == "-":
            raw = json.load(sys.stdin)
        else:
            with open(args.facts, encoding="utf-8-sig") as f:
                raw = json.load(f)
    except OSError as e:
        raise UsageProblem(f"{args.facts}: cannot be read: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:  # bad UTF-8, bad JSON, absurd nesting
        raise FactsError(f"not JSON: {str(e).splitlines()[0]}") from e
    # a saved answer of --json carries its facts; so does a report that wraps them
    if isinstance(raw, dict) and isinstance(raw.get("facts"), dict) and not {"host", "gpus", "packages"} & set(raw):
        raw = raw["facts"]
    if isinstance(raw, dict) and raw and not SECTIONS & set(raw):  # {} is a machine of which nothing is known
        raise FactsError(f"no facts file: it holds none of {', '.join(sorted(SECTIONS))}")
    return facts_from_json(raw)


def _save(path: str, facts: dict[str, Any]) -> None:
    text = json.dumps(facts, indent=1) + "\n"
    try:
        if path == "-":
            sys.stderr.write(text)
            return
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        raise UsageProblem(f"--save-facts {path}: cannot be written: {e.strerror or e}") from e


def _progress(line: str) -> None:
    """Says on a terminal what takes long; a pipe or a log gets nothing."""
    if sys.stderr.isatty():
        print(f"... {line}", file=sys.stderr, flush=True)


def _show(d: Diagnosis, args: argparse.Namespace) -> None:
    if args.json:
        from doctor.diagnosis import diagnosis_to_json

        _out(json.dumps(diagnosis_to_json(d), indent=2))
        return
    from doctor import render

    _out(render.markdown(d) if args.markdown else render.text(d, verbose=args.verbose, colour=_colour(sys.stdout)))


def _colour(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _out(text: str) -> None:
    """Prints text on a stream of any encoding: what it cannot show becomes `?`, never an exception."""
    text = text.rstrip("\n")
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
