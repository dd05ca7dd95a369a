"""Drafts by n-gram lookup: proposes what followed the last few tokens where they occurred before. No model, no torch.

If they occurred more than once, the latest continuation is the draft, or each continuation is a branch of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from runtime.core.draft_tree import grow_tree
from runtime.core.request import Sequence
from runtime.speculative.proposer import DraftRequest

LENGTHS = (3, 2)
"""Lengths of the n-grams that are looked up, the longest first."""
CHAINS, TREES = "ngram", "ngram-tree"
"""Values of `RuntimeConfig.speculative_model` for one continuation and for a tree of them."""
MTP = "mtp"
"""The value for the checkpoint's own head of multi-token prediction (`runtime.speculative.mtp`)."""
TREE_BRANCHES = 4
"""Most continuations in a tree."""
MAX_TREE_TOKENS = 16
"""Most draft tokens in a tree, as many as in the longest chain."""


@dataclass(slots=True)
class _Index:
    """Positions where the n-grams of one sequence last ended, up to `num_indexed`.

    Attributes:
        earlier: by length and end of an n-gram, where it ended the time before; None keeps the last ends only.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0
    earlier: dict[tuple[int, int], int] | None = None

    def extend(self, token_ids: list[int]) -> None:
        """Adds every n-gram that ends before the last token; those that end at the last token are looked up."""
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
        """Finds up to `count` positions that follow an earlier occurrence of the last tokens: longer matches first,
        then later ones."""
        found: list[int] = []
        for length in LENGTHS:
            end = self.ends.get(tuple(token_ids[-length:])) if length < len(token_ids) else None
            while end is not None and len(found) < count:
                if end not in found:
                    found.append(end)
                end = None if self.earlier is None else self.earlier.get((length, end))
        return found


class NgramDrafter:
    """Looks up the last tokens in prompt and output. A token costs two dictionary entries, a draft two lookups.

    Suits output that repeats input: code edits, summaries with quotes, extraction. Without repetition it drafts nothing
    and costs almost nothing.

    Args:
        max_branches: most continuations in a draft; above 1 they form a tree. A sequence with a grammar gets one.
    """

    def __init__(self, max_branches: int = 1) -> None:
        self.max_branches = max_branches
        self._indices: dict[Sequence, _Index] = {}

    def propose(self, requests: ListOf[DraftRequest]) -> None:
        self._indices = {sequence: self._indices.get(sequence) or self._new_index() for sequence, _ in requests}
        for sequence, count in requests:
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
    """Returns `count` tokens from `start` on, repeating the rest of the sequence as a cycle if it is shorter."""
    cycle = len(token_ids) - start
    return [token_ids[start + step % cycle] for step in range(count)]
