"""Everything a user can be told went wrong, one class per cause.

    GrpoPortableError            fact, because, help; exit code 1
    ├── UsageError        2      the command line or a recipe says something impossible
    │   ├── RecipeError          unknown key, wrong type, values that do not combine
    │   ├── DataError            a data set that cannot be read or holds no usable rows
    │   ├── ModelError           a model that cannot be found, read or reached
    │   ├── ServerError          a vLLM server that does not answer, or is not set up for this run
    │   └── RunFolderError       the output folder cannot be used
    ├── PathClosed        1      the path asked for is closed on this machine, or none is open
    ├── RewardError       1      rewards that raise or return no number too often
    ├── EngineError       1      a rollout engine that could not start or died; the ladder may go on below it
    │   └── EngineUnsupported    this engine does not know this model; another one does
    ├── NonFiniteError    1      loss or gradient was not finite too often
    ├── ExportError       1      an export that cannot be written, or does not answer as the run's adapter did
    └── Interrupted     130      Ctrl-C or SIGTERM after the run was saved

`fact` is what happened, `because` why it is so, `help` what to do; never advice inside the fact. `because` is often a sentence
of somebody else's, a wall's or a library's: it is kept as a clause. A user error is never retried on a lower rung; an engine
error is.
"""

from __future__ import annotations

import re
import shutil

WIDTH = 80
# First words that are never a name. What is not among them may be one, and keeps its capital.
_OPENER = re.compile(
    r"(?:A|All|An|And|Another|Any|As|At|Before|Both|By|Can|Can't|Cannot|Code|Could|Each|Every|File|For|Free|From|If|In"
    r"|Installed|Is|It|Its|More|Neither|No|Nobody|None|Not|Nothing|Of|On|Once|One|Only|Or|Other|Packages|Permission|Read-only"
    r"|Since|Some|That|The|There|These|This|Those"
    r"|Three|Two|What|When|Where|While|With|Within|Without)(?=[ ,;]|$)"
)
# Between backticks, or from the program's name to the end of the clause: a command; else a word.
_UNBROKEN = re.compile(
    r"[^\s`]*`[^`\n]*`\S*|(?:grpo-portable|grpo-doctor|pip install) [^\s;,]+(?: [^;,]+?)*?(?=[;,] |\s*$)[;,]?|\S+"
)
_ERRNO = re.compile(r"^\[Errno \d+\] ")


def clause(text: str) -> str:
    """A sentence as it goes on after `because`: no capital of its own, no full stop, no errno; a name keeps its capital."""
    text, of_system = _ERRNO.subn("", text.strip())
    if of_system or _OPENER.match(text):
        text = text[:1].lower() + text[1:]
    return text if text.endswith("..") else text.removesuffix(".")


def brief(text: str, limit: int = 500) -> str:
    """Somebody else's text in one line of at most `limit` characters, cut after a whole sentence or else a whole word."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    whole = line[: limit - 4]
    if (end := whole.rfind(". ")) > limit // 3:
        return whole[: end + 1]
    return whole.rpartition(" ")[0] + " ..." if " " in whole else whole + "..."


def wrapped(text: str, indent: str = "", width: int | None = None) -> list[str]:
    """A sentence in lines of at most `width` columns, 80 or what the terminal has; `indent` leads all but the first.

    A command is never broken, so that it can be copied: it stands whole on a line, however long.
    """
    width = width or min(WIDTH, shutil.get_terminal_size().columns)
    lines = [text[: len(text) - len(text.lstrip())]]
    for part in _UNBROKEN.findall(text):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(part) > width:
            lines.append(indent + part)
        else:
            lines[-1] += (" " if lines[-1].strip() else "") + part
    return lines


class GrpoPortableError(Exception):
    exit_code = 1
    label = "error"

    def __init__(self, fact: str, *, because: str | None = None, help: str | None = None) -> None:
        super().__init__(fact)
        self.fact, self.because, self.help = fact, None if because is None else clause(because), help

    def __reduce__(self) -> tuple:
        return (_rebuild, (type(self), self.fact, self.because, self.help))

    def __str__(self) -> str:
        return f"{self.fact.removesuffix('.')}, because {self.because}" if self.because else self.fact

    def lines(self) -> list[str]:
        """What a terminal shows: `error: fact, because ...` and, when there is one, `help: ...`."""
        return [f"{self.label}: {self}"] + ([f"help: {self.help}"] if self.help else [])

    def shown(self, width: int | None = None) -> list[str]:
        """`lines`, wrapped."""
        return [line for text in self.lines() for line in wrapped(text, "  ", width)]


def _rebuild(cls: type[GrpoPortableError], fact: str, because: str | None, help: str | None) -> GrpoPortableError:
    return cls(fact, because=because, help=help)


class UsageError(GrpoPortableError):
    exit_code = 2


class RecipeError(UsageError):
    pass


class DataError(UsageError):
    pass


class ModelError(UsageError):
    pass


class ServerError(UsageError):
    pass


class RunFolderError(UsageError):
    pass


class PathClosed(GrpoPortableError):
    pass


class RewardError(GrpoPortableError):
    pass


class EngineError(GrpoPortableError):
    pass


class EngineUnsupported(EngineError):
    pass


class NonFiniteError(GrpoPortableError):
    pass


class ExportError(GrpoPortableError):
    pass


class Interrupted(GrpoPortableError):
    exit_code = 130
    label = "stopped"  # as the user wished: no error
