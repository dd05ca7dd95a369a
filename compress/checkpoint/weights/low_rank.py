"""Weights of low rank: the product of two factors, each stored as integers or in the model's dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeAlias, cast

from compress.checkpoint.scheme import Scheme, WrappingScheme, register
from compress.checkpoint.weights.base import (
    Factors,
    StoredTensors,
    Weight,
    cut_rows,
    dequantized,
    joint_digest,
    part_problems,
)
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Factor: TypeAlias = "CodedWeight | Tensor"
SIDES = ("left", "right")


@register("rank")
@dataclass(frozen=True, slots=True)
class LowRank(WrappingScheme):
    """`W = left right` with factors `[O, rank]` and `[rank, I]`.

    Attributes:
        rank: inner dimension of the product.
    """

    rank: int

    suffixes = tuple(f".{side}{suffix}" for side in SIDES for suffix in Int.suffixes)
    mark = ".left.weight_scale"
    title = "factors of low rank"
    parts = SIDES
    structure = "the two factors"
    note = (
        "weights of low rank are stored as two factors, which only this runtime reads; others read `compress export "
        "--format dense`, which is as large as the source"
    )
    fuses = False
    is_exact_size = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SchemeError(f"a rank of {self.rank} leaves nothing", "Keep more of the weights")
        WrappingScheme.__post_init__(self)
        if self.activations:
            raise SchemeError(
                "factors of low rank are not multiplied with 8-bit activations",
                "Leave the pattern and activation_bits out where layers are factorized",
            )

    @property
    def num_shapes(self) -> int:
        return len(SIDES) * self.inner.num_shapes if self.inner else 0

    def matrices(self, out_features: int, in_features: int) -> list[tuple[Scheme | None, int, int]]:
        return [(self.inner, self.rank, in_features), (self.inner, out_features, self.rank)]

    def check(self, shape: tuple[int, int]) -> None:
        if self.rank > min(shape):
            raise SchemeError(f"a weight {shape[0]} x {shape[1]} has no rank of {self.rank}", "Leave the layer out")
        for inner, _, columns in self.matrices(*shape):
            if inner is not None:
                inner.num_groups(columns)

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return sum(
            rows * columns * scale_bits if inner is None else inner.stored_bits(rows, columns, scale_bits)
            for inner, rows, columns in self.matrices(out_features, in_features)
        )

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        return self.stored_bits(out_features, in_features) / (out_features * in_features)

    def __str__(self) -> str:
        return f"{WrappingScheme.__str__(self)} rank {self.rank}"

    @property
    def entry(self) -> int:
        return self.rank

    @classmethod
    def modules(cls, names: Iterable[str]) -> set[str]:
        listed = list(names)
        left, right = (
            {
                name.removesuffix(f".{side}{suffix}")
                for name in listed
                for suffix in (".weight_scale", ".weight")
                if name.endswith(f".{side}{suffix}")
            }
            for side in SIDES
        )
        return left & right

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        left, right = (self._factor_shape(stored.part(side)) for side in SIDES)
        return left[0], right[1]

    def _factor_shape(self, stored: StoredTensors) -> tuple[int, int]:
        if self.inner is not None:
            return self.inner.shape(stored)
        rows, columns = stored[".weight"].shape
        return rows, columns

    def read(self, stored: StoredTensors) -> LowRankWeight:
        left, right = (
            stored.part(side)[".weight"] if self.inner is None else self.inner.read(stored.part(side)) for side in SIDES
        )
        return LowRankWeight(left, right, self)

    def name_problems(self, module: str, suffixes: set[str]) -> list[str]:
        inside = {side: {each.removeprefix(f".{side}") for each in suffixes} for side in SIDES}
        return [
            each for side in SIDES if self.inner for each in self.inner.name_problems(f"{module}.{side}", inside[side])
        ]


@dataclass(frozen=True, slots=True)
class LowRankWeight(Weight):
    """`W [O, I] = left right`.

    Attributes:
        left: `[O, rank]`, float in the model's dtype, or integers of `scheme.inner`.
        right: `[rank, I]`, likewise.

    Raises:
        SchemeError: factors that contradict the scheme or each other.
    """

    left: Factor
    right: Factor
    scheme: LowRank

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, LowRank):
            raise SchemeError(f"{self.scheme} is not a scheme of low rank")
        left, right = tuple(self.left.shape), tuple(self.right.shape)
        if (left[1:], right[:1]) != ((self.scheme.rank,),) * 2 or len(right) != 2:
            raise SchemeError(f"factors {left} and {right} are not of rank {self.scheme.rank}")
        if any((each.scheme if isinstance(each, Weight) else None) != self.scheme.inner for each in self.parts):
            raise SchemeError(f"factors are not stored as {self.scheme} says")

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight `[O, I]`. The product is taken in float32, or in `dtype` where that is wider, and rounded once."""
        import torch

        exact = torch.float64 if dtype == torch.float64 else torch.float32
        left, right = (dequantized(factor, exact) for factor in self.parts)
        return (left @ right).to(dtype or torch.float32)

    def product(self) -> Factors:
        return Factors(self.left, self.right)

    def some_rows(self, rows: Sequence[slice]) -> Self:
        left = self.left.some_rows(rows) if isinstance(self.left, Weight) else cut_rows(self.left, rows)
        return replace(self, left=left)

    def some_columns(self, columns: slice) -> Weight:
        right = self.right.some_columns(columns) if isinstance(self.right, Weight) else self.right[:, columns]
        return replace(self, right=cast(Factor, right))

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for side, factor in zip(SIDES, self.parts, strict=True):
            tensors = (
                factor.tensors(dtype) if isinstance(factor, Weight) else {".weight": factor.to(dtype).contiguous()}
            )
            stored |= {f".{side}{suffix}": tensor for suffix, tensor in tensors.items()}
        return stored

    def problems(self, module: str) -> Iterator[str]:
        for side, factor in zip(SIDES, self.parts, strict=True):
            yield from part_problems(f"{module}.{side}", factor)
        rows, columns = self.shape
        if self.scheme.rank * (rows + columns) >= rows * columns:
            yield f"{module} has more weights in its factors than in their product {self.shape}"

    def digest(self) -> str:
        return joint_digest(*self.parts)
