"""Incremental parser of tool calls. The result does not depend on how the text is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto

from runtime.text.call_head import held_back
from runtime.text.pieces import CallStart, Piece, joined
from runtime.text.tool_format import CallReader, ReaderState, Tool, ToolFormat


class _State(Enum):
    BEGINNING = auto()
    """Only whitespace so far."""
    TEXT = auto()
    CALL = auto()
    """After an opening tag or a separator, or inside a possible call without a tag."""
    CLOSING = auto()
    """After a call."""


class ToolCallParser:
    """Incremental parser of text and calls.

    The parts of a call are emitted incrementally once its name and the start of its arguments are certain. A prefix
    that turns out not to be a call is emitted as text. Whitespace between text and calls is dropped.

    Args:
        tools: tools that may be called; formats without JSON need their schemas.
        several: whether to report more than one call; otherwise everything after the first one is dropped.
    """

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool] = (), *, several: bool = True) -> None:
        self.format = tool_format
        self.num_calls = 0
        self._tools = tools
        self._several = several
        self._state = _State.BEGINNING
        self._held = ""
        self._blanks = ""
        self._opening = ""
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Piece]:
        """Adds text and returns the completed pieces."""
        self._held += text
        return joined(self._advance())

    def flush(self) -> list[Piece]:
        """Returns the remaining pieces at the end of input."""
        pieces: list[Piece] = []
        while self._is_undecided() and not self._is_over():
            pieces += self._give_up()
            pieces += self._advance()
        if self._state is _State.CALL and self._reader is not None:
            pieces += self._reader.flush(self._held)
            self._held = ""
        rest = self._held.strip()
        if rest and not (self._state is _State.CLOSING and any(mark.startswith(rest) for mark in self._marks())):
            pieces += self._text(self._held)
        elif self._state is not _State.CLOSING:
            self._blanks += self._held
        if self._blanks and not self.num_calls:
            pieces.append(self._blanks)
        self._held = self._blanks = ""
        return joined(pieces)

    def _is_undecided(self) -> bool:
        """Returns whether held-back text may be a call."""
        return self._state is _State.CALL and (self._reader is None or self._reader.state is not ReaderState.BODY)

    def _is_over(self) -> bool:
        return self.num_calls > 0 and not self._several and self._state is not _State.CALL

    def _advance(self) -> Iterator[Piece]:
        """Emits all complete pieces."""
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
        opening, bare = self.format.opening, self.format.bare
        if bare and opening.startswith(text) and text != opening:
            return  # whitespace, or a prefix of the tag
        if bare and text[0] == bare and not text.startswith(opening):
            self._enter_call(self._held[: len(self._held) - len(text)], text, is_first=True)
        else:
            self._state = _State.TEXT
        yield from ()

    def _pass_text(self) -> Iterator[Piece]:
        opening = self.format.opening
        text, found, rest = self._held.partition(opening)
        if found:
            yield from self._text(text)
            self._enter_call(opening, rest, is_first=True)
            return
        kept = held_back(text, opening)
        self._held = text[len(text) - kept :]
        yield from self._text(text[: len(text) - kept])

    def _read_call(self) -> Iterator[Piece]:
        reader = self._reader
        if reader is None or not self._held:
            return
        consumed, pieces = reader.read(self._held)
        self._held = self._held[consumed:]
        if any(isinstance(piece, CallStart) for piece in pieces):
            self.num_calls += 1
            self._blanks = ""
        yield from pieces
        if reader.state is ReaderState.NO_CALL:
            yield from self._give_up()
        elif reader.state is ReaderState.DONE:
            self._state = _State.CLOSING

    def _close(self) -> Iterator[Piece]:
        closing, separator = self.format.closing, self.format.separator
        text = self._held.lstrip()
        if closing and text.startswith(closing):
            self._held, self._state = text[len(closing) :], _State.TEXT
        elif not text or any(mark.startswith(text) for mark in self._marks()):
            return
        elif separator is not None and text.startswith(separator.strip()):
            mark = separator.strip()
            self._enter_call(mark, text[len(mark) :], is_first=False)
        else:
            self._state = _State.TEXT
        yield from ()

    def _marks(self) -> list[str]:
        """Returns the marks that may follow a call, without whitespace."""
        marks = (self.format.closing, (self.format.separator or "").strip())
        return [mark for mark in marks if mark]

    def _enter_call(self, opening: str, rest: str, *, is_first: bool) -> None:
        self._opening, self._held = opening, rest
        self._reader = self.format.reader(self._tools, is_first=is_first)
        self._state = _State.CALL

    def _give_up(self) -> Iterator[Piece]:
        """Treats the first character of a supposed call as text; a real call may start after it."""
        opening = self._opening
        if not opening.strip():  # a call without a tag
            opening, self._held = opening + self._held[:1], self._held[1:]
        self._state, self._reader = _State.TEXT, None
        yield from self._text(opening)

    def _text(self, text: str) -> Iterator[Piece]:
        """Yields text without trailing whitespace, which a call may follow."""
        text = self._blanks + text
        settled = text.rstrip()
        self._blanks = text[len(settled) :]
        if settled:
            yield settled
