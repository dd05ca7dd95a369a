"""Parts of weights, linears and norms, as cuts say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from compress.checkpoint.weights import Weight
from compress.checkpoint.weights.base import cut_rows
from compress.models.cuts import Cut
from compress.models.norm import NormShare
from runtime.backends.base import Linear, Sum


def cut_weight(weight: Weight | Tensor, cut: Cut) -> Weight | Tensor:
    """Returns the part of a weight `[O, I]` that a cut describes."""
    if isinstance(weight, Tensor):
        weight = cut_rows(weight, cut.rows) if cut.rows else weight
        return weight if cut.columns is None else weight[:, cut.columns]
    weight = weight.some_rows(cut.rows) if cut.rows else weight
    return weight if cut.columns is None else weight.some_columns(cut.columns)


def cut_vector(vector: Tensor, cut: Cut) -> Tensor:
    """Returns the part of a tensor, whose outputs are its first dimension of more than one."""
    outer = next((dim for dim, count in enumerate(vector.shape) if count > 1), 0)
    return cut_rows(vector.flatten(0, outer), cut.rows)[(None,) * outer]


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """A linear that has more columns than its inputs, as a cut does not divide groups: zeros stand for the others.

    Attributes:
        padding: columns before and after the inputs.
    """

    linear: Linear
    padding: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `[M, O]` of `x [M, I]`."""
        return self.linear(functional.pad(x, self.padding))


@dataclass(frozen=True, slots=True)
class SummedProducts:
    """A linear whose inputs ranks share, and whose outputs all of them read."""

    linear: Linear
    sum: Sum

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `[M, O]` of `x [M, I]`."""
        return self.sum(self.linear(x))


@dataclass(frozen=True, slots=True)
class SharedSquares:
    """Means of squares over channels of several ranks."""

    share: NormShare
    sum: Sum

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `[..., 1]` of the channels `x [..., C]` that this rank has."""
        found = x.new_zeros(*x.shape[:-1], self.share.count)
        own = slice(self.share.index, self.share.index + 1)
        if self.share.is_added:
            found[..., own] = x.square().sum(-1, keepdim=True)
        return self.sum(found)[..., own] / self.share.channels
