"""A weight of low rank as two products, one after the other: never multiplied out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.kernels.base import Linear


@dataclass(frozen=True, slots=True)
class LowRank:
    """`x right^T left^T + bias`: the bias belongs to `left`."""

    right: Linear
    left: Linear

    @property
    def nbytes(self) -> int:
        return self.right.nbytes + self.left.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.left(self.right(x))
