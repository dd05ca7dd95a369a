"""A quantized weight with some of its input columns in 16 bits: those whose inputs are too large for a coarse grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import SchemeError


@dataclass(frozen=True, slots=True)
class OutlierWeight:
    """`W [O, I]`: integers, whose `columns` are zero, plus `values` in their place.

    Attributes:
        base: the integers of `scheme.base`; every code of an outlier column is the zero point.
        columns: int32 `[k]`, rising.
        values: `[O, k]`, float in the model's dtype.
        scheme: with `outliers` k.

    Raises:
        SchemeError: parts that contradict the scheme or each other.
    """

    base: IntegerWeight
    columns: Tensor
    values: Tensor
    scheme: Scheme

    def __post_init__(self) -> None:
        count, (rows, width) = self.scheme.outliers, self.base.shape
        if count is None or self.base.scheme != self.scheme.base:
            raise SchemeError(f"{self.base.scheme} is not what {self.scheme} has beside its outlier columns")
        if tuple(self.columns.shape) != (count,) or tuple(self.values.shape) != (rows, count):
            shapes = f"{tuple(self.columns.shape)} outlier columns with values {tuple(self.values.shape)}"
            raise SchemeError(f"{shapes} do not fit {rows} outputs and {self.scheme}")
        places = self.columns.long()
        if int(places.min()) < 0 or int(places.max()) >= width or bool((places.diff() <= 0).any()):
            raise SchemeError(f"outlier columns do not rise from 0 to {width - 1}")
        groups = places // (width // self.base.zero.shape[1])
        if not torch.equal(self.base.codes[:, places], self.base.zero[:, groups]):
            raise SchemeError("codes of outlier columns are not the zero point")

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight `[O, I]`."""
        values = self.base.dequantize(dtype)
        values[:, self.columns.long()] = self.values.to(dtype)
        return values

    def cpu(self) -> OutlierWeight:
        """The same in host memory."""
        return OutlierWeight(self.base.cpu(), self.columns.cpu(), self.values.cpu(), self.scheme)


def without_columns(weight: IntegerWeight, columns: Tensor) -> IntegerWeight:
    """The same integers with the zero point in every code of `columns [k]`."""
    places = columns.long()
    groups = places // (weight.shape[1] // weight.zero.shape[1])
    codes = weight.codes.clone()
    codes[:, places] = weight.zero[:, groups]
    return IntegerWeight(codes, weight.scale, weight.zero, weight.scheme)
