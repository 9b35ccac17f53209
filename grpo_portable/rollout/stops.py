"""Stop strings: at which token a completion's text first holds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Looks for `strings` in the decoded text, special tokens written out."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings, self.tokenizer = tuple(s for s in strings if s), tokenizer
        # a string of b bytes is spelled by at most b tokens that add to the text
        self.reach = max((len(s.encode()) for s in self.strings), default=0) + 4

    def end(self, tokens: Sequence[int], checked: int = 0) -> int | None:
        """Tokens to keep, the one that completes a stop string included; None when there is none.

        `checked` leading tokens are known to hold none; only the text near and after them is decoded.
        """
        start = max(0, checked - self.reach)
        if not self._found(tokens[start:]):
            return None
        return next(end for end in range(max(checked, start) + 1, len(tokens) + 1) if self._found(tokens[start:end]))

    def _found(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)
        return any(s in text for s in self.strings)
