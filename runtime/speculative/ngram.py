"""Guesses from the sequence itself: what followed when its last few tokens stood there before. No model, no torch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from runtime.speculative.base import Wish
from runtime.types import Sequence

LENGTHS = (3, 2)
"""Numbers of tokens that must agree with an earlier place; the first that is found counts."""


@dataclass(slots=True)
class _Index:
    """Of one sequence: where its n-grams ended the last time. Covers ends up to `num_indexed`."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0

    def extend(self, token_ids: list[int]) -> None:
        """Adds every n-gram that ends before the last token; the last ones are what is looked up."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for length in LENGTHS:
                if length <= end:
                    self.ends[tuple(token_ids[end - length : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, token_ids: list[int]) -> int | None:
        """Where the latest earlier place that looks like the end of the tokens goes on."""
        found = (self.ends.get(tuple(token_ids[-length:])) for length in LENGTHS if length < len(token_ids))
        return next((end for end in found if end is not None), None)


class NgramDrafter:
    """Looks the last tokens up in prompt and output. Each token costs two dictionary entries, each guess two look-ups.

    Good where output repeats input: code edits, summaries with quotes, extraction. Where nothing repeats it guesses
    nothing and costs next to nothing.
    """

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, wishes: ListOf[Wish]) -> None:
        self._indices = {sequence: self._indices.get(sequence) or _Index() for sequence, _ in wishes}
        for sequence, count in wishes:
            sequence.draft_token_ids = self._guess(sequence, count) if count else []

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        index, token_ids = self._indices[sequence], sequence.token_ids
        index.extend(token_ids)
        start = index.find(token_ids)
        if start is None:
            return []
        # A place so close to the end that the guess runs into the guess itself is a cycle: it goes round.
        cycle = len(token_ids) - start
        return [token_ids[start + step % cycle] for step in range(count)]
