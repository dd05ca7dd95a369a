"""Codes with some input columns in the model's dtype: those whose inputs are too large for a coarse grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast

from compress.checkpoint.scheme import Scheme, WrappingScheme, register
from compress.checkpoint.weights.base import (
    BesideColumns,
    StoredTensors,
    Weight,
    cut_rows,
    joint_digest,
    nonfinite_problems,
)
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COLUMN_BITS = 32
"""Bits of the number of an outlier column."""


@register("outliers")
@dataclass(frozen=True, slots=True)
class OutlierColumns(WrappingScheme):
    """Integers, with some input columns in the model's dtype.

    Attributes:
        inner: of the codes, which are zero in outlier columns.
        num_outliers: number of outlier columns.
    """

    inner: Int
    num_outliers: int

    suffixes = (*Int.suffixes, ".outlier_columns", ".outlier_values")
    mark = ".outlier_columns"
    title = "outlier columns"
    holds_floats = False
    structure = "the 16-bit columns"
    note = (
        "16-bit columns next to the codes are read by this runtime only; others read `compress export --format dense`, "
        "which is as large as the source"
    )
    is_exact_size = True

    def __post_init__(self) -> None:
        if self.num_outliers < 1:
            raise SchemeError(f"{self.num_outliers} outlier columns are none", "Leave outlier columns out")
        WrappingScheme.__post_init__(self)

    def matrices(self, out_features: int, in_features: int) -> list[tuple[Scheme | None, int, int]]:
        return [(self.inner, out_features, in_features), (None, out_features, self.num_outliers)]

    def check(self, shape: tuple[int, int]) -> None:
        if self.num_outliers >= shape[1]:
            raise SchemeError(
                f"{self.num_outliers} outlier columns are all of {shape[1]} inputs", "Keep fewer in 16 bits"
            )
        self.inner.check(shape)

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        codes = self.inner.stored_bits(out_features, in_features, scale_bits)
        return codes + self.num_outliers * (out_features * scale_bits + COLUMN_BITS)

    def __str__(self) -> str:
        return f"{self.inner} + {self.num_outliers} columns"

    @property
    def entry(self) -> int:
        return self.num_outliers

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        return self.inner.shape(stored)

    def read(self, stored: StoredTensors) -> OutlierWeight:
        codes = self.inner.read(stored)
        return OutlierWeight(codes, stored[".outlier_columns"], stored[".outlier_values"], self)


@dataclass(frozen=True, slots=True)
class OutlierWeight(Weight):
    """`W [O, I]`: integers, whose `columns` are zero, plus `values` in their place.

    Attributes:
        base: the integers of `scheme.inner`; every code of an outlier column is the zero point.
        columns: int32 `[k]`, rising.
        values: `[O, k]`, float in the model's dtype.

    Raises:
        SchemeError: parts that contradict the scheme or each other.
    """

    base: CodedWeight
    columns: Tensor
    values: Tensor
    scheme: OutlierColumns

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, OutlierColumns) or self.base.scheme != self.scheme.inner:
            raise SchemeError(f"{self.base.scheme} is not what {self.scheme} has in addition to its outlier columns")
        count, (rows, width) = self.scheme.num_outliers, self.base.shape
        if tuple(self.columns.shape) != (count,) or tuple(self.values.shape) != (rows, count):
            shapes = f"{tuple(self.columns.shape)} outlier columns with values {tuple(self.values.shape)}"
            raise SchemeError(f"{shapes} do not fit {rows} outputs and {self.scheme}")
        indices = self.columns.long()
        if int(indices.min()) < 0 or int(indices.max()) >= width or bool((indices.diff() <= 0).any()):
            raise SchemeError(f"outlier columns do not rise from 0 to {width - 1}")
        groups = indices // (width // self.base.zero_points.shape[1])
        if not bool((self.base.qweight[:, indices] == self.base.zero_points[:, groups]).all()):
            raise SchemeError("codes of outlier columns are not the zero point")

    @property
    def outlier_columns(self) -> Tensor:
        return self.columns

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.base.dequantize(dtype)
        values[:, self.columns.long()] = self.values.to(values.dtype)
        return values

    def product(self) -> BesideColumns:
        return BesideColumns(self.base, self.columns, self.values)

    def some_rows(self, rows: Sequence[slice]) -> Self:
        return replace(self, base=self.base.some_rows(rows), values=cut_rows(self.values, rows))

    def some_columns(self, columns: slice) -> Weight:
        own = (self.columns >= columns.start) & (self.columns < columns.stop)
        base, count = cast(CodedWeight, self.base.some_columns(columns)), int(own.sum())
        if not count:
            return base
        scheme = replace(self.scheme, num_outliers=count)
        return OutlierWeight(base, self.columns[own] - columns.start, self.values[:, own], scheme)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        return self.base.tensors(dtype) | {
            ".outlier_columns": self.columns.to(torch.int32),
            ".outlier_values": self.values.to(dtype).contiguous(),
        }

    def fuse(self, others: Sequence[Weight]) -> OutlierWeight | None:
        import torch

        parts = [each for each in others if isinstance(each, OutlierWeight) and torch.equal(each.columns, self.columns)]
        base = self.base.fuse([each.base for each in parts])
        if base is None or len(parts) < len(others):
            return None
        return OutlierWeight(base, self.columns, torch.cat([each.values for each in (self, *parts)]), self.scheme)

    def problems(self, module: str) -> Iterator[str]:
        yield from self.base.problems(module)
        yield from nonfinite_problems(f"{module}.outlier_values", self.values)

    def digest(self) -> str:
        return joint_digest(*self.parts)


def without_columns(weight: CodedWeight, columns: Tensor) -> CodedWeight:
    """The same integers with the zero point in every code of `columns [k]`."""
    indices = columns.long()
    groups = indices // (weight.shape[1] // weight.zero_points.shape[1])
    codes = weight.qweight.clone()
    codes[:, indices] = weight.zero_points[:, groups]
    return replace(weight, qweight=codes)
