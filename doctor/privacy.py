"""Text with everything private taken out: device UUIDs, the home folder, user names in paths, this machine's name, tokens,
secrets of the environment, addresses.

Everything the doctor prints or saves from a child process, an environment variable or a foreign file passes through here.
"""

from __future__ import annotations

import os
import re

_LIMIT = 400  # characters of one message; longer ones are cut in the middle, where they say least

_HEX = r"[0-9a-fA-F]"
_UUID = rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_SECRET = re.compile(r"(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"\b(GPU|MIG)-(?:GPU-)?{_HEX}{{4,}}(?:-{_HEX}+)*(?!\w)(?:/\d+/\d+)?"), r"\1-..."),
    (re.compile(_UUID), "..."),
    (re.compile(r"\b(hf|sk|ghp|gho|glpat|xoxb|github_pat)[_-][A-Za-z0-9_-]{10,}"), r"\1_..."),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{2,5})\b"), "..."),  # only with a port: 0.6.8.1 is a version
    (re.compile(r"://[^/\s:@]+:[^/\s@]+@"), "://...@"),
    (re.compile(r"(/home/|/Users/|\\Users\\)[^/\\\s'\":]+"), "~"),
    (re.compile(r"[A-Za-z]:~"), "~"),
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
)


def clean(text: str) -> str:
    """`text` without private parts, its lines as they are."""
    home = os.path.expanduser("~")
    if len(home) > 3:  # "/" or "C:\" would eat every path
        text = re.sub(re.escape(home) + r"(?![\w.-])", "~", text)
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    for secret in _secrets():
        text = text.replace(secret, "...")
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    if len(host) >= 5 and re.search(r"[\d.-]", host):  # else a word as others, as "ubuntu" is
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "...", text)
    return text


def _secrets() -> list[str]:
    """The values of environment variables that are named as secrets, longest first."""
    found = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8}
    return sorted(found, key=len, reverse=True)


def scrub(text: str, limit: int | None = _LIMIT) -> str:
    """One line of `text` without private parts, at most `limit` characters (None: as long as it is)."""
    text = clean(text)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if limit is not None and len(text) > limit:
        half = (limit - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text
