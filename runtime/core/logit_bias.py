"""Additive logit biases by token id. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from compress.common.errors import RequestError

MAX_BIAS = 100


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Additive logit biases as two columns: a bias may cover the whole vocabulary, and every step reads it.

    Attributes:
        token_ids: int64 `[n]`.
        values: float64 `[n]`.
    """

    token_ids: array[int]
    values: array[float]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> LogitBias:
        """Converts pairs of token id and value into columns; values of the same token are summed.

        Raises:
            RequestError: a value outside of its range.
        """
        pairs = tuple(pairs)
        if wrong := [value for _, value in pairs if not -MAX_BIAS <= value <= MAX_BIAS]:
            rule = f"logit_bias must be between -{MAX_BIAS} and {MAX_BIAS} each"
            raise RequestError(f"logit_bias={wrong[0]!r} is not allowed", rule)
        return cls.summed(pairs)

    @classmethod
    def summed(cls, pairs: Iterable[tuple[int, float]]) -> LogitBias:
        """Converts like `of`, without checking the range of values."""
        token_ids, values = zip(*pairs, strict=True) if (pairs := tuple(pairs)) else ((), ())
        if len(set(token_ids)) == len(token_ids):
            return cls(array("q", token_ids), array("d", values))
        summed = dict.fromkeys(token_ids, 0.0)
        for token_id, value in pairs:
            summed[token_id] += value
        return cls(array("q", summed), array("d", summed.values()))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.token_ids, self.values, strict=True)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, LogitBias | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))
