"""The lightning indexer (arXiv:2512.02556, section 2.1) over index keys: plain torch, any dtype, any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

SCORE_NUMBERS = 2**26
"""Largest number of scores of single heads that are computed at a time."""


@dataclass(frozen=True, slots=True)
class IndexedTokens:
    """Output of the indexer of a layer for the tokens of a step.

    Attributes:
        query: `[T, heads, D]`.
        key: `[T, D]`, which is kept for later tokens.
        weights: of the heads, with all factors on scores, in at least float32: `[T, heads]`.
        num_chosen: tokens that a token sees at most.
    """

    query: Tensor
    key: Tensor
    weights: Tensor
    num_chosen: int

    def hidden(self, rows: slice, key: Tensor, seen: Tensor) -> Tensor:
        """Finds the keys that are not chosen, of n tokens of each of B sequences, one sequence after the other.

        Args:
            rows: of the tokens.
            key: `[B, L, D]`.
            seen: additive mask `[B * n, L]`; what it hides has no score.

        Returns:
            bool `[B * n, L]`.
        """
        batch, length, _ = key.shape
        query, weights = (part[rows].unflatten(0, (batch, -1)) for part in (self.query, self.weights))
        size = max(1, SCORE_NUMBERS // (batch * length * query.shape[2]))
        split = (part.split(size, 1) for part in (query, weights, seen.unflatten(0, (batch, -1))))
        keys = key.to(weights.dtype).mT
        ranked = (index_scores(q, w, keys) + mask for q, w, mask in zip(*split, strict=True))
        return torch.cat([not_highest(scores, self.num_chosen) for scores in ranked], 1).flatten(0, 1)


def index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Weighted sum over heads of scores above zero: query `[B, n, heads, D]`, weights `[B, n, heads]` and keys
    `[B, D, L]` give `[B, n, L]`, in the dtype of weights."""
    scores: Tensor = (query.to(weights.dtype).flatten(1, 2) @ keys).relu_().unflatten(1, query.shape[1:3])
    return (weights.unsqueeze(2) @ scores).squeeze(2)


def not_highest(scores: Tensor, count: int) -> Tensor:
    """Marks all but the `count` highest scores `[..., L]`, and of equal ones the first: so keys after the last one that
    a token sees change nothing."""
    least = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    is_above, is_equal = scores > least, scores == least
    room = count - is_above.sum(-1, keepdim=True)
    return ~(is_above | is_equal & (is_equal.cumsum(-1, dtype=torch.int32) <= room))


@dataclass(frozen=True, slots=True)
class ChosenSlots:
    """Places of the chosen tokens of each of n rows, in the order of the text.

    Attributes:
        slots: int64 `[n, count]`; slot = block id * block_size + offset.
        mask: additive `[n, count]`; hides what fills the places of a row that sees fewer tokens.
    """

    slots: Tensor
    mask: Tensor

    @classmethod
    def of(cls, hidden: Tensor, seen: Tensor, slots: Tensor, count: int) -> ChosenSlots:
        """Finds the `count` keys that `hidden [n, L]` leaves, with an additive mask `seen [n, L]` and slots of all keys
        `[n, L]`."""
        places = hidden.logical_not().byte().topk(count, -1, sorted=False).indices.sort(-1).values
        return cls(slots.gather(1, places), seen.gather(1, places))


Part = TypeVar("Part")
"""Form in which a part of a step knows the chosen tokens."""


class ChosenTokens(Generic[Part]):
    """Masks of the tokens that the last indexer chose, or their places, one for each part of a step.

    Args:
        sources: of every layer, the one whose indexer chooses what it sees; -1 for none.

    Attributes:
        layer, parts: the last layer with an indexer, and what it chose.
    """

    def __init__(self, sources: Sequence[int]) -> None:
        self._sources, self.layer = sources, -1
        self.parts: Sequence[Part] = []

    def put(self, layer: int, parts: Sequence[Part]) -> None:
        """Puts those of a layer with an indexer in the place of those before."""
        self.layer, self.parts = layer, parts

    def of(self, layer: int) -> Sequence[Part] | None:
        """Those of a layer; None for one that sees all tokens. Raises ValueError where its indexer did not choose."""
        source = self._sources[layer] if self._sources else -1
        if source not in (-1, self.layer):
            raise ValueError(f"layer {layer} sees what layer {source} chooses, which did not")
        return self.parts if source >= 0 else None


def choose_in_spans(tokens: IndexedTokens, length: int, mask: Tensor | None, dtype: torch.dtype) -> list[Tensor | None]:
    """Masks of whole sequences of `length` tokens that lie one after the other.

    Args:
        mask: additive `[length, copies * length]`, where keys stand once or in several forms; None is causal.
        dtype: of the masks.
    """
    spans = [slice(start, start + length) for start in range(0, len(tokens.key), length)]
    if length <= tokens.num_chosen:
        return [mask] * len(spans)
    if mask is None:
        mask = torch.full((length, length), float("-inf"), dtype=dtype, device=tokens.key.device).triu_(1)
    forms = mask.unflatten(-1, (-1, length))
    seen, copies = forms.amax(1), forms.shape[1]
    hidden = (tokens.hidden(span, tokens.key[span].unsqueeze(0), seen) for span in spans)
    return [mask.masked_fill(each.repeat(1, copies), float("-inf")) for each in hidden]
