"""The tag rewards in the form that was published, kept so that tests can show what each fault of it pays.

Written anew from the published behaviour (public GRPO notebooks with these tags, set c; the answer tier also in set b's
values): one regular expression for the whole format with MULTILINE, another from the first opening tag to any number,
`float` on what they catch, a ratio for near misses. Not part of the product.
"""

import re

END, OPEN, CLOSE, EOS = "<end_working_out>", "<SOLUTION>", "</SOLUTION>", "</s>"
FORMAT = re.compile(rf"{END}.*?{OPEN}(.+?){CLOSE}[\s]{{0,}}(?:{re.escape(EOS)})?[\s]{{0,}}$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(OPEN + r".*?[\s]{0,}([-]?[\d\.\,]{1,})", re.MULTILINE | re.DOTALL)


def exact(text: str) -> float:
    return 3.0 if FORMAT.search(text) else 0.0


def approximate(text: str) -> float:
    return sum(0.5 if text.count(tag) == 1 else -1.0 for tag in (END, OPEN, CLOSE))


def answer(text: str, gold: str) -> float:
    match = FORMAT.search(text)
    if match is None:
        return -2.0
    guess = match.group(1)
    if guess == gold:
        return 5.0
    if guess.strip() == gold.strip():
        return 3.5
    try:
        ratio = float(guess) / float(gold)
    except (ValueError, ZeroDivisionError):
        return -4.5
    return 2.0 if 0.9 <= ratio <= 1.1 else 1.5 if 0.8 <= ratio <= 1.2 else -2.5


def number(text: str, gold: str) -> float:
    match = NUMBER.search(text)
    if match is None:
        return -2.5
    try:
        return 3.5 if float(match.group(1).replace(",", "")) == float(gold) else -1.5
    except ValueError:
        return 0.0


def total(text: str, gold: str) -> float:
    return exact(text) + approximate(text) + answer(text, gold) + number(text, gold)
