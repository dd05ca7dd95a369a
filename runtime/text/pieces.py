"""Parts of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Next part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Beginning of a tool call, as soon as its name is certain."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next part of the arguments of the last call; joined, the parts are a JSON object as text."""

    text: str


CallPiece = CallStart | CallArguments
Piece = str | Reasoning | CallPiece
"""A part of an answer; strings are text for the user."""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns pieces in which none follows another that it could be joined with."""
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
    """Yields the calls among the pieces of an answer, each with all of its arguments."""
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
