"""Stop strings, found on the text however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string appears; what may still become one is held back.

    Of several stop strings the one that is complete first ends the text, so the result does not depend on how the text
    arrives. At most `max(len(stop)) - 1` characters are held.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.matched = False
        self._held = ""

    def push(self, text: str) -> str:
        """Takes new text and returns what is settled. After a match `matched` is set and nothing more comes out."""
        if self.matched:
            return ""
        if not self.stop:
            return text
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        if ends:
            self.matched = True
            self._held = ""
            return text[: min(ends)[1]]
        settled = len(text) - self._longest_beginning(text)
        self._held = text[settled:]
        return text[:settled]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Characters at the end of `text` that are a beginning of a stop string."""
        longest = min(len(text), max(map(len, self.stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0
