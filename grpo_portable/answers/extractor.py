"""The one extractor, for rewards and evaluation on every path: a completion's final answer as an exact number.

    style           where the answer stands
    gsm8k_marker    after the last `####` (exactly four, not inside quotes), to the end of that line
    tagged          in the last closed <SOLUTION>...</SOLUTION> after the last <end_working_out>
    boxed           in the last closed \\boxed{...} (or \\fbox)
    free            after the last `Answer:` or `answer is`; without one, the last number

Before that the text is cut at the first end token and at a line that starts a new question, a closed thinking block is
dropped, and an unclosed one leaves no answer. Gold answers go through the same reader. Comparison is of exact
rationals; what is not exactly one number is no answer. Linear in the length of the text; no input raises.
"""

from __future__ import annotations

import numbers as abstract
import re
from collections import deque
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from grpo_portable.answers.markup import boxes
from grpo_portable.answers.numbers import NUMERAL, canonical
from grpo_portable.answers.phrases import Reading, bare_number, first_sentence, read_last, read_phrase

Completion = Any  # str, a list of messages, one message, or None
START_WORKING, END_WORKING = "<start_working_out>", "<end_working_out>"
OPEN_SOLUTION, CLOSE_SOLUTION = "<SOLUTION>", "</SOLUTION>"

_END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>"),
    *("<|eos|>", "<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<|end▁of▁sentence|>"),
    *(
        "<｜end▁of▁sentence｜>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|endofprompt|>",
        "</s>",
        "<eos>",
        "<EOS>",
    ),
    *("[EOS]", "<pad>", "<|pad|>", "[PAD]", "<|pad_token|>"),
)
_TURN_STARTS = (
    *(
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|turn>",
        "<|user|>",
        "<|start|>user",
        "<｜User｜>",
        "[INST]",
    ),
)
_END = re.compile("|".join(map(re.escape, _END_TOKENS)))
_TURN = re.compile("|".join(map(re.escape, _TURN_STARTS)))
_THINKING = re.compile(
    r"<(?P<close>/)?(?:think|thinking|thought)>|\[(?P<close_2>/)?THINK\]|◁(?P<close_3>/)?think▷", re.I
)
_LABEL = r"(?:\*\*|__)?(?:question|problem|instruction|exercise|human|user|q)(?: ?[0-9]{1,3})?(?:\*\*|__)?:"
_NEW_QUESTION = re.compile(
    rf"^[ \t]{{0,8}}(?:#{{1,6}} ?)?(?:{_LABEL}|(?:next|new|another) (?:question|problem)\b)", re.I | re.M
)
_QUESTION_IN_LINE = re.compile(r"(?<![A-Za-z])(?:Question|Problem|Q)(?: ?[0-9]{1,3})?:")
_MARKER = re.compile(r"(?<!#)####(?!#)")
_ANSWER_LABEL = re.compile(r"[\s*_]*(?:the )?(?:final )?(?:answer|result|solution|total)(?: is)?[\s*_]*:?[\s*_]*", re.I)
_ANCHOR = re.compile(r"\banswers?[ \t*_]{0,4}(?::|=|\b(?:is|are|was|equals|(?:would|should|must|will) be)\b)", re.I)
_FACTORIAL = re.compile(r"[0-9})]!")  # in a formula; after a sentence it is an exclamation mark
_TAKEN_BACK = re.compile(
    r"[\s*_]*(?:no|nope|wait|actually|sorry|oops|hmm+|correction|rather|or|i mean(?:t)?|scratch that)\b", re.I
)
_CLAUSE = re.compile(r",?\s(?:because|since)\b", re.I)
_TAGS = re.compile("|".join(map(re.escape, (OPEN_SOLUTION, CLOSE_SOLUTION))))
_FORMULA = re.compile(r"\s*(?:\${1,2}[^$]+\${1,2}|\\\(.+\\\)|\\\[.+\\\])[\s.]*")  # a line that is nothing else
_PLAIN_NUMBER = re.compile(r"[-−]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?:/[0-9]+)?")


