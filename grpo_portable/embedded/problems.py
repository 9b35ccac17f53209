"""Grade-school arithmetic word problems in GSM8K's form: a question, a worked answer, `#### n` on its last line.

What a problem is, is its template and its numbers; names, objects and wording are drawn on top. The splits part the
(template, numbers) pairs by hash, so no question of `dev` or `test` has a twin in `train` under other names. `dev` is for
choosing (the model, the settings), `test` for reports only.

Knows nothing of torch or of the model.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from grpo_portable.embedded.templates import BOXES, PEOPLE, TEMPLATES, THINGS, Template
from grpo_portable.errors import DataError

SPLITS = ("train", "dev", "test")
LARGEST = 99  # no number in a problem or on the way to its answer is larger
REPORT_COUNT, REPORT_SEED = 300, 0  # the questions of a report: generate("test", REPORT_COUNT, REPORT_SEED)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Calculation:
    """One step, worked: sentence with {calc}, numbers, operation, result."""

    sentence: str
    left: int
    operation: str
    right: int
    result: int

    @property
    def formula(self) -> str:
        return f"{self.left} {self.operation} {self.right} = {self.result}"

    def __str__(self) -> str:
        return self.sentence.replace("{calc}", self.formula)


@dataclass(frozen=True)
class Problem:
    template: Template
    numbers: tuple[int, ...]  # a, b and perhaps c
    question: str
    words: dict[str, str] = field(compare=False)  # what stands for {A}, {things}, ...

    @property
    def answer(self) -> str:
        """The worked answer, one sentence a step, then `#### n`."""
        return worked(self.calculations())

    def calculations(self, operations: Sequence[str] = ()) -> list[Calculation]:
        """The steps worked with the template's operations, or with others in their place; DataError if one cannot be done."""
        steps = self.template.steps
        done = solve(self.template, self.numbers, operations or [step[2] for step in steps])
        if done is None:
            raise DataError(f"problem `{self.question}` has no answer with operations {list(operations)}")
        return [
            Calculation(_fill(step[0], self.words), left, operation, right, result)
            for step, (left, operation, right, result) in zip(steps, done, strict=True)
        ]


def generate(split: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` problems of a split as {question, answer}, no (template, numbers) twice; the same for the same arguments."""
    return [{"question": problem.question, "answer": problem.answer} for problem in draw_distinct(split, count, seed)]


def draw_distinct(split: str, count: int, seed: int = 0) -> list[Problem]:
    """As `generate`, as Problem records. DataError if the split has not that many."""
    if split not in SPLITS:
        raise DataError(f"the arithmetic problems have no split `{split}`", help=f"choose one of {', '.join(SPLITS)}")
    rng = random.Random(f"arithmetic {split} {seed}")
    found: dict[tuple[str, tuple[int, ...]], Problem] = {}
    misses = 0
    while len(found) < count:
        problem = draw(split, rng)
        if found.setdefault((problem.template.name, problem.numbers), problem) is problem:
            misses = 0
        elif (misses := misses + 1) > 300:
            raise DataError(
                f"the {split} split of the arithmetic problems ends before {count} problems", help="ask for fewer"
            )
    return list(found.values())


def draw(split: str, rng: random.Random) -> Problem:
    """One problem of a split; every template is equally likely."""
    template = _pick(rng, TEMPLATES)
    while True:
        numbers = tuple(low + int(rng.random() * (high - low + 1)) for low, high in template.ranges)
        if split_of(template.name, numbers) == split and solve(template, numbers, [step[2] for step in template.steps]):
            break
    words = _words(rng) | dict(zip("abc", map(str, numbers), strict=False))
    return Problem(template, numbers, _fill(_pick(rng, template.questions), words), words)


def split_of(name: str, numbers: Sequence[int]) -> str:
    """The split a problem belongs to, whatever its wording: 80 % train, 10 % dev, 10 % test."""
    key = f"{name}|{','.join(map(str, numbers))}".encode()
    tenth = hashlib.blake2b(key, digest_size=8).digest()[0] % 10
    return {0: "test", 1: "dev"}.get(tenth, "train")


def solve(
    template: Template, numbers: Sequence[int], operations: Sequence[str]
) -> list[tuple[int, str, int, int]] | None:
    """(left, operation, right, result) of each step; None if a result is not a whole number from 1 to LARGEST."""
    known = dict(zip("abc", numbers, strict=False)) | {str(n): n for n in template.constants}
    done = []
    for (_, left_name, _, right_name), operation in zip(template.steps, operations, strict=True):
        left, right = known[left_name], known[right_name]
        result = _calculate(left, operation, right)
        if result is None or not 1 <= result <= LARGEST:
            return None
        done.append((left, operation, right, result))
        known["r"] = result
    return done


def worked(calculations: Sequence[Calculation]) -> str:
    """Sentences and final line for calculations, whether they are the right ones or not."""
    return "\n".join([*map(str, calculations), f"#### {calculations[-1].result}"])


def _calculate(left: int, operation: str, right: int) -> int | None:
    if operation == "/":
        return left // right if right and left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def _words(rng: random.Random) -> dict[str, str]:
    people: list[tuple[str, str, str]] = []
    while len(people) < 3:
        person = _pick(rng, PEOPLE)
        if person not in people:
            people.append(person)
    (first, he, him), (second, _, _), (third, _, _) = people
    box, boxes = _pick(rng, BOXES)
    words = {"A": first, "B": second, "C": third, "he": he, "him": him, "He": he.capitalize()}
    return words | {"things": _pick(rng, THINGS), "box": box, "boxes": boxes}


def _fill(text: str, words: dict[str, str]) -> str:
    for key, word in words.items():
        text = text.replace("{" + key + "}", word)
    return text


def _pick(rng: random.Random, items: Sequence[_T]) -> _T:
    # Only seeding and random() are promised to stay the same between Python versions; choice() is not.
    return items[int(rng.random() * len(items))]
