"""Cut of the rows of a step into tiles for attention, and of the keys of long sequences into splits: numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from runtime.backends.triton.sizes import cdiv

MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 6
"""Two waves: registers leave room for three programs of a decode on a processor (`attention_tile`)."""


class Tiling(NamedTuple):
    """Cut of a step for attention. A row is a token and one of the query heads that share a kv head.

    Attributes:
        rows: of a tile, all of one sequence.
        shared: query heads that share a kv head.
        kv_heads: programs of a tile and split.
        programs: that the step should have at least; keys are split until it does.
        reach: most keys that a token attends to; 0 means no limit.
        least: fewest keys of a split, below which its fixed costs prevail.
    """

    rows: int
    shared: int
    kv_heads: int
    programs: int
    reach: int = 0
    least: int = MIN_SPLIT_TOKENS

    def tiles(self, tokens: int) -> int:
        """Returns the number of tiles of a sequence."""
        return cdiv(tokens * self.shared, self.rows)

    def seen(self, tokens: int, keys: int) -> int:
        """Returns how many keys the last `tokens` of a sequence of `keys` attend to together."""
        return min(keys, self.reach - 1 + tokens) if self.reach else keys

    def splits(self, lengths: Iterable[tuple[int, int]]) -> list[int]:
        """Returns the number of splits of every sequence, given as tokens and keys: equal work for all programs.

        `list_tiles` computes the same on the device.
        """
        work = [(self.tiles(tokens), self.seen(tokens, keys)) for tokens, keys in lengths]
        total = sum(tiles * seen for tiles, seen in work)
        each = max(self.least, cdiv(total * self.kv_heads, self.programs))
        return [min(MAX_SPLITS, max(1, cdiv(seen, each))) for _, seen in work]

    def most_splits(self, longest: int, num_keys: int) -> int:
        """Returns a bound on the splits of sequences of up to `longest` tokens and `num_keys` keys."""
        return min(MAX_SPLITS, max(1, cdiv(self.seen(longest, num_keys), self.least)))

    def most_tiles(self, num_sequences: int, num_tokens: int, longest: int) -> int:
        """Returns a bound on the tiles of sequences of up to `longest` tokens and `num_tokens` in all."""
        each = num_sequences * self.tiles(longest)
        return min(each, num_tokens * self.shared // self.rows + num_sequences)

    @property
    def added_splits(self) -> int:
        """Bound on the splits of all tiles beyond the first of each: see `splits`."""
        return self.programs // self.kv_heads

    def most_parts(self, num_tokens: int, most_splits: int) -> int:
        """Returns a bound on the results that wait for others, each of a token and a split.

        Sequences are split whose keys are more than those of `programs / kv_heads` equal shares of the work. So all
        their tiles together are fewer than that number, and their splits fewer than twice as many.
        """
        return min(num_tokens * most_splits, cdiv(2 * self.programs * self.rows, self.kv_heads * self.shared))


def tile_rows(head_dim: int, most: int) -> int:
    """Rows of a tile for sequences of at most `most` rows: tensor cores take no fewer than 16, registers hold no
    more than 64, or 8192 numbers."""
    sizes = [size for size in (16, 32, 64) if size * head_dim <= 8192]
    return next((size for size in sizes if most <= size), sizes[-1])
