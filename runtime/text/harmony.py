"""Answers in channels (gpt-oss): analysis is reasoning, messages to functions are calls, other messages are text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from runtime.text.call_head import held_back
from runtime.text.pieces import CallArguments, CallStart, Piece, Reasoning, joined
from runtime.text.reasoning import Position, ReasoningFormat
from runtime.text.tool_grammar import ANY, escape, literal

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", START)
FINAL = f"{CHANNEL}final{MESSAGE}"
RECIPIENT, FUNCTIONS = re.compile(r"\bto=([^\s<]+)"), "functions."


@dataclass(frozen=True, slots=True)
class HarmonyFormat(ReasoningFormat):
    """Reasoning format with separate messages."""

    def position(self, prompt: str) -> Position:
        return Position.BEFORE if prompt.endswith(f"{START}assistant") else Position.AFTER

    def prefix(self, position: Position, special_ids: Mapping[str, int], *, is_call: bool = False) -> str:
        if position is Position.AFTER:
            return ""
        opening, final = literal(f"{CHANNEL}analysis{MESSAGE}", special_ids), literal(FINAL, special_ids)
        turn = literal(f"{START}assistant", special_ids)
        if END in special_ids:
            thoughts = [f"thoughts: THOUGHTS? {literal(END, special_ids)}", rf"THOUGHTS: /{ANY}/"]
        else:
            thoughts = [f"thoughts[lazy]: /{ANY}{escape(END)}/"]
        start = f"start: ({opening} thoughts {turn})* {'' if is_call else final} answer"
        return "\n".join([start, *thoughts])


HARMONY = HarmonyFormat("harmony", r"<\|channel\|>analysis", CHANNEL, END)


class _State(Enum):
    BEGINNING = auto()
    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()
    """In a message to a function, before its arguments."""
    ARGUMENTS = auto()
    PLAIN = auto()
    """In an answer without channels."""
    OVER = auto()


class HarmonyParser:
    """Incremental parser of messages. The result does not depend on how the text is split.

    Args:
        calls: whether to report calls; otherwise messages to functions are text.
        several: whether to report more than one call; otherwise everything after the first one is dropped.
    """

    def __init__(self, *, calls: bool, several: bool = True) -> None:
        self.num_calls = 0
        self._calls, self._several = calls, several
        self._state = _State.BEGINNING
        self._held = self._name = self._gap = ""
        self._has_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Piece]:
        """Adds text and returns the completed pieces."""
        self._held += text
        pieces: list[Piece] = []
        while self._state is not _State.OVER:
            before = self._state, len(self._held)
            pieces += self._advance()
            if (self._state, len(self._held)) == before:
                break
        return joined(pieces)

    def flush(self) -> list[Piece]:
        """Returns the remaining pieces at the end of input; an incomplete message head is dropped."""
        held, self._held = self._held, ""
        if self._state in (_State.HEADER, _State.OVER) or not held:
            return []
        return list(self._body(held, is_end=False))

    def _advance(self) -> Iterator[Piece]:
        if self._state is _State.BEGINNING:
            self._begin()
        elif self._state is _State.HEADER:
            self._read_header()
        elif self._state is _State.PLAIN:
            held, self._held = self._held, ""
            yield from [held] if held else []
        else:
            yield from self._read_body()

    def _begin(self) -> None:
        text = self._held.lstrip()
        marks = (CHANNEL, START, "to=")
        if any(text.startswith(mark) for mark in marks):
            self._state = _State.HEADER
        elif not any(mark.startswith(text) for mark in marks):
            self._state = _State.PLAIN

    def _read_header(self) -> None:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return
        self._held = rest
        recipient = RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        if self._calls and name.startswith(FUNCTIONS):
            self._state, self._name = _State.CALL, name.removeprefix(FUNCTIONS)
        elif f"{CHANNEL}analysis" in header or (name and not name.startswith(FUNCTIONS)):
            self._state, self._gap = _State.REASONING, "\n" if self._has_reasoning else ""
        else:
            self._state = _State.TEXT

    def _read_body(self) -> Iterator[Piece]:
        ends = [place for mark in ENDS if (place := self._held.find(mark)) >= 0]
        if not ends:
            kept = max(held_back(self._held, mark) for mark in ENDS)
            body, held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
            self._held = ""
            yield from self._body(body, is_end=False)
            self._held += held
            return
        body, rest = self._held[: min(ends)], self._held[min(ends) :]
        mark = next(mark for mark in ENDS if rest.startswith(mark))
        self._held = ""
        yield from self._body(body, is_end=True)
        self._held = rest if mark == START else rest[len(mark) :]
        is_over = self._state is _State.ARGUMENTS and not self._several
        self._state = _State.OVER if is_over else _State.HEADER

    def _body(self, text: str, *, is_end: bool) -> Iterator[Piece]:
        """Yields the pieces of a part of a message."""
        if self._state is _State.CALL:
            begun = text.lstrip()
            if not begun and not is_end:
                self._held = text
                return
            self._state = _State.ARGUMENTS if begun.startswith("{") or not begun else _State.TEXT
            if self._state is _State.ARGUMENTS:
                self.num_calls += 1
                text = begun or "{}"
                yield CallStart(self._name)
        if not text:
            return
        if self._state is _State.ARGUMENTS:
            yield CallArguments(text)
        elif self._state is _State.REASONING:
            yield Reasoning(self._gap + text)
            self._gap, self._has_reasoning = "", True
        else:
            yield text
