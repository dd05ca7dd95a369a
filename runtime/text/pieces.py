"""Parts of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Next part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call, as soon as its name is certain."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next part of the arguments of the last call; the concatenated parts are a JSON object."""

    text: str


CallPiece = CallStart | CallArguments
Piece = str | Reasoning | CallPiece
"""Part of an answer; strings are text for the user."""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merges adjacent pieces of the same kind."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            found[-1] = CallArguments(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        else:
            found.append(piece)
    return found


def calls_of(pieces: Iterable[Piece]) -> Iterator[tuple[CallStart, str]]:
    """Yields the calls among the pieces of an answer, with complete arguments."""
    start, arguments = None, ""
    for piece in pieces:
        if isinstance(piece, CallStart):
            if start is not None:
                yield start, arguments
            start, arguments = piece, ""
        elif isinstance(piece, CallArguments):
            arguments += piece.text
    if start is not None:
        yield start, arguments
