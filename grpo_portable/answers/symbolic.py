"""Equality of answers that are no numbers (`x^2 + 1`, `\\frac{\\pi}{2}`, intervals), by math-verify under a time limit.

An extra beside `extractor.py`, never instead of it: what both can read as numbers is compared exactly there. math-verify
and the sympy behind it can run for minutes or for ever on hostile text, and their own time limit uses signals, which do
not work in threads; so they run in a child process that is killed when the time is over.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import subprocess
import sys
import threading
from typing import IO, Any

from grpo_portable.answers.phrases import read_phrase
from grpo_portable.errors import RecipeError

MAX_CHARACTERS = 2_000  # longer answers are not looked at
KILL_LIMIT_S = 10.0
MAX_STARTS = 2  # in a row that fail: a child that cannot import math-verify would not at the next question either
ROUNDING = 12  # digits that numeric forms must agree in; the default of 6 would pay 0.333333 for 1/3


class SymbolicChecker:
    """A child process that answers one question at a time; started when first asked, again after it was killed."""

    def __init__(self, time_limit_s: float = 5.0, start_limit_s: float = 60.0) -> None:
        self.time_limit_s, self.start_limit_s = time_limit_s, start_limit_s
        self._child: subprocess.Popen[str] | None = None
        self._failed_starts = 0
        self._answers: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()
        self._asked: tuple[str, str] | None = None
        self._verdict: bool | None = None

    def require(self) -> None:
        """RecipeError when math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise RecipeError(
                "`symbolic_correctness` needs math-verify, which is not installed",
                help="pip install 'grpo-portable[math]'",
            )

    def equal(self, answer: str, gold: str) -> bool | None:
        """Whether the two are equal expressions; None when the gold cannot be read in time.

        An answer that cannot be checked in time is not equal: otherwise hostile ones would be excused.
        """
        mine, truth = read_phrase(answer).value, read_phrase(gold).value
        if mine is not None and truth is not None:
            return mine == truth
        if len(gold) > MAX_CHARACTERS:
            return None
        if not answer.strip() or len(answer) > MAX_CHARACTERS:
            answer = ""
        with self._lock:
            # the lenient reading mostly asks what the strict one just did
            if self._verdict is None or self._asked != (answer, gold):
                self._verdict, self._asked = self._ask({"answer": answer, "gold": gold}), (answer, gold)
            return self._verdict

    def close(self) -> None:
        """End the child process; a later question starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILL_LIMIT_S)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> SymbolicChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: dict[str, str]) -> bool | None:
        if self._child is None or self._child.poll() is not None:
            self.close()
            if self._failed_starts >= MAX_STARTS or not self._start():
                return None
        if not self._say(json.dumps(question)) or self._reply(self.time_limit_s) != "gold":
            return None
        return self._reply(self.time_limit_s) == "equal"

    def _say(self, line: str) -> bool:
        pipe = self._child.stdin if self._child else None
        try:
            if pipe is not None:
                pipe.write(line + "\n")
                pipe.flush()
        except OSError:  # the child ended
            self.close()
            return False
        return pipe is not None

    def _start(self) -> bool:
        command = [sys.executable, "-m", "grpo_portable.answers.symbolic"]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._child, self._answers = child, queue.Queue()
        threading.Thread(target=_pump, args=(child.stdout, self._answers), daemon=True).start()
        ready = self._reply(self.start_limit_s) == "ready"
        self._failed_starts = 0 if ready else self._failed_starts + 1
        return ready

    def _reply(self, limit_s: float) -> str:
        """The child's next line, "" when it ended or the time is over; then it is killed."""
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            line = ""
        if not line:
            self.close()
        return line.strip()


def _pump(pipe: IO[str], answers: queue.Queue[str]) -> None:
    try:
        for line in pipe:
            answers.put(line)
    except ValueError:  # the pipe was closed under the thread
        pass
    answers.put("")


def _serve() -> None:
    """The child. A question a line on stdin; on stdout `gold` when that was read (else `none`), then `equal` or `different`."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    out, sys.stdout = sys.stdout, sys.stderr  # whatever the libraries print is no reply

    def say(word: str) -> None:
        print(word, file=out, flush=True)

    def expressions(text: str) -> list[Any]:
        config = [LatexExtractionConfig(), ExprExtractionConfig()]
        return parse(f"${text}$", extraction_config=config, parsing_timeout=None, raise_on_error=False)

    say("ready")
    for line in sys.stdin:
        question = json.loads(line)
        truth = expressions(question["gold"])
        say("gold" if truth else "none")
        if not truth:
            continue
        try:
            mine = expressions(question["answer"]) if question["answer"] else []
            equal = bool(mine) and verify(
                truth, mine, float_rounding=ROUNDING, timeout_seconds=None, raise_on_error=False
            )
        except Exception:  # sympy raises what it likes on odd text; such an answer is not equal to anything
            equal = False
        say("equal" if equal else "different")


if __name__ == "__main__":
    _serve()
