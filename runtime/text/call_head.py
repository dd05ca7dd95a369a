"""Incremental matching of the heads of tool calls, and of the end of JSON values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Wait(Enum):
    """Result of a match that needs more text."""

    WAIT = auto()


WAIT = Wait.WAIT


@dataclass(frozen=True, slots=True)
class Token:
    """Variable part of a call's head.

    Attributes:
        pattern: pattern of the complete part.
        begins: pattern of possible first characters.
        may_grow: whether following text may extend it; it then ends only at other text.
    """

    pattern: re.Pattern[str]
    begins: re.Pattern[str]
    may_grow: bool


WORD = Token(re.compile(r"[A-Za-z0-9_.-]+"), re.compile(r"[A-Za-z0-9_.-]"), may_grow=True)
QUOTED = Token(re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL), re.compile('"'), may_grow=False)

Part = str | Token


@dataclass(frozen=True, slots=True)
class Head:
    """Matched head: its variable parts as written, and the position after it."""

    values: tuple[str, ...]
    end: int


def match_head(text: str, parts: Sequence[Part]) -> Head | Wait | None:
    """Matches parts, separated by whitespace, at the start of a text; returns None if they cannot match."""
    position, values = 0, []
    for part in parts:
        position += len(text) - position - len(text[position:].lstrip())
        if position == len(text):
            return WAIT
        if isinstance(part, str):
            rest = text[position : position + len(part)]
            if rest != part:
                return WAIT if part.startswith(rest) and position + len(rest) == len(text) else None
            position += len(part)
        else:
            found = part.pattern.match(text, position)
            if found is None:
                return WAIT if part.begins.match(text, position) else None
            if part.may_grow and found.end() == len(text):
                return WAIT
            values.append(found[0])
            position = found.end()
    return Head(tuple(values), position)


def held_back(text: str, mark: str) -> int:
    """Returns the length of the longest suffix of a text that is a prefix of a mark."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)


NOTABLE = re.compile(r'["\\\[\]{}]')
IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Scanner for the end of a JSON value: counts brackets outside strings, without validation.

    Args:
        depth: number of open brackets at the start.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Returns the position after the value in the new text, or None while it is incomplete."""
        position = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        while match := (IN_STRING if self._in_string else NOTABLE).search(text, position):
            position, character = match.end(), match[0]
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:  # a backslash
                self._is_escaped = position == len(text)
                position += 1
            elif character != "\\":
                self._depth += 1 if character in "[{" else -1
                if self._depth <= 0:
                    return position
        return None
