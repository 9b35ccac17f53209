"""Why ours and lm-evaluation-harness read different numbers: one table of the causes met, and every difference published.

lm-eval itself is not needed. `LM_EVAL` holds what its gsm8k task (version 3.0) looks for and which match it takes; that
lm-eval as installed reads so is shown by reports/lm-eval-agreement/compare.py, which runs it.
"""

import importlib.util
import re
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from grpo_portable.answers.extractor import read, read_lenient
from grpo_portable.run.folder import read_lines

REPORTS = Path(__file__).parents[2] / "reports"
STYLE = "gsm8k_marker"
LM_EVAL = {
    "strict-match": (re.compile(r"#### (\-?[0-9\.\,]+)"), 0),
    "flexible-extract": (re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"), -1),
}
STRICT, FLEXIBLE = LM_EVAL
SAME = None


def load(name: str) -> ModuleType:
    """A module that lies beside the report."""
    spec = importlib.util.spec_from_file_location(name, REPORTS / "lm-eval-agreement" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs(text: str, filter_: str) -> str:
    pattern, take = LM_EVAL[filter_]
    found = [next(filter(None, m.groups())) for m in pattern.finditer(text)]
    return found[take] if found else "[invalid]"


def ours(text: str, filter_: str) -> str | None:
    value = (read(text, STYLE) if filter_ == STRICT else read_lenient(text, STYLE)).value
    return None if value is None else str(value)


# filter, text, what lm-eval reads, what ours reads, cause (SAME: both read one number)
CASES = [
    (STRICT, "9 * 2 = 18\n#### 18", "18", "18", SAME),
    (FLEXIBLE, "9 * 2 = 18\n#### 18", "18", "18", SAME),
    # a ratio or a time
    (FLEXIBLE, "It is a ratio, which is 1:1.\nSo, the answer is 1:1.", "1.", None, "ratio"),
    (STRICT, "so 5:00 pm + 1 hour = 5:05 pm\n#### 5:05", "5", None, "ratio"),
    # an operand of what the length limit cut
    (FLEXIBLE, "Now, we can add up the total number of eggs: 1 + 4 + 2", "2", None, "calculation"),
    (FLEXIBLE, "The total for the second dog to walk 1 mile is 1 day * 4", "4", None, "calculation"),
    (FLEXIBLE, "So 960 x 2 = 1840 bags.\nHe needs to transport 648 x 2 = ", "2", None, "calculation"),
    (STRICT, "#### 12 + 12 = 24\n#### 12 + 12 = 24\n#### 12 + 1", "12", None, "calculation"),
    # a sentence on its way to a number
    (FLEXIBLE, "We can do this by multiplying 5 by 2, which", "2,", None, "sentence"),
    (FLEXIBLE, "the number of red jelly beans that are less than 9", "9", None, "sentence"),
    # the first marker or the last
    (STRICT, "#### 3\nThe answer is 3.\n#### 8", "3", "8", "several-markers"),
    (FLEXIBLE, "#### 3\nThe answer is 3.\n#### 8", "8", "8", SAME),
    # half of a fraction
    (STRICT, "62/108 = 1/3 of the toys.\n#### 1/3", "1", "1/3", "fraction"),
    (FLEXIBLE, "62/108 = 1/3 of the toys.\n#### 1/3", "3", "1/3", "fraction"),
    # an answer in words, and text after it
    (FLEXIBLE, "The answer is 2.\nThe total hours she slept is 2 + 2 = 4 hours.", "4", "2", "said-before"),
    # commas that group nothing
    (STRICT, "24,00000+12,00000=36,00000 feet.\n#### 36,00000", "36,00000", None, "malformed"),
    # a multiple of an unknown
    (FLEXIBLE, "the number of eggs in the second basket is 2x.\n\nSo, the answer is 2x.", "2", None, "unknown"),
    # found by the comparison, mended in ours
    (STRICT, "33 more.\n\n#### 3\n\n#### #### \n#### \n#### ", "3", "3", SAME),
    (FLEXIBLE, "33 more.\n\n#### 3\n\n#### #### \n#### \n#### ", "3", "3", SAME),
    (STRICT, "#### 1000\n#### 1000\n#### 10", "1000", "1000", SAME),
    (FLEXIBLE, "#### 1000\n#### 1000\n#### 10", "10", "1000", "repetition"),
    (STRICT, "#### 20\n#### 20\n####", "20", "20", SAME),
    # not met in these answers, known of lm-eval's metric: it compares text
    (STRICT, "#### 18.00", "18.00", "18", "spelling"),
]


@pytest.mark.parametrize(("filter_", "text", "their_reading", "our_reading", "cause"), CASES)
def test_cause(filter_: str, text: str, their_reading: str, our_reading: str | None, cause: str | None) -> None:
    assert theirs(text, filter_) == their_reading
    assert ours(text, filter_) == our_reading
    if cause is SAME:
        assert our_reading == their_reading
        return
    causes = load("causes")
    reading = read(text, STYLE) if filter_ == STRICT else read_lenient(text, STYLE)
    assert causes.cause(filter_, text, reading, their_reading, number(their_reading)) == cause
    assert cause in causes.CAUSES


def number(text: str) -> Fraction | None:
    """What the metric of lm-eval leaves of a match, as a number."""
    try:
        return Fraction(text.replace(",", "").replace("$", "").removesuffix("."))
    except ValueError:
        return None


def test_the_published_differences_are_all_and_as_ours_reads_today() -> None:
    """The answers of the published run, read again: a change of the extractor that makes the report stale fails here."""
    rows = list(read_lines(REPORTS / "lm-eval-agreement" / "disagreements.jsonl"))
    listed = {(row["stage"], row["id"], row["filter"]): (row["ours"], row["theirs"]) for row in rows}
    found = {}
    for stage in ("base", "bootstrap", "tuned"):
        for record in read_lines(REPORTS / "gsm8k-smollm2-135m-h200" / "generations" / f"{stage}.jsonl"):
            for filter_ in LM_EVAL:
                mine, match = ours(record["completion"], filter_), theirs(record["completion"], filter_)
                if (None if mine is None else Fraction(mine)) != number(match):
                    found[stage, record["id"], filter_] = (mine, match)
    assert found == listed


def test_no_published_difference_is_strict_and_right_for_one_only() -> None:
    rows = list(read_lines(REPORTS / "lm-eval-agreement" / "disagreements.jsonl"))
    verdicts = [row for row in rows if row["ours_right"] != row["theirs_right"]]
    assert [(row["filter"], row["cause"]) for row in verdicts] == [
        (FLEXIBLE, cause) for cause in ("ratio", "sentence", "calculation", "calculation", "calculation")
    ]
    assert all(Fraction(row["gold"]) == number(row["theirs"]) and row["ours"] is None for row in verdicts)
