"""A diagnosis as text (80 columns, readable without colour) and as markdown. Pure: values in, text out.

Order on the screen: the verdict; the paths; the walls in front of better paths; warnings; the machine in a few lines
that can be pasted into a bug report.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from doctor import __version__, phrases
from doctor.diagnosis import Diagnosis, Help, Wall
from doctor.privacy import scrub

WIDTH = 80
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_COLOUR = {"closed": "red", "chosen": "green", "open": "plain"}
_BODY = 11  # columns before the text of a wall's because and help


class Style:
    """Wraps text in terminal colour, or leaves it alone."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, kind: str, text: str) -> str:
        return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if self.colour and kind in _CODES and text else text


def text(d: Diagnosis, *, verbose: bool = False, colour: bool = False, notes: Sequence[str] = ()) -> str:
    """The report for a terminal, ending in a newline. `notes` stand right under the verdict."""
    style = Style(colour)
    above, below, warnings = phrases.better_walls(d)
    blocks = [_head(d, style, verbose, notes), _paths(d, style)]
    if above:
        blocks.append(_title(style, "Walls in front of better paths" if d.plan.path else "Walls"))
        blocks += [_wall(w, style) for w in above]
    shown = []
    if warnings:
        full = verbose or phrases.passed_over(d)
        shown = [_title(style, "Warnings, which close nothing")]
        shown += [_wall(w, style) for w in warnings] if full else [_brief(warnings)]
    after = phrases.after(d)
    blocks += shown if phrases.passed_over(d) else []
    blocks += [_paragraph(after, 0, 2, paint=lambda s: style("bold", s))] if after else []
    blocks += [] if phrases.passed_over(d) else shown
    if below:
        blocks.append(_others(below, style, verbose))
    blocks.append(_machine(d, style, verbose))
    return "\n\n".join(blocks) + "\n"


def _head(d: Diagnosis, style: Style, verbose: bool, notes: Sequence[str]) -> str:
    colour = "green" if d.plan.path else "red"
    lines = [_paragraph(phrases.verdict(d), 0, 2, paint=lambda s: style("bold", style(colour, s)))]
    for part in (phrases.how(d), phrases.memory(d), phrases.batch(d)):
        if part:
            lines.append(_paragraph(part, 2, 4))
    lines += [_paragraph(f"proved here: {scrub(proof, None)}", 2, 4) for proof in _proofs(d)]
    reasons = [r.text for r in d.plan.reasons] if verbose else phrases.further_reasons(d)
    lines += [_paragraph(f"- {scrub(reason, None)}", 2, 4) for reason in reasons]
    lines += [_paragraph(f"note: {scrub(note, None)}", 2, 8) for note in notes]
    return "\n".join(lines)


def _proofs(d: Diagnosis) -> list[str]:
    """What `--prove` ran, a path a line: `cpu: cpu_step ok in 5.1 s`."""
    proved = d.facts.extra.get("proved")
    if not isinstance(proved, Mapping):
        return []
    return [
        f"{path}: " + ", ".join(f"{step} {result}" for step, result in done.items())
        for path, done in proved.items()
        if isinstance(done, Mapping)
    ]


def _paths(d: Diagnosis, style: Style) -> str:
    lines = [_title(style, "Paths, best first")]
    for name, state, why in phrases.path_rows(d):
        row = f"  {name:<10} {state:<7}  {why}".rstrip()
        wrapped = textwrap.wrap(row, WIDTH, subsequent_indent=" " * 22, break_on_hyphens=False) or [row]
        wrapped[0] = "  " + wrapped[0].lstrip()
        lines.append("\n".join(wrapped).replace(f" {state}", " " + style(_COLOUR[state], state), 1))
    return "\n".join(lines)


def _title(style: Style, title: str) -> str:
    return style("bold", title)


def _wall(wall: Wall, style: Style) -> str:
    closing = f" closes {phrases.closes(wall)}" if wall.closes else ""
    lines = [
        _paragraph(f"{wall.code}{closing}", 2, 4, paint=lambda s: s.replace(wall.code, style("yellow", wall.code), 1))
    ]
    lines.append(_paragraph(scrub(wall.fact, None), 4, 4))
    lines += _labelled("because", (scrub(b, None) for b in wall.because), style)
    for help in wall.help:
        lines += _help(help, style)
    if wall.wont_help:
        lines += _labelled("no use", [scrub(wall.wont_help, None)], style)
    return "\n".join(lines)


def _labelled(label: str, texts: Iterable[str], style: Style) -> list[str]:
    lines = []
    for i, item in enumerate(texts):
        lead = "    " + (f"{label:<{_BODY - 2}}" if i == 0 else " " * (_BODY - 2))
        wrapped = textwrap.wrap(item, WIDTH - len(lead), break_on_hyphens=False, break_long_words=False) or [""]
        lines.append((lead.replace(label, style("dim", label), 1) + wrapped[0]).rstrip())
        lines += [" " * (4 + _BODY - 2) + w for w in wrapped[1:]]
    return lines