def extract(completion: Completion, style: str) -> str | None:
    """The final answer in canonical text (`18`, `0.5`, `8/3`), None when there is not exactly one."""
    return _text(read(completion, style))


def is_correct(completion: Completion, gold: Any, style: str) -> bool:
    """Whether the completion's answer equals the gold answer exactly; False when either cannot be read."""
    answer, truth = read(completion, style).value, read_gold(gold, style).value
    return answer is not None and answer == truth


def extract_lenient(completion: Completion, style: str | None = None) -> str | None:
    """The answer whatever its format, in canonical text: `style`'s own, else any marked one, else the last number."""
    return _text(read_lenient(completion, style))


def is_correct_lenient(completion: Completion, gold: Any, style: str | None = None) -> bool:
    answer, truth = read_lenient(completion, style).value, read_gold(gold, style or "free").value
    return answer is not None and answer == truth


def parse_gold(raw: Any, style: str) -> str | None:
    """A gold answer (int, float, `1,234`, LaTeX, a worked answer in any style) in canonical text, None if unreadable."""
    return _text(read_gold(raw, style))


def read(completion: Completion, style: str) -> Reading:
    """The final answer as an exact rational, or the reason why there is none."""
    text = final_text(completion)
    if text is None:
        return Reading(
            None, "thinking that is never closed" if ended_text(completion).strip() else "an empty completion"
        )
    return _READERS[style](text)


def read_lenient(completion: Completion, style: str | None = None) -> Reading:
    text = final_text(completion)
    if text is None:
        return read(completion, style or "free")
    found = Reading(None)
    for way in dict.fromkeys((style or "gsm8k_marker", "gsm8k_marker", "tagged", "boxed", "free")):
        found = _READERS[way](text)
        if found.value is not None:
            return found
    return read_last(text) if found.value is None else found


def read_gold(raw: Any, style: str) -> Reading:
    """A gold answer as an exact rational. Text may be the bare answer or a worked one that marks it."""
    if isinstance(raw, bool) or raw is None:
        return Reading(None, "no gold answer")
    if isinstance(raw, abstract.Number | Decimal):
        try:
            raw = str(raw)  # text, not binary expansion: 0.1 means 1/10
        except ValueError:  # Python writes no integer beyond 4300 digits
            raw = ""
    if not isinstance(raw, str) or not raw.strip():
        return Reading(None, "no gold answer")
    return _read_gold_text(raw, style)


@lru_cache(maxsize=1024)  # a gold answer is asked for by every completion of its group, and by every reward
def _read_gold_text(raw: str, style: str) -> Reading:
    if "####" in raw:
        return _READERS["gsm8k_marker"](raw)
    if OPEN_SOLUTION in raw:
        return _READERS["tagged"](raw)
    if boxes(raw):
        return _READERS["boxed"](raw)
    return _READERS["free"](raw) if _ANCHOR.search(raw) else read_phrase(raw)


def answer_text(completion: Completion, style: str) -> str | None:
    """What stands where the answer should stand, unread: for answers that are no numbers (`symbolic.py`)."""
    text = final_text(completion)
    if text is None:
        return None
    return _PHRASES[style](text)


def text_of(completion: Completion) -> str:
    """The text of a completion: a string itself, of messages the last assistant message, "" where there is none."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, Sequence) or isinstance(completion, bytes | bytearray):
        return ""
    messages = [m for m in completion if isinstance(m, Mapping) and m.get("role", "assistant") == "assistant"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, Sequence) and not isinstance(content, str):  # parts, as multimodal templates write them
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def ended_text(completion: Completion) -> str:
    """The text up to the first end token, the start of another speaker's turn or a repetition that the length limit cut."""
    text = text_of(completion)
    end = _END.search(text)
    text = text[: end.start()] if end else _without_cut_repetition(text)
    for turn in _TURN.finditer(text):
        if text[: turn.start()].strip():  # one at the very start opens the assistant's own turn
            return text[: turn.start()]
    return text


