"""Token ids to text one token at a time, so that the pieces joined are the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the first new one, since they decide whether it starts with a space. Enough for a whole
character of four tokens before three tokens of an unfinished one."""

MAX_CHARACTER_TOKENS = 4
"""A character of UTF-8 has at most four bytes, hence at most four tokens."""


class Detokenizer:
    """Text of a growing sequence.

    It keeps a short window of tokens. Those before `_read` have come out and are only decoded again as context; the
    others end within a character, so their text (U+FFFD stands for the missing bytes) waits for the rest of it.

    Args:
        decode: token ids to text.
        prompt_token_ids: what the new tokens continue. None of its text comes out, except that a character whose last
            bytes are new comes out whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._read = self._settled_length()
        self._context = decode(self._window[: self._read])

    def push(self, token_id: int) -> str:
        """Takes one token and returns the text that is settled by it, possibly none."""
        self._window.append(token_id)
        text = self._text_until(len(self._window))
        if not text:
            self._window.pop()  # special tokens have no text, and any number of them may follow each other
            return ""
        if not text.endswith(REPLACEMENT):
            return self._settle(len(self._window), text)
        # Only the last three tokens can be the beginning of an unfinished character.
        end = len(self._window) - MAX_CHARACTER_TOKENS + 1
        if end > self._read and (first := self._text_until(end)) and text.startswith(first):
            return self._settle(end, first)
        return ""

    def flush(self) -> str:
        """The rest, when no more tokens come; bytes that never became a character are U+FFFD."""
        return self._settle(len(self._window), self._text_until(len(self._window)))

    def _text_until(self, end: int) -> str:
        """Text of the window's tokens from `_read` to `end`."""
        return self._decode(self._window[:end])[len(self._context) :]

    def _settle(self, end: int, text: str) -> str:
        self._window = self._window[self._read :]
        self._read = end - self._read
        self._context = self._decode(self._window[: self._read])
        return text

    def _settled_length(self) -> int:
        """Prompt tokens before an unfinished character at the prompt's end."""
        length = len(self._window)
        for end in range(length, max(length - MAX_CHARACTER_TOKENS, -1), -1):
            if not self._decode(self._window[:end]).endswith(REPLACEMENT):
                return end
        return length


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
