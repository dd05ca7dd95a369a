"""Incremental matching of the beginnings of tool calls, and of the end of JSON values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Wait(Enum):
    """Result of a match that more text decides."""

    WAIT = auto()


WAIT = Wait.WAIT


@dataclass(frozen=True, slots=True)
class Token:
    """A variable part of a call's beginning.

    Attributes:
        pattern: the whole part.
        begins: characters that it may begin with.
        may_grow: text behind it may belong to it, so that it ends only where something else follows.
    """

    pattern: re.Pattern[str]
    begins: re.Pattern[str]
    may_grow: bool


WORD = Token(re.compile(r"[A-Za-z0-9_.-]+"), re.compile(r"[A-Za-z0-9_.-]"), may_grow=True)
QUOTED = Token(re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL), re.compile('"'), may_grow=False)

Part = str | Token


@dataclass(frozen=True, slots=True)
class Head:
    """A matched beginning: its variable parts as written, and the position behind it."""

    values: tuple[str, ...]
    end: int


def match_head(text: str, parts: Sequence[Part]) -> Head | Wait | None:
    """Matches parts with whitespace between them at the start of a text; returns None if none can follow."""
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
    """Returns the length of the longest end of a text that begins a mark."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)


NOTABLE = re.compile(r'["\\\[\]{}]')
IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of a JSON value by counting brackets outside of strings; does not validate it.

    Args:
        depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Returns the position in the new text behind the value, or None while it is incomplete."""
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
