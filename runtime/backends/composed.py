"""Linears that are made of other linears: low-rank factors, and outlier columns beside codes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.backends.base import Linear


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


@dataclass(frozen=True, slots=True)
class WithOutliers:
    """`base(x without the columns) + x[:, columns] values^T`. Where inputs are rounded to 8 bits, their scale thus
    comes from the other columns alone, as in LLM.int8() (arXiv:2208.07339).

    Attributes:
        base: multiplies by the codes; the bias belongs to it.
        columns: int64 `[k]`.
        values: `[k, O]`, in the activation dtype.
    """

    base: Linear
    columns: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """The few column numbers are not counted."""
        return self.base.nbytes + self.values.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rest = x.index_fill(1, self.columns, 0)
        return self.base(rest).addmm(x.index_select(1, self.columns), self.values)
