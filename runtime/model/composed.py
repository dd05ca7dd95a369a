"""Linears that are made of other linears: side by side over one input, low-rank factors, and outlier columns next to
codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.weights import Weight
from runtime.backends.base import Linear


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Linears over one input whose schemes differ, so that they cannot be one weight."""

    parts: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


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


def fuse_weights(weights: Sequence[Weight | Tensor]) -> Weight | Tensor | None:
    """Concatenates weights over one input along the output features; None when their forms or dtypes differ, or when
    their form does not allow it."""
    if len(weights) == 1:
        return weights[0]
    packed = [weight for weight in weights if isinstance(weight, Weight)]
    if len(packed) == len(weights):
        return packed[0].fuse(packed[1:])
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    return torch.cat(dense) if len(dense) == len(weights) and len({weight.dtype for weight in dense}) == 1 else None


def fuse_biases(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Concatenates biases, with zeros for parts without one; None when no part has one."""
    present = next((bias for bias in biases if bias is not None), None)
    if present is None:
        return None
    return torch.cat([present.new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True)])
