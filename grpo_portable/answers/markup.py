"""Markup taken off a short text, so that a number in it can be read: LaTeX, Markdown, HTML tags, quotes.

Nothing here knows what a number is worth. Every function takes time linear in its input, returns for every string, and
keeps what it does not understand as a backslash, so that the reader of numbers refuses it.
"""

from __future__ import annotations

import re

UNKNOWN = "\\"  # stands for a LaTeX command without a plain reading
THIN_SPACE = "\u2009"

_SYMBOLS = {
    "times": "×",
    "cdot": "·",
    "ast": "*",
    "div": "÷",
    "minus": "-",
    "sqrt": "√",
    "pi": "π",
    "infty": "∞",
    **dict.fromkeys(("pm", "mp"), "±"),
    **dict.fromkeys(("le", "leq", "leqslant"), "≤")
    | dict.fromkeys(("ge", "geq", "geqslant"), "≥")
    | {"lt": "<", "gt": ">"},
    **dict.fromkeys(("ne", "neq"), "≠") | dict.fromkeys(("approx", "sim", "simeq"), "≈"),
    **dict.fromkeys(("to", "rightarrow", "Rightarrow", "implies"), "→")
    | dict.fromkeys(("ldots", "dots", "cdots"), "…"),
    **dict.fromkeys(("circ", "degree", "degrees"), "°") | {"pounds": "£", "euro": "€", "cent": "¢", "dollar": "$"},
}
_DROPPED = frozenset(
    (
        *("text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "emph", "underline", "mbox", "hbox"),
        *("mathrm", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "operatorname", "rm", "bf", "it"),
        *("boxed", "fbox", "left", "right", "big", "Big", "bigg", "Bigg", "displaystyle", "textstyle"),
        *("therefore", "quad", "qquad"),
    )
)
_ESCAPED = {**{c: c for c in "$%#&_€£"}, **dict.fromkeys("()[]{},;: \t\n\\/", " "), "!": ""}
_COMMAND = re.compile(r"\\(?:(?P<name>[A-Za-z]+)|(?P<character>.))", re.DOTALL)
_FRACTION = re.compile(
    r"(?P<before>[0-9][ \t]{0,4})?\\[cdt]?frac[ \t]{0,4}(?:\{[ \t]{0,4}(?P<n>[-+−]?[0-9,]{1,400})[ \t]{0,4}\}|(?P<n1>[0-9]))"
    r"[ \t]{0,4}(?:\{[ \t]{0,4}(?P<d>[0-9,]{1,400})[ \t]{0,4}\}|(?P<d1>[0-9]))(?P<after>[0-9{])?"
)
_GROUP_COMMA = re.compile(r"\{,\}|,\\!")
_THIN_GROUP = re.compile(r"(?<=[0-9])\\,(?=[0-9]{3})")
_DEGREES = re.compile(r"\^ ?\{? ?°")
_TAG = re.compile(r"</?[A-Za-z][A-Za-z_]{0,30}/?>")
_ANGLED = re.compile(r"<[ \t]{0,4}([-+−$]?[0-9][0-9.,/]{0,60})[ \t]{0,4}>")
_CALCULATION = re.compile(r"<<[^<>]{0,200}>>")  # GSM8K's calculator marks
_ARROW = re.compile(r"[-=]{1,3}>")
_STARS = re.compile(r"(?<![\w*])\*{1,3}(?=[^\s*])|(?<=[^\s*])\*{1,3}(?![\w*])")
_UNDERLINES = re.compile(r"(?<!\w)_{1,3}(?=[^\s_])|(?<=[^\s_])_{1,3}(?!\w)")
_SINGLE_QUOTES = re.compile(r"(?<![A-Za-z])['’‘]|['’‘](?![A-Za-z])")
_BLANKED = str.maketrans(dict.fromkeys('`"“”„«»[]\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f', " "))
_BRACES = re.compile(r"\\\\?(?:boxed|fbox)[ \t]{0,8}\{|\\.|[{}]", re.DOTALL)  # one backslash, or two as JSON writes it


def plain(text: str) -> str:
    """The text without markup: fractions as n/d, symbols as one character, everything decorative as a space."""
    if "\\" in text or "{" in text or "}" in text:
        text = _without_latex(text)
    text = _ANGLED.sub(r" \1 ", _TAG.sub(" ", _ARROW.sub("→", _CALCULATION.sub(" ", text))))
    text = _STARS.sub(" ", text.strip("* \t\r\n"))
    return _SINGLE_QUOTES.sub(" ", _UNDERLINES.sub(" ", text)).translate(_BLANKED)


def balanced(text: str) -> bool:
    """False when a brace is left open or closed twice: the text was cut, or it is not LaTeX."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def boxes(text: str) -> list[tuple[int, int]]:
    """Spans of the contents of every closed \\boxed{...} or \\fbox{...} that holds no other box, in order."""
    opened: list[int] = []  # for every open brace where a box's content starts, or -1
    found: list[tuple[int, int]] = []
    for brace in _BRACES.finditer(text) if "box" in text else ():
        token = brace.group()
        if token == "{":
            opened.append(-1)
        elif token == "}":
            start = opened.pop() if opened else -1
            if start >= 0 and not (found and found[-1][0] > start):  # boxes inside it were closed before it
                found.append((start, brace.start()))
        elif len(token) > 2:
            opened.append(brace.end())
    return sorted(found)


def _without_latex(text: str) -> str:
    text = _THIN_GROUP.sub(THIN_SPACE, _GROUP_COMMA.sub(",", text))
    text = _COMMAND.sub(_command, _FRACTION.sub(_fraction, text))
    return _DEGREES.sub("°", text).replace("{", " ").replace("}", " ")


def _fraction(match: re.Match[str]) -> str:
    # a space keeps `2\frac{1}{2}` a mixed number and `\frac{1}{2}3` two numbers; `{` here would be a third argument
    before = f"{match['before'].rstrip()} " if match["before"] else ""
    after = f" {UNKNOWN}{{" if match["after"] == "{" else f" {match['after'] or ''}".rstrip()
    return f"{before}{match['n'] or match['n1']}/{match['d'] or match['d1']}{after}"


def _command(match: re.Match[str]) -> str:
    name = match["name"]
    if name is None:
        return _ESCAPED.get(match["character"], UNKNOWN)
    return _SYMBOLS.get(name) or (" " if name in _DROPPED else UNKNOWN)
