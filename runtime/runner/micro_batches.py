"""Parts of a step: while a stage of a model computes one, the stage before it computes the next. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from runtime.core.batch import MAX_SHARED_TOKENS
from runtime.core.step import KNOWN, ScheduledSequence

LEAST_TOKENS = {"cpu": 32, "cuda": 128}
"""Tokens of a part at least, because each part reads all weights again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A span, or a part of one.

    Attributes:
        row: of its first token in the whole step.
    """

    entry: ScheduledSequence
    row: int


def split_step(entries: Sequence[ScheduledSequence], count: int, least: int, block_size: int) -> list[list[Piece]]:
    """Divides a step into parts of similar size: `count` where each has `least` tokens or more, and about as many.

    Parts must be computed in their order: a long span is divided where a block ends, and its later tokens read the keys
    of earlier ones.

    Args:
        entries: in the order of their rows.
    """
    total = sum(entry.num_tokens for entry in entries)
    size = -(-total // max(1, min(count, total // least)))
    parts: list[list[Piece]] = [[]]
    room = size
    for piece in _pieces(entries, size, block_size):
        if parts[-1] and piece.entry.num_tokens > room:
            parts.append([])
            room = size
        parts[-1].append(piece)
        room -= piece.entry.num_tokens
    return parts


def _pieces(entries: Iterable[ScheduledSequence], size: int, block_size: int) -> Iterator[Piece]:
    row = 0
    for entry in entries:
        stop = entry.start + entry.num_tokens
        bounds = [entry.start, stop]
        if entry.num_tokens > max(size, MAX_SHARED_TOKENS) and _is_divisible(entry):
            inner = (entry.start + size) // block_size * block_size
            bounds[1:1] = range(inner, stop, max(1, size // block_size) * block_size) if inner > entry.start else ()
        for first, last in pairwise(bounds):
            yield Piece(replace(entry, start=first, num_tokens=last - first), row)
            row += last - first


def _is_divisible(entry: ScheduledSequence) -> bool:
    """Whether nothing happens between the tokens of a span: no states are kept, and no drafts verified."""
    return not entry.state_writes and not entry.num_draft_tokens and entry.source_row == KNOWN
