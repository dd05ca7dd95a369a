"""Guesses from the sequence itself: what followed when its last few tokens stood there before. No model, no torch.

Where they stood there more than once, the last continuation is the guess, or each one a branch of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from runtime.core.request import Sequence
from runtime.core.step import grow_tree
from runtime.speculative.proposer import Wish

LENGTHS = (3, 2)
"""Numbers of tokens that must agree with an earlier place; the first that is found counts."""
CHAINS, TREES = "ngram", "ngram-tree"
"""What users write for n-grams, and for branches of them (`RuntimeConfig.speculate`)."""
TREE_BRANCHES = 4
"""Earlier places that a tree looks at."""
MAX_TREE_TOKENS = 16
"""Guesses of a tree: as many as the longest chain."""


@dataclass(slots=True)
class _Index:
    """Of one sequence: where its n-grams ended the last time. Covers ends up to `num_indexed`.

    Attributes:
        earlier: where the n-gram of a length that ends at a place ended the time before; None keeps last places only.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0
    earlier: dict[tuple[int, int], int] | None = None

    def extend(self, token_ids: list[int]) -> None:
        """Adds every n-gram that ends before the last token; the last ones are what is looked up."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for length in LENGTHS:
                if length <= end:
                    self._add(tuple(token_ids[end - length : end]), end)
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def _add(self, ngram: tuple[int, ...], end: int) -> None:
        if self.earlier is not None and ngram in self.ends:
            self.earlier[len(ngram), end] = self.ends[ngram]
        self.ends[ngram] = end

    def find(self, token_ids: list[int], count: int) -> list[int]:
        """Where up to `count` earlier places that look like the end of the tokens go on: those that agree about more
        tokens first, then the latest."""
        found: list[int] = []
        for length in LENGTHS:
            end = self.ends.get(tuple(token_ids[-length:])) if length < len(token_ids) else None
            while end is not None and len(found) < count:
                if end not in found:
                    found.append(end)
                end = None if self.earlier is None else self.earlier.get((length, end))
        return found


class NgramDrafter:
    """Looks the last tokens up in prompt and output. Each token costs two dictionary entries, each guess two look-ups.

    Good where output repeats input: code edits, summaries with quotes, extraction. Where nothing repeats it guesses
    nothing and costs next to nothing.

    Args:
        max_branches: continuations that a draft joins to a tree. A sequence that follows a grammar gets one.
    """

    def __init__(self, max_branches: int = 1) -> None:
        self.max_branches = max_branches
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, wishes: ListOf[Wish]) -> None:
        self._indices = {sequence: self._indices.get(sequence) or self._new_index() for sequence, _ in wishes}
        for sequence, count in wishes:
            branches = self._branches(sequence, count) if count else []
            sequence.draft_token_ids, sequence.draft_parents = grow_tree(branches, MAX_TREE_TOKENS)

    def _new_index(self) -> _Index:
        return _Index(earlier={} if self.max_branches > 1 else None)

    def _branches(self, sequence: Sequence, count: int) -> list[list[int]]:
        index, token_ids = self._indices[sequence], sequence.token_ids
        index.extend(token_ids)
        starts = index.find(token_ids, self.max_branches if sequence.constraint is None else 1)
        return [_continuation(token_ids, start, count) for start in starts]


def _continuation(token_ids: list[int], start: int, count: int) -> list[int]:
    """The `count` tokens from `start` on. A place so close to the end that they run into themselves is a cycle: it goes
    round."""
    cycle = len(token_ids) - start
    return [token_ids[start + step % cycle] for step in range(count)]
