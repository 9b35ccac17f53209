"""The one number that a phrase states: `about $1,234.` states 1234; `5 or 18`, `2 million` and `> 18` state none.

What this returns is paid for in training and counted in evaluation, so the reader refuses rather than guesses: a second
number, a range, a bound, an expression, a magnitude word or a negation leave the phrase without a value, and the
refusal carries its reason. Linear in the length of the phrase; raises for no string.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from grpo_portable.answers.markup import balanced, plain
from grpo_portable.answers.numbers import DASHES, MINUS, NUMERAL, TOKEN, foreign, numeral_at


class Reading(NamedTuple):
    value: Fraction | None
    reason: str = ""  # why there is no value; empty when there is one


class _Refused(Exception):
    pass


MAX_PHRASE = 10_000  # characters; nobody states a number at greater length
_DASH = "–"  # a minus only where an answer starts
_STARTS = tuple("=:≈~→")  # after these an answer starts, as at the beginning
_WORDS = (
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
_NUMBER_WORD = rf"(?:{_WORDS.replace(' ', '|')})"  # `one` is left out: in prose it is mostly no number
_JOINT = r"(?:and|or|to|point|plus|minus|less|times|over|by)"
_CODES = r"(?:Rs\.?|USD|EUR|GBP|INR|JPY|CNY|RMB|AUD|CAD|CHF)"
_CURRENCY = re.compile(rf"(?<![A-Za-z])(?:(?:US|CA|AU|HK|NZ|A|C|R|S)?[$£€¥₹₩₽¢₱₦฿₫₪]|{_CODES})\Z", re.I)
_BLANKS = re.compile(r"\s{2,}")
_UNIT_POWER = re.compile(
    r"\b(units?|miles?|yards?|feet|foot|inch(?:es)?|met(?:er|re)s?|[cmk]?m|ft|in|yd|mi|(?<=/)s)(?:\s?\^\s?[23]\b|[²³])"
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_ASIDE = re.compile(r"\(([^()]*)\)")

# anywhere in the phrase
_ANYWHERE = (
    (
        "a magnitude word",
        re.compile(r"\b(?:hundreds?|thousands?|[mbtr]illions?|dozens?|lakhs?|crores?|squared|cubed)\b", re.I),
    ),
    ("a list item", re.compile(r"\A\s*[0-9]{1,3}\)\s*\S")),
)
# anywhere before or after the number
_AROUND = (
    ("a comparison", re.compile(r"[<>≤≥≠±∓|]|!=")),
    ("an expression", re.compile(r"[√∞^π\\_\u20e3]")),
    ("struck out or cut", re.compile(r"~~|\.\.|…")),
)
_DENIED_BEFORE = re.compile(r"\b(?:not|never|cannot|[a-z]{2,6}n['’]t|wrong|incorrect)\b", re.I)
_DENIED_AFTER = re.compile(r"\b(?:(?:is|was) (?:not|never)|(?:is|was)n['’]t|wrong|incorrect)\b", re.I)

# directly before the number; each ends where sign and currency begin
_BEFORE = (
    (
        "a bound",
        r"\b(?:(?:at|the) (?:least|most)|(?:more|less|fewer|greater|larger|smaller) than|over|under|above|below|up to|between"
        r"|exceed(?:s|ing)?)",
    ),
    (
        "an expression",
        r"(?:[+*×÷/·⋅&@#%]|\b(?:sqrt|root|log|ln|exp|sin|cos|tan|half|twice|double|triple)"
        r"|\b(?:root|half|third|quarter|fifth|tenth|negative|opposite|inverse|reciprocal|square|cube|factorial|multiple)s? of)",
    ),
    ("a label", r"\b(?:steps?|part|case|method|example|question|problem|section|equation|figure|table|phase|exercise)"),
    ("a second number in words", rf"\b{_NUMBER_WORD}(?:\s?(?:[,{DASHES}{_DASH}/]|{_JOINT}))?"),
    ("punctuation that belongs to no number", r"(?:\A|[^A-Za-z])[.,;]"),
    ("a variable", r"(?:\A|[^A-Za-z'’])(?-i:[b-zπθ])"),
)
# directly after the number (and its attached unit); the text starts where the number ends
_AFTER = (
    (
        "a fraction in words",
        rf"[\s-]*(?:halves|half|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths)\b"
        rf"|[\s-]*and[\s-](?:(?:an?|one|{_NUMBER_WORD})[\s-])?(?:half|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten)ths?)\b",
    ),
    ("a magnitude", r"\s*(?:bn|mn|mln|mio|mrd|mil|doz|grand|gross|per mille|(?-i:[kKMBT]))(?![\w'&])|‰"),
    (
        "an expression",
        r"\s*(?:[+*×÷·⋅]|(?:pi|sqrt|log|ln|sin|cos|tan|mod|halved|doubled|tripled|factorial|negative)\b)",
    ),
    ("a variable", r"\s*(?-i:[Α-ωb-fijnp-rt-zNXYZ])(?![\w'’]|\.[a-z])"),
    (
        "a second number in words",
        rf"[\s,/{DASHES}{_DASH}]*(?:{_JOINT}\b)?\s*(?:an? )?{_NUMBER_WORD}s?\b"
        rf"|\s?(?!(?:for|after|in|within|on|at|with|from|every|each) )[A-Za-z]{{2,20}},? (?:[A-Za-z]{{2,20}},? and |and )?"
        rf"{_NUMBER_WORD}\b",
    ),
    ("a bound", r"\s*(?:(?:or|and) (?:more|less|fewer|above|over|up|under|below|higher|lower)|at (?:least|most))\b"),
    ("a ratio or a heading", r":\s*\S|\s*to one\b"),
)
_REFUSED_BEFORE = tuple((reason, re.compile(rf"(?:{pattern})\Z", re.I)) for reason, pattern in _BEFORE)
_REFUSED_AFTER = tuple((reason, re.compile(pattern, re.I)) for reason, pattern in _AFTER)
_OPERATOR = re.compile(r"[+*×÷·⋅]")
_ATTACHED = re.compile(
    r"(?:st|nd|rd|th|kg|mg|g|lbs?|oz|km|cm|mm|ft|in|yds?|mi|mph|kmh|kph|m[lL]|cl|L|hrs?|h|mins?|secs?|ms|am|pm|AM|PM"
    r"|kcal|kWh|kW|[kMG]?Hz|[kKMGT][bB](?:ps)?|[A-Za-z]{4,})(?![A-Za-z0-9])"
)
_PER = re.compile(r"\s*/\s*(?:[A-Za-z]{2}|[hsdm]\b)")
_HYPHENATED = re.compile(rf"[{DASHES}](?:[A-Za-z]{{2}})|\s+[{DASHES}{_DASH}]\s+[A-Za-z]{{2}}|[{_DASH}]\s+[A-Za-z]{{2}}")
_BETWEEN = re.compile(r"\b[Bb]etween\s*[$€£]?\Z")
_HEDGE = re.compile(
    r"\b(?:or|mod|maybe|perhaps|possibly|alternative(?:ly)?|otherwise|else|not|no|nope|wait|sorry|oops|actually|really"
    r"|correct(?:ed|ion|ly)?|should|instead|rather)\b"
    rf"|\A\s*(?:[+*×÷^%{DASHES}{_DASH}]|(?:x|times|plus|minus|less|squared|percent)\b)",
    re.I,
)
_GLUE = re.compile(
    rf"[\s$€£%+{DASHES}{_DASH}—*/×÷^:,;~&·()|]*(?:\b(?:to|or|and/or|by|mod|vs\.?|x|over|point)\b)?[\s$€£{DASHES}(,]*",
    re.I,
)


def read_phrase(phrase: str) -> Reading:
    """The number the phrase states, when it states exactly one and nothing in the phrase changes it."""
    try:
        return Reading(_read(phrase))
    except _Refused as refused:
        return Reading(None, str(refused))


def read_last(text: str) -> Reading:
    """The last number of a text without a marked answer: the last number of the last line that has one.

    One end of a range, the last of a list and the last operand of an expression are no answers.
    """
    line = next((line for line in reversed(text.splitlines()) if NUMERAL.search(line) or foreign(line)), "")
    if len(line) > MAX_PHRASE:  # the last words of it, so that no number is cut in two
        line = line[-MAX_PHRASE:].partition(" ")[2]
    line = _BLANKS.sub(" ", plain(line))
    before, last = None, None
    for token in TOKEN.finditer(line):
        before, last = last, token
    if last is None:
        return Reading(None, "no number")
    start = 0
    if before is not None:
        gap = line[before.end() : last.start()]
        if gap == " " and "/" in last.group():
            return read_phrase(_sentence(line, before.start(), last.end()))  # a mixed number
        between = _BETWEEN.search(line[: before.start()][-12:]) and gap.strip().startswith("and")
        if between or (len(gap) <= 40 and _GLUE.fullmatch(gap)):
            return Reading(None, "several numbers")
        start = before.end()
    start = max((end.end() for end in _SENTENCE_END.finditer(line, start, last.start())), default=start)
    return read_phrase(_sentence(line, start, last.end()))


def first_sentence(text: str) -> str:
    """The text up to the end of the sentence that holds its first number."""
    first = NUMERAL.search(text)
    return _sentence(text, 0, first.end()) if first else text


def bare_number(line: str) -> bool:
    """True when the line holds a readable number and no words."""
    return read_phrase(line).value is not None and not any(c.isalpha() for c in plain(line))


def _sentence(text: str, start: int, at: int) -> str:
    end = _SENTENCE_END.search(text, at)
    return text[start : end.end() if end else len(text)]


def _read(phrase: str) -> Fraction:
    phrase = phrase.strip()
    if len(phrase) > MAX_PHRASE:
        raise _Refused("a phrase too long to state one number")
    if not NUMERAL.search(phrase):
        raise _Refused("digits that are not ASCII" if foreign(phrase) else "no number")
    if not balanced(phrase):
        raise _Refused("braces that do not match")
    text = _UNIT_POWER.sub(r"\1", _BLANKS.sub(" ", plain(phrase)))
    if foreign(text):
        raise _Refused("digits that are not ASCII")
    _refuse(_ANYWHERE, text)
    text = _without_asides(text).replace("(", " ").replace(")", " ").strip()
    first = NUMERAL.search(text)
    numeral = numeral_at(text, first.start()) if first else None
    if numeral is None:
        raise _Refused("a malformed number")
    left, right = text[: numeral.begin], text[numeral.end :]
    if NUMERAL.search(right):
        raise _Refused("several numbers")
    _check_after(right)
    return _sign(left, right) * numeral.value


def _refuse(rules: tuple[tuple[str, re.Pattern[str]], ...], text: str, *, at_start: bool = False) -> None:
    for reason, pattern in rules:
        if pattern.match(text) if at_start else pattern.search(text):
            raise _Refused(reason)


def _without_asides(text: str) -> str:
    """The text without the parentheses that only explain its number."""
    if "(" not in text or not NUMERAL.search(_ASIDE.sub(" ", text)):
        return text
    for aside in _ASIDE.finditer(text):
        if not NUMERAL.search(aside[1]):
            if aside[1].strip().lower() in ("negative", "minus"):
                raise _Refused("a sign after the number")
            continue
        explains = any(c.isalpha() or c == "=" for c in aside[1])
        attached = text[aside.start() - 1 : aside.start()].isdigit() or text[aside.end() : aside.end() + 1].isalnum()
        if attached or not explains or _HEDGE.search(aside[1]):
            raise _Refused("several numbers")
    return _ASIDE.sub(" ", text)


def _sign(left: str, right: str) -> int:
    """1 or -1, from what stands before the number."""
    rest, sign, spaced, money = left, "", False, False
    for _ in range(3):  # -$5, $-5, - $ 5
        stripped = rest.rstrip()
        if not sign and stripped and stripped[-1] in MINUS + _DASH + "+":
            sign, spaced, rest = stripped[-1], stripped != rest, stripped[:-1]
        elif not money and (currency := _CURRENCY.search(stripped[-8:])):
            money, rest = True, stripped[: len(stripped) - len(currency[0])]
        else:
            break
    _refuse(_AROUND, rest)
    if _DENIED_BEFORE.search(rest):
        raise _Refused("a negation")
    before = rest.rstrip()
    if before.endswith((*MINUS, _DASH, "+")):
        raise _Refused("two signs")
    if sign:
        if spaced and (before or any(c.isalnum() for c in right)) and not before.endswith(_STARTS):
            raise _Refused("a sign that may be a bullet or a dash")
        return _signed(sign, rest)
    if before.endswith(("—", "―")) and (before == rest or not any(c.isalpha() for c in before)):
        raise _Refused("a dash that may be a minus")
    if before == rest and not money and (before[-1:].isalpha() or before.endswith((".", ",", ";"))):
        raise _Refused("letters attached to the number")
    if words := re.search(r"\b(?:minus|negative)\Z", before[-20:], re.I):
        _refuse(_REFUSED_BEFORE, before[: len(before) - len(words[0])].rstrip()[-60:])
        return -1
    _refuse(_REFUSED_BEFORE, before[-60:])
    return 1


def _signed(sign: str, rest: str) -> int:
    before = rest.rstrip()
    if not before or before.endswith(_STARTS):
        return 1 if sign == "+" else -1
    if sign in MINUS and rest != before and before[-1].isalpha():
        _refuse(_REFUSED_BEFORE, before[-60:])
        return -1
    raise _Refused("a difference or a dash")


def _check_after(right: str) -> None:
    """Refuse unless what follows leaves the number alone: nothing, punctuation, a unit, words."""
    _refuse(_AROUND, right)
    if _DENIED_AFTER.search(right):
        raise _Refused("a negation")
    if right[:1].isascii() and right[:1].isalpha():
        attached = _ATTACHED.match(right)
        if attached is None:
            raise _Refused("letters attached to the number")
        right = right[attached.end() :]
    _refuse(_REFUSED_AFTER, right, at_start=True)
    if _OPERATOR.search(right):
        raise _Refused("an expression")
    follows = right.lstrip()[:1]
    if follows == "/" and not _PER.match(right):
        raise _Refused("an expression")
    if follows and follows in MINUS + _DASH and not _HYPHENATED.match(right):
        raise _Refused("a range or a difference")
    if right[:1] == ".":
        _check_full_stop(right[1:])


def _check_full_stop(rest: str) -> None:
    if rest[:1].isalnum():
        raise _Refused("a malformed number")
    # `2. Money` is a heading, `18. That is her income.` a sentence
    if any(c.isalnum() for c in rest) and not rest.rstrip(" \t)$'’").endswith((".", "!", "?")):
        raise _Refused("a heading")
