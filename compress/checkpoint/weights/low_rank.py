"""A weight of low rank: the product of two factors, each stored as numbers or as integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import SchemeError

Factor = IntegerWeight | Tensor


@dataclass(frozen=True, slots=True)
class LowRankWeight:
    """`W [O, I] = left right`.

    Attributes:
        left: `[O, rank]`, float in the model's dtype, or integers of `scheme.factor`.
        right: `[rank, I]`, likewise.
        scheme: of both, and their rank.

    Raises:
        SchemeError: factors that contradict the scheme or each other.
    """

    left: Factor
    right: Factor
    scheme: Scheme

    def __post_init__(self) -> None:
        if self.scheme.rank is None:
            raise SchemeError(f"{self.scheme} is not a scheme of low rank")
        left, right = tuple(self.left.shape), tuple(self.right.shape)
        if (left[1:], right[:1]) != ((self.scheme.rank,),) * 2 or len(right) != 2:
            raise SchemeError(f"factors {left} and {right} are not of rank {self.scheme.rank}")
        if any((None if isinstance(each, Tensor) else each.scheme) != self.scheme.factor for each in self.factors):
            raise SchemeError(f"factors are not stored as {self.scheme} says")

    @property
    def factors(self) -> tuple[Factor, Factor]:
        """Left and right."""
        return self.left, self.right

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight `[O, I]`. The product is taken in float32, or in `dtype` where that is wider, and rounded once."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        left, right = (values(factor, exact) for factor in self.factors)
        return (left @ right).to(dtype)

    def cpu(self) -> LowRankWeight:
        """The same in host memory."""
        return LowRankWeight(self.left.cpu(), self.right.cpu(), self.scheme)


def values(factor: Factor, dtype: torch.dtype) -> Tensor:
    """A factor as plain numbers."""
    return factor.to(dtype) if isinstance(factor, Tensor) else factor.dequantize(dtype)
