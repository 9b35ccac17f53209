"""Readings of version-like text: versions, dotted numbers, compute capabilities, the build a torch version names.

Every function answers None for text that is not what it reads; none raises. Facts files are written by people too.
"""

from __future__ import annotations

import re
from functools import cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

Pair = tuple[int, int]

_DOTTED = re.compile(r"\s*v?(\d{1,9}(?:\.\d{1,9}){0,7})")
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")
_LONGEST = 80


def version(text: str | None) -> Version | None:
    """A PEP 440 version."""
    if text is None or len(text) > _LONGEST:
        return None
    try:
        return Version(text)
    except ValueError:  # InvalidVersion is one; so is a number too long to convert
        return None


def base(v: Version) -> Version:
    """The release a version belongs to: without local tag, pre-release, post-release or dev part."""
    return Version(".".join(map(str, v.release)))


@cache
def specifiers(text: str) -> SpecifierSet:
    """A set of version clauses; an unreadable one allows everything."""
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return SpecifierSet()


def allows(spec: SpecifierSet, v: Version) -> bool:
    """Whether a range takes a version. The local tag is left out (+cu129 sorts above the bound otherwise), and a vendor's
    pre-release counts as the release it becomes, so that 2.10.0a0+nv25.11 satisfies torch==2.10.0."""
    return spec.contains(Version(v.public), prereleases=True) or spec.contains(base(v), prereleases=True)


def dotted(text: str | None) -> tuple[int, ...] | None:
    """The leading dotted numbers: "12.8.61" → (12, 8, 61)."""
    found = _DOTTED.match(text or "")
    return tuple(int(n) for n in found[1].split(".")) if found else None


def pair(text: str | None) -> Pair | None:
    """Major and minor: "12.8.61" → (12, 8); "13" → (13, 0)."""
    numbers = dotted(text)
    return None if numbers is None else (numbers[0], numbers[1] if len(numbers) > 1 else 0)


def capability(text: str | None) -> Pair | None:
    """A compute capability: "12.0" → (12, 0). Compared as a pair, never by major alone."""
    found = _CAPABILITY.fullmatch((text or "").strip())
    return (int(found[1]), int(found[2])) if found else None


def shown(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def torch_build(text: str | None) -> str | None:
    """What a torch version was built for: cuda, cpu, rocm, xpu; None where it does not say (PyPI's metadata does not)."""
    local = (text or "").partition("+")[2].lower()
    if re.match(r"cu\d", local):
        return "cuda"
    return next((kind for kind in ("cpu", "rocm", "xpu") if local.startswith(kind)), None)


def torch_cuda(text: str | None) -> Pair | None:
    """The CUDA version a torch version names: "2.10.0+cu128" → (12, 8)."""
    found = re.search(r"\+cu(\d{2,3})(?!\d)", (text or "").lower())
    return (int(found[1][:-1]), int(found[1][-1])) if found else None