def final_text(completion: Completion) -> str | None:
    """What the completion says in the end: after its thinking, before any new question; None if there is nothing."""
    text = spoken_text(completion)
    if text is None:
        return None
    for question in _NEW_QUESTION.finditer(text):
        if text[: question.start()].strip():  # at the very start it is the question said again
            text = text[: question.start()]
            break
    return text if text.strip() else None


def spoken_text(completion: Completion) -> str | None:
    """The text without its thinking block; None when the block is never closed. The chat template may have opened it."""
    text = ended_text(completion)
    last = _last(_THINKING, text)
    if last is None:
        return text
    return text[last.end() :] if any(last.groups()) else None


def has_marker(completion: Completion, style: str) -> bool:
    """Whether the format is kept: exactly one marker, in the last line, a plain number after it and nothing behind it."""
    text = (spoken_text(completion) or "").rstrip()
    line = text[text.rfind("\n") + 1 :].strip()
    if style == "gsm8k_marker":
        return text.count("####") == 1 and line.startswith("#### ") and _is_plain_number(line[5:].strip())
    if style == "tagged":
        return tags_in_order(text) and text.endswith(CLOSE_SOLUTION)
    if style == "boxed":
        marked = text.count("\\boxed") == 1 and "\\boxed" in line
    else:
        marked = len(_ANCHOR.findall(text)) == 1 and _ANCHOR.search(line) is not None
    return marked and _READERS[style](text).value is not None


def tags_in_order(text: str) -> bool:
    """Reasoning, its end tag, one solution that is not empty; every tag once. The template may have opened the reasoning."""
    if (
        any(text.count(tag) != 1 for tag in (END_WORKING, OPEN_SOLUTION, CLOSE_SOLUTION))
        or text.count(START_WORKING) > 1
    ):
        return False
    end, open_at, close = text.index(END_WORKING), text.index(OPEN_SOLUTION), text.index(CLOSE_SOLUTION)
    start = text.find(START_WORKING)
    if start > end:
        return False
    reasoning = text[start + len(START_WORKING) if start >= 0 else 0 : end]
    return (
        end < open_at < close and bool(reasoning.strip()) and bool(text[open_at + len(OPEN_SOLUTION) : close].strip())
    )


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _text(reading: Reading) -> str | None:
    return None if reading.value is None else canonical(reading.value)


def _is_plain_number(text: str) -> bool:
    return _PLAIN_NUMBER.fullmatch(text) is not None and read_phrase(text).value is not None


def _marked(text: str) -> str | None:
    """The phrase after the last marker: the rest of its line, or the next line if that is only an answer."""
    text = _without_bare_markers(text)
    at = _last_marker(text, len(text))
    if at is None:
        return None
    stop = text.find("\n", at)
    phrase = text[at + 4 : stop if stop >= 0 else len(text)]
    if not phrase.strip() and (opening := _last_marker(text, at, text.rfind("\n", 0, at) + 1)) is not None:
        return text[opening + 4 : at]  # `#### 18 ####`: the second closes the heading
    if not phrase.strip() or (len(phrase) < 80 and _ANSWER_LABEL.fullmatch(phrase)):
        return _next_line(text, stop) or phrase
    question = _QUESTION_IN_LINE.search(phrase)
    return phrase[: question.start()] if question else phrase


def _next_line(text: str, stop: int) -> str | None:
    """The next line that is not empty, after the line that ends at `stop` (-1: with the text), if it is only an answer."""
    following = text[stop:].lstrip().partition("\n")[0] if stop >= 0 else ""
    return following if bare_number(following) or _FORMULA.fullmatch(following) else None


def _last_marker(text: str, end: int, begin: int = 0) -> int | None:
    """Where the last `####` between two positions starts: exactly four hashes, not inside quotes."""
    while (at := text.rfind("####", begin, end)) >= 0:
        start = at
        while start > begin and text[start - 1] == "#":
            start -= 1
        if start == at and text[at + 4 : at + 5] != "#" and not _quoted(text, at):
            return at
        end = start
    return None


