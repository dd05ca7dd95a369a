"""Incremental parser of tool calls. The result does not depend on how the text is split."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from runtime.text.tools import ToolFormat

NOTABLE = re.compile(r'["\\\[\]{}]')


class JsonEnd:
    """Finds the end of a JSON value by counting brackets outside of strings; does not validate it."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str, start: int = 0) -> int | None:
        """Returns the position after the value that begins at `start`, or None while it is incomplete.

        Each call must bring the text of the call before, and more of it; the old part is not read again.
        """
        position = max(self._position, start)
        while match := NOTABLE.search(text, position):
            position = match.end()
            character = match[0]
            if character == "\\" and self._in_string:
                if position == len(text):
                    position -= 1  # what it escapes is not there yet
                    break
                position += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character != "\\":
                self._depth += 1 if character in "[{" else -1
                if self._depth <= 0:
                    self._position = position
                    return position
        else:
            position = len(text)
        self._position = position
        return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Piece = str | ToolCall


class _State(Enum):
    BEGINNING = auto()
    """Only whitespace so far, or since a separator."""
    TEXT = auto()
    CALL = auto()
    """After an opening tag, or inside JSON that may be a call."""
    CLOSING = auto()
    """After a call."""


class ToolCallParser:
    """Splits an answer into text and calls.

    A call comes out when its JSON is complete. What only looks like one (bad JSON, no name, arguments that are no
    object) comes out as the text that it is. Blanks between text and calls are dropped.

    Args:
        several: report more than one call; otherwise everything behind the first one is dropped.
    """

    def __init__(self, tool_format: ToolFormat, *, several: bool = True) -> None:
        self.format = tool_format
        self.num_calls = 0
        self._several = several
        self._state = _State.BEGINNING
        self._held = ""
        self._blanks = ""
        self._opening = ""
        self._json = JsonEnd()

    def push(self, text: str) -> list[Piece]:
        """Adds text and returns the completed pieces."""
        self._held += text
        return list(self._advance())

    def flush(self) -> list[Piece]:
        """Returns the rest after the last text."""
        pieces: list[Piece] = []
        while self._state is _State.CALL and not self._is_over():
            pieces += self._give_up()
            pieces += self._advance()
        closing = self.format.closing
        if self._held.strip() and not (self._state is _State.CLOSING and closing.startswith(self._held.strip())):
            pieces += self._text(self._held)
        elif self._state is not _State.CLOSING:
            self._blanks += self._held
        if self._blanks and not self.num_calls:
            pieces.append(self._blanks)
        self._held = self._blanks = ""
        return pieces

    def _is_over(self) -> bool:
        return self.num_calls > 0 and not self._several

    def _advance(self) -> Iterator[Piece]:
        """Completes as many pieces as possible."""
        steps = {
            _State.BEGINNING: self._begin,
            _State.TEXT: self._pass_text,
            _State.CALL: self._read_call,
            _State.CLOSING: self._close,
        }
        while True:
            if self._is_over():
                self._held = ""
                return
            before = self._state, len(self._held)
            yield from steps[self._state]()
            if (self._state, len(self._held)) == before:
                return

    def _begin(self) -> Iterator[Piece]:
        text = self._held.lstrip()
        opening = self.format.opening
        if self.format.is_bare and opening.startswith(text) and text != opening:
            return  # blank, or what may still become the tag
        if self.format.is_bare and text[0] == self.format.bracket and not text.startswith(opening):
            self._enter_call(self._held[: len(self._held) - len(text)], text)
        else:
            self._state = _State.TEXT
        yield from ()

    def _pass_text(self) -> Iterator[Piece]:
        opening = self.format.opening
        text, found, rest = self._held.partition(opening)
        if found:
            yield from self._text(text)
            self._enter_call(opening, rest)
            return
        kept = next((n for n in range(len(opening) - 1, 0, -1) if text.endswith(opening[:n])), 0)
        self._held = text[len(text) - kept :]
        yield from self._text(text[: len(text) - kept])

    def _read_call(self) -> Iterator[Piece]:
        text = self._held.lstrip()
        if not text:
            return
        if text[0] != self.format.bracket:
            yield from self._give_up()
            return
        end = self._json.find(self._held, len(self._held) - len(text))
        if end is None:
            return
        calls = self._parse(self._held[:end])
        if not calls:
            yield from self._give_up()
            return
        self._blanks = ""
        self._held = self._held[end:]
        self._state = _State.CLOSING
        for call in calls if self._several else calls[:1]:
            self.num_calls += 1
            yield call

    def _close(self) -> Iterator[Piece]:
        mark = self.format.closing or self.format.separator
        text = self._held.lstrip()
        if mark and text.startswith(mark):
            self._held = text[len(mark) :]
            self._state = _State.BEGINNING
        elif not text or (mark and mark.startswith(text)):
            return
        else:
            self._state = _State.TEXT
        yield from ()

    def _enter_call(self, opening: str, rest: str) -> None:
        self._opening, self._held, self._json = opening, rest, JsonEnd()
        self._state = _State.CALL

    def _give_up(self) -> Iterator[Piece]:
        """Treats the first character of a supposed call as text, so that a real call may follow inside."""
        opening = self._opening
        if not opening.strip():  # bare JSON
            opening, self._held = opening + self._held[:1], self._held[1:]
        self._state = _State.TEXT
        yield from self._text(opening)

    def _text(self, text: str) -> Iterator[Piece]:
        """Returns text without whitespace at its end, which a call may follow."""
        text = self._blanks + text
        settled = text.rstrip()
        self._blanks = text[len(settled) :]
        if settled:
            yield settled

    def _parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in a JSON value; none unless all of it is calls."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        found = [parse_call(item, self.format.arguments) for item in (value if self.format.is_list else [value])]
        calls = [call for call in found if call is not None]
        return calls if len(calls) == len(found) else []


def parse_call(value: Any, arguments_key: str) -> ToolCall | None:
    """Returns the call that a JSON value represents, or None."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(arguments_key)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
