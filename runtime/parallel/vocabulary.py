"""Embedding and output head of which each rank holds the rows of some tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.cuts import size
from runtime.backends.base import Linear
from runtime.parallel.group import Group


class Rows(Protocol):
    """A matrix whose rows are looked up."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SharedRows:
    """An embedding: a rank looks up its tokens, others give zeros.

    Attributes:
        rows: those of the tokens `share`.
    """

    rows: Rows
    share: slice
    group: Group

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns rows `[T, H]` of int64 `token_ids [T]`, in long steps those of the rank's own tokens."""
        own = token_ids - self.share.start
        is_elsewhere = (own < 0) | (own >= size(self.share))
        found = self.rows(own.masked_fill_(is_elsewhere, 0))
        return self.group.sum_rows(found.masked_fill_(is_elsewhere.unsqueeze(-1), 0))


@dataclass(frozen=True, slots=True)
class ProductWanted:
    """Tells other ranks to multiply rows by their parts of the output head."""

    num_rows: int


@dataclass(frozen=True, slots=True)
class SharedHead:
    """An output head. The first rank may call it at any time; others are told to `follow`.

    Attributes:
        part: gives the logits of the tokens `shares[rank]`.
        shares: of all ranks.
    """

    part: Linear
    shares: tuple[slice, ...]
    group: Group

    @property
    def nbytes(self) -> int:
        return self.part.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Returns logits `[M, V]` of `x [M, H]`."""
        self.group.others.tell(ProductWanted(len(x)))
        parts = zip(self._multiply(x.contiguous()), self.shares, strict=True)
        return torch.cat([part[:, : size(share)] for part, share in parts], -1)

    def follow(self, wanted: ProductWanted, hidden_size: int, dtype: torch.dtype) -> None:
        """Multiplies the rows that the first rank sends, and sends it the result."""
        self._multiply(torch.empty(wanted.num_rows, hidden_size, dtype=dtype, device=self.group.device))

    def _multiply(self, x: Tensor) -> list[Tensor]:
        self.group.broadcast(x)
        own, widest = self.part(x), max(map(size, self.shares))
        return self.group.gather(functional.pad(own, (0, widest - own.shape[-1])))
