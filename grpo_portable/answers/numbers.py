"""Numerals and their exact values: `1,234.5`, `2 2/3`, `2½`, `1.8e1` → a rational; and its canonical text.

ASCII digits only, groups of exactly three, one decimal point, proper mixed numbers, a bounded exponent. A numeral that
is almost one of these is not repaired: `1,8`, `1.234,5` and `4 10/3` are refused. No float takes part.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 300  # of a mantissa plus its exponent: longer ones are refused before any integer is built

_VULGAR = "½1/2 ⅓1/3 ⅔2/3 ¼1/4 ¾3/4 ⅕1/5 ⅖2/5 ⅗3/5 ⅘4/5 ⅙1/6 ⅚5/6 ⅐1/7 ⅛1/8 ⅜3/8 ⅝5/8 ⅞7/8 ⅑1/9 ⅒1/10"
VULGAR = {entry[0]: Fraction(entry[1:]) for entry in _VULGAR.split()}

MINUS = "-−‐‑‒﹣－"  # hyphen-minus, U+2212 and their look-alikes
DASHES = re.escape(MINUS)  # for character classes
GROUP = ",\u00a0\u2007\u2009\u202f"  # between groups of three; a plain space separates two numbers
SPACE = "[ \u00a0\u2009\u202f]"
_V = "".join(VULGAR)

NUMERAL = re.compile(f"[0-9{_V}]")
# all that hangs together around digits
TOKEN = re.compile(rf"\.?[0-9](?:[0-9]|[.{GROUP}/⁄](?=[0-9]))*(?:[eE][+{DASHES}]?[0-9]+|[{_V}])?|[{_V}]")
_DECIMAL = re.compile(
    rf"(?P<whole>[0-9]{{1,3}}(?P<separator>[{GROUP}])[0-9]{{3}}(?:(?P=separator)[0-9]{{3}})*(?![0-9])|[0-9]+)?"
    rf"(?P<decimals>\.[0-9]+)?(?:[eE](?P<exponent>[+{DASHES}]?[0-9]+))?"
)
_OVER = re.compile(rf"{SPACE}?[/⁄]{SPACE}?(?P<below>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)")
_MIXED = re.compile(rf"{SPACE}{{1,2}}(?P<above>[0-9]+){SPACE}?[/⁄]{SPACE}?(?P<below>[0-9]+)")
_MIXED_VULGAR = re.compile(rf"{SPACE}?([{_V}])")
_POWER_OF_TEN = re.compile(rf"{SPACE}?[×·⋅*xX]{SPACE}?10{SPACE}?(?:\^|\*\*){SPACE}?(?P<exponent>[+{DASHES}]?[0-9]+)")
_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # Unicode's bidirectional overrides
_GROUPS = re.compile(f"[{GROUP}]")


class Numeral(NamedTuple):
    value: Fraction  # without sign
    begin: int
    end: int


def numeral_at(text: str, at: int) -> Numeral | None:
    """The longest numeral around a position that holds a digit or a vulgar fraction; None if it is malformed or too long."""
    if text[at] in VULGAR:
        return Numeral(VULGAR[text[at]], at, at + 1)
    begin = at - 1 if text[at - 1 : at] == "." and _is_point(text, at - 1) else at
    match = _DECIMAL.match(text, begin)
    if match is None or match.end() == begin:
        return None
    whole = _GROUPS.sub("", match["whole"] or "")
    if match["separator"] and whole[0] == "0":
        return None  # `0,123` is somebody's decimal comma
    end, decimals, exponent = match.end(), (match["decimals"] or ".")[1:], match["exponent"]
    if not decimals and exponent is None:
        if len(whole) > MAX_DIGITS:
            return None
        if rational := _rational(text, int(whole), begin, end):
            return rational if rational.end > end else None
    if exponent is None and (power := _POWER_OF_TEN.match(text, end)):
        exponent, end = power["exponent"], power.end()
    value = _scaled(whole, decimals, exponent or "0")
    return None if value is None else Numeral(value, begin, end)


def canonical(value: Fraction) -> str:
    """`18`, `0.5` or `8/3`: an integer, a decimal that ends, or a reduced fraction. `Fraction` reads each of them."""
    numerator, denominator = value.numerator, value.denominator
    if denominator == 1:
        return str(numerator)
    twos, rest = _multiplicity(denominator, 2)
    fives, rest = _multiplicity(rest, 5)
    places = max(twos, fives)
    if rest != 1 or places > MAX_DIGITS:
        return f"{numerator}/{denominator}"
    digits = str(abs(numerator) * 10**places // denominator).rjust(places + 1, "0")
    return f"{'-' if numerator < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def foreign(text: str) -> bool:
    """True when a character means a number but is neither an ASCII digit nor a vulgar fraction (`１８`, `18²`, `3万`), or
    turns the order in which digits are shown."""
    if text.isascii():
        return False
    return any(c in _TURNING or (c.isnumeric() and not c.isascii() and c not in VULGAR) for c in text)


def _is_point(text: str, at: int) -> bool:
    """Whether the dot at `at`, before a digit, is a decimal point (` .5`, `$.5`) and not the end of a word (`Rs.5`)."""
    return at == 0 or not (text[at - 1].isalnum() or text[at - 1] in "._")


def _rational(text: str, whole: int, begin: int, end: int) -> Numeral | None:
    """A fraction or mixed number that starts with `whole`; None if there is none; an empty span if it is malformed."""
    malformed = Numeral(Fraction(0), begin, begin)
    if vulgar := _MIXED_VULGAR.match(text, end):
        return Numeral(whole + VULGAR[vulgar[1]], begin, vulgar.end())
    if over := _OVER.match(text, end):
        below = over["below"].replace(",", "")
        if len(below) > MAX_DIGITS or int(below) == 0:
            return malformed
        return Numeral(Fraction(whole, int(below)), begin, over.end())
    if mixed := _MIXED.match(text, end):
        if max(len(mixed["above"]), len(mixed["below"])) > MAX_DIGITS or not 0 < int(mixed["above"]) < int(
            mixed["below"]
        ):
            return malformed
        return Numeral(whole + Fraction(int(mixed["above"]), int(mixed["below"])), begin, mixed.end())
    return None


def _scaled(whole: str, decimals: str, exponent: str) -> Fraction | None:
    """whole.decimals x 10^exponent; None when it would be longer than MAX_DIGITS."""
    size = exponent.lstrip("+" + MINUS).lstrip("0") or "0"
    if len(size) > 3 or len(whole) + len(decimals) + int(size) > MAX_DIGITS:
        return None
    shift = (-int(size) if exponent[0] in MINUS else int(size)) - len(decimals)
    mantissa = int(whole + decimals)
    return Fraction(mantissa * 10**shift) if shift >= 0 else Fraction(mantissa, 10**-shift)


def _multiplicity(number: int, prime: int) -> tuple[int, int]:
    times = 0
    while number % prime == 0:
        times, number = times + 1, number // prime
    return times, number