def _without_bare_markers(text: str) -> str:
    """The text without markers at its very end that nothing follows: they state nothing, and take nothing back."""
    bare = _MARKER.search(text, len(text.rstrip("# \t\r\n")))
    return text[: bare.start()] if bare else text


def _without_cut_repetition(text: str) -> str:
    """The text without a last line that only begins to say once more a line that was just said twice.

    A model that repeats its answer until the length limit stops it may be cut within a number: after `#### 1000` twice,
    `#### 10` is no answer. After `#### 1000` once it may be a correction, and stays.
    """
    *_, before, said, last = ["", "", "", *text.rsplit("\n", 3)]
    return text[: -len(last) - 1] if last and before == said != last and said.startswith(last) else text


def _quoted(text: str, at: int) -> bool:
    """Whether a position stands inside quotation marks of its own line (at most 200 characters away)."""
    near, far = max(0, at - 200), at + 200
    start, stop = text.rfind("\n", near, at), text.find("\n", at, far)
    before, after = text[max(start + 1, near) : at], text[at : stop if stop >= 0 else far]
    if before.count('"') % 2 and '"' in after:
        return True
    if any(
        before.rfind(opens) > before.rfind(closes) and closes in after
        for opens, closes in ("“”", "«»", "‘’", ("<!--", "-->"))
    ):
        return True
    if before.rstrip().endswith("'") and "'" in after:
        return True
    # inline code in a sentence mentions the marker; a line that is all code is the answer
    return before.count("`") % 2 == 1 and "`" in after and bool(before.replace("`", "").strip())


def _read_marked(text: str) -> Reading:
    phrase = _marked(text)
    return Reading(None, "no marker") if phrase is None else read_phrase(phrase)


def _solution(text: str) -> str | None:
    """Contents of the last closed solution after the last end of working; None while the working is still open."""
    end = text.rfind(END_WORKING)
    start = end + len(END_WORKING) if end >= 0 else 0
    if text.find(START_WORKING, start) >= 0:
        return None
    found, opened = None, -1
    for tag in _TAGS.finditer(text, start):
        if tag.group() == OPEN_SOLUTION:
            opened = tag.end()
        elif opened >= 0:
            found, opened = text[opened : tag.start()], -1
    return found


def _read_solution(text: str) -> Reading:
    inside = _solution(text)
    if inside is None:
        return Reading(None, "no closed solution")
    return _read_marked(inside) if _MARKER.search(inside) else read_phrase(inside)


def _boxed(text: str) -> str | None:
    found = boxes(text)
    return text[slice(*found[-1])] if found else None


def _read_boxed(text: str) -> Reading:
    inside = _boxed(text)
    if inside is None:
        return Reading(None, "no closed box")
    if _FACTORIAL.search(inside):
        return Reading(None, "an expression")
    return _read_marked(inside) if _MARKER.search(inside) else read_phrase(inside)


def _anchored(text: str) -> str | None:
    """The phrase after the last `Answer:` or `answer is`: its sentence, or the next line if that is only an answer."""
    last = _last(_ANCHOR, text)
    if last is None:
        return None
    stop = text.find("\n", last.end())
    phrase = text[last.end() : stop if stop >= 0 else len(text)]
    if stop >= 0 and not any(c.isalnum() for c in phrase):
        return _next_line(text, stop) or phrase
    sentence = first_sentence(phrase)
    rest = phrase[len(sentence) :]
    if NUMERAL.search(rest) and (sentence.endswith("?") or _TAKEN_BACK.match(rest)):
        return phrase  # `17? No, 18.` states two numbers
    phrase = sentence
    number = NUMERAL.search(phrase)
    because = _CLAUSE.search(phrase, number.end()) if number else None
    return phrase[: because.start()] if because else phrase


def _read_free(text: str) -> Reading:
    phrase = _anchored(text)
    return read_last(text) if phrase is None else read_phrase(phrase)


_READERS = {"gsm8k_marker": _read_marked, "tagged": _read_solution, "boxed": _read_boxed, "free": _read_free}
_PHRASES = {"gsm8k_marker": _marked, "tagged": _solution, "boxed": _boxed, "free": _anchored}
