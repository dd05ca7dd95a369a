"""Incremental detokenization and stop strings. The pieces of text, joined, equal the text of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""Prompt tokens that are decoded before the first new one, because they decide whether it starts with a space. Enough
for a character of four tokens before three tokens of an incomplete one."""

MAX_CHARACTER_TOKENS = 4
"""A character of UTF-8 has at most four bytes, hence at most four tokens."""


class Detokenizer:
    """Incremental detokenizer of one sequence.

    Keeps a short window of tokens. The text of those before `_read` was returned; they are decoded again as context
    only. The others end within a character, so their text (with U+FFFD for missing bytes) waits for the rest of it.

    Args:
        decode: converts token ids to text.
        prompt_token_ids: tokens before the new ones. Their text is not returned, except for a character whose last
            bytes are new.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._read = self._settled_length()
        self._context = decode(self._window[: self._read])

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that it completes, possibly none."""
        self._window.append(token_id)
        text = self._text_until(len(self._window))
        if not text:
            self._window.pop()  # special tokens have no text, and any number of them may follow each other
            return ""
        if not text.endswith(REPLACEMENT):
            return self._settle(len(self._window), text)
        # Only the last three tokens can begin an incomplete character.
        end = len(self._window) - MAX_CHARACTER_TOKENS + 1
        if end > self._read and (first := self._text_until(end)) and text.startswith(first):
            return self._settle(end, first)
        return ""

    def flush(self) -> str:
        """Returns the rest after the last token; bytes of incomplete characters become U+FFFD."""
        return self._settle(len(self._window), self._text_until(len(self._window)))

    def _text_until(self, end: int) -> str:
        """Returns the text of the window's tokens from `_read` to `end`."""
        return self._decode(self._window[:end])[len(self._context) :]

    def _settle(self, end: int, text: str) -> str:
        self._window = self._window[self._read :]
        self._read = end - self._read
        self._context = self._decode(self._window[: self._read])
        return text

    def _settled_length(self) -> int:
        """Returns the number of prompt tokens before an incomplete character at the end."""
        length = len(self._window)
        for end in range(length, max(length - MAX_CHARACTER_TOKENS, -1), -1):
            if not self._decode(self._window[:end]).endswith(REPLACEMENT):
                return end
        return length


class StopMatcher:
    """Passes text on until a stop string occurs; text that may become one is held back.

    The stop string that is complete first ends the text, so the result does not depend on how the text is split. At
    most `max(len(stop)) - 1` characters are held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self.matched = False
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text and returns what cannot be part of a stop string. After a match, `matched` is set and nothing
        returned."""
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
        """Returns the text held back, after the last text."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self.stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0