def _help(help: Help, style: Style) -> list[str]:
    lines = _labelled("help", [scrub(phrases.help_text(help), None)], style)
    return lines + [" " * (4 + _BODY - 2) + line for line in command_lines(help.command)]


def command_lines(command: str | None, width: int | None = WIDTH - 4 - _BODY + 2) -> list[str]:
    """A shell command as `$ ...`, broken between words with backslashes where it is longer than `width` (None: never),
    so that it can still be pasted.
    """
    lines = []
    for line in (command or "").splitlines():
        rows = [""]
        for word in re.findall(r"""(?:"[^"]*"|'[^']*'|\S)+""", line):
            if width is not None and rows[-1] and len(rows[-1]) + 1 + len(word) > width - 4:
                rows.append(word)
            else:
                rows[-1] = f"{rows[-1]} {word}".strip()
        for i, row in enumerate(rows):
            lines.append(("$ " if i == 0 else "    ") + row + (" \\" if i < len(rows) - 1 else ""))
    return lines


def _brief(walls: Sequence[Wall]) -> str:
    return "\n".join(_paragraph(f"{w.code}: {scrub(w.fact, None)}", 2, 4) for w in walls)


def _others(walls: Sequence[Wall], style: Style, verbose: bool) -> str:
    if verbose:
        return "\n\n".join([_title(style, "Walls in front of worse paths"), *(_wall(w, style) for w in walls)])
    codes = ", ".join(w.code for w in walls)
    return _paragraph(f"Worse paths are also closed by {codes} (-v shows them)", 0, 2)


def _machine(d: Diagnosis, style: Style, verbose: bool) -> str:
    lines = [_title(style, "This machine (nothing private in it: paste it into a bug report)")]
    lines += [_paragraph(line, 2, 4) for line in paste_lines(d)]
    if verbose:
        lines += ["", _title(style, "Every fact [where it came from]")]
        lines += [_paragraph(f"{key} = {value}", 2, 4) for key, value in phrases.all_facts(d.facts)]
    return "\n".join(lines)


def paste_lines(d: Diagnosis) -> list[str]:
    """The block for a bug report: version, choice and what stands in its way, then the facts."""
    first = f"grpo-doctor {__version__}: {d.plan.path or 'no path'}"
    if d.plan.model:
        first += f" for {scrub(d.plan.model)}"
    return [first, *(f"closed by {line}" for line in phrases.closed_by(d)), *phrases.fact_lines(d.facts)]


def _paragraph(content: str, first: int, rest: int, paint=lambda s: s) -> str:  # type: ignore[no-untyped-def]
    lines = textwrap.wrap(
        content,
        WIDTH,
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join(paint(line) for line in lines)


def markdown(d: Diagnosis, *, notes: Sequence[str] = ()) -> str:
    """The report for an issue or a wiki page, ending in a newline."""
    above, below, warnings = phrases.better_walls(d)
    lines = [f"### grpo-doctor: {_plain(phrases.verdict(d))}", ""]
    details = [part for part in (phrases.how(d), phrases.memory(d), phrases.batch(d)) if part]
    details += [f"proved here: {scrub(proof, None)}" for proof in _proofs(d)]
    details += [scrub(r.text, None) for r in d.plan.reasons] + [f"note: {scrub(n, None)}" for n in notes]
    lines += [f"- {_plain(part)}" for part in details]
    lines += ["", "| path | state | why |", "|---|---|---|"]
    lines += [f"| `{name}` | {state} | {_plain(why)} |" for name, state, why in phrases.path_rows(d)]
    for title, walls in (
        ("Walls in front of better paths", above),
        ("Warnings, which close nothing", warnings),
        ("Walls in front of worse paths", below),
    ):
        if walls:
            lines += ["", f"#### {title}"]
            for wall in walls:
                lines += ["", *_markdown_wall(wall)]
    if after := phrases.after(d):
        lines += ["", f"**{_plain(after)}**"]
    lines += ["", "<details><summary>This machine</summary>", "", "```text", *paste_lines(d), "```", "", "</details>"]
    return "\n".join(lines) + "\n"


def _markdown_wall(wall: Wall) -> list[str]:
    closing = f" closes {phrases.closes(wall)}" if wall.closes else ""
    lines = [f"**{wall.code}**{closing}: {_plain(scrub(wall.fact, None))}", ""]
    lines += [f"- because {_plain(scrub(b, None))}" for b in wall.because]
    for help in wall.help:
        lines.append(f"- help: {_plain(scrub(phrases.help_text(help), None))}")
        if help.command:
            lines += ["", "  ```sh", *(f"  {c.strip()}" for c in help.command.splitlines()), "  ```"]
    if wall.wont_help:
        lines.append(f"- no use: {_plain(scrub(wall.wont_help, None))}")
    return lines


def _plain(content: str) -> str:
    """Text that markdown and HTML leave as it is."""
    for char, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_")):
        content = content.replace(char, instead)
    return content
