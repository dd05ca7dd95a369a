"""Integers of a weight whose inputs are multiplied by Hadamard matrices as they come: the online rotation of QuaRot
(Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, section 4) and SpinQuant's R4 (Liu et al. 2024,
https://arxiv.org/abs/2405.16406).

`x W^T = (x R) (W R)^T` with R orthogonal and symmetric: the matrix of Sylvester's construction along the diagonal,
divided by the root of its order. `x R` is rounded where inputs are, `W R` is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Self, cast

from compress.checkpoint.scheme import Scheme, WrappingScheme, register
from compress.checkpoint.weights.base import StoredTensors, Turned, Weight, joint_digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_ORDER = 128
"""Order of matrices where inputs are a multiple of it, as of those of trellis codes."""


@register("hadamard")
@dataclass(frozen=True, slots=True)
class RotatedInputs(WrappingScheme):
    """Integers of the rotated weight.

    Attributes:
        inner: of the codes.
        hadamard: order of the matrices, a power of two.
    """

    inner: Int
    hadamard: int

    suffixes = Int.suffixes
    mark = Int.mark
    title = "rotated inputs"
    holds_floats = False
    structure = "the rotation of inputs"
    note = (
        "inputs that are multiplied by Hadamard matrices as they come are read by this runtime and, as "
        "transform_config, from `compress export --format compressed-tensors`; others read `compress export --format "
        "dense`"
    )
    holds_zeros = False

    def __post_init__(self) -> None:
        if not is_order(self.hadamard):
            raise SchemeError(f"{self.hadamard} is not a power of two from 2 to {LARGEST_ORDER}")
        WrappingScheme.__post_init__(self)

    @classmethod
    def for_inputs(cls, inner: Scheme | None, in_features: int, largest: int = LARGEST_ORDER) -> Self:
        """Wraps integers with the largest matrices that divide the inputs. Raises SchemeError: odd inputs, a limit that
        is not a power of two, or values of another form."""
        return cls.of(inner, min(in_features & -in_features, largest))

    @property
    def column_multiple(self) -> int:
        return lcm(self.inner.column_multiple, self.hadamard)

    def matrices(self, out_features: int, in_features: int) -> list[tuple[Scheme | None, int, int]]:
        return self.inner.matrices(out_features, in_features)

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % self.hadamard:
            raise SchemeError(f"Hadamard matrices of order {self.hadamard} do not divide {shape[1]} inputs")
        self.inner.check(shape)

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return self.inner.stored_bits(out_features, in_features, scale_bits)

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return self.inner.unpacked_bytes(out_features, in_features, scale_bytes)

    def __str__(self) -> str:
        return f"{self.inner} rotated h{self.hadamard}"

    @property
    def entry(self) -> int:
        return self.hadamard

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        return self.inner.shape(stored)

    def read(self, stored: StoredTensors) -> RotatedWeight:
        return RotatedWeight(self.inner.read(stored), self)

    def wrap(self, values: Weight | Tensor) -> RotatedWeight:
        """Wraps the codes of a rotated weight. Raises SchemeError for other values."""
        if not isinstance(values, CodedWeight):
            raise SchemeError("only codes have rotated inputs", "Quantize the layer")
        return RotatedWeight(values, self)

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> RotatedWeight:
        mixed = None if importance is None else mean_of_blocks(importance, self.hadamard)
        return RotatedWeight(self.inner.round(rotate(weight, self.hadamard), mixed, scale_dtype), self)

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        return rotate(self.inner.round_in_range(rotate(weight, self.hadamard), scale_dtype), self.hadamard)


@dataclass(frozen=True, slots=True)
class RotatedWeight(Weight):
    """`W [O, I]`, of which `codes` stand for `W R`.

    Attributes:
        codes: the integers of `scheme.inner`.

    Raises:
        SchemeError: codes that contradict the scheme.
    """

    codes: CodedWeight
    scheme: RotatedInputs

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, RotatedInputs) or self.codes.scheme != self.scheme.inner:
            raise SchemeError(f"{self.codes.scheme} is not what {self.scheme} has")
        self.scheme.check(self.codes.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight `[O, I]`, rotated back in float32, or in `dtype` where that is wider, and rounded once."""
        import torch

        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return rotate(self.codes.dequantize(exact), self.scheme.hadamard).to(dtype or torch.float32)

    def product(self) -> Turned:
        return Turned(self.codes, self.scheme.hadamard)

    def some_columns(self, columns: slice) -> Weight:
        return replace(self, codes=cast(CodedWeight, self.codes.some_columns(columns)))

    @property
    def is_symmetric(self) -> bool:
        return self.codes.is_symmetric

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.codes.tensors(dtype)

    def stored_as(self, scheme: Scheme) -> Weight:
        if not isinstance(scheme, RotatedInputs) or scheme.hadamard != self.scheme.hadamard:
            return Weight.stored_as(self, scheme)
        return scheme.wrap(self.codes.stored_as(scheme.inner))

    def problems(self, module: str) -> Iterator[str]:
        yield from self.codes.problems(module)

    def digest(self) -> str:
        return joint_digest(*self.parts)


def is_order(size: int) -> bool:
    """Whether matrices of this order rotate inputs."""
    return 2 <= size <= LARGEST_ORDER and size & size - 1 == 0


def rotate(rows: Tensor, order: int) -> Tensor:
    """`rows [..., I]` times R, computed in float32, or float64 for float64 rows, and rounded once to their dtype."""
    from compress.checkpoint.kv_quant import rotate_heads

    return rotate_heads(rows.unflatten(-1, (-1, order))).flatten(-2)


def hadamard_matrix(order: int, dtype: torch.dtype) -> Tensor:
    """The matrix of 1 and -1 of Sylvester's construction."""
    import torch

    from compress.checkpoint.kv_quant import hadamard_transform

    return hadamard_transform(torch.eye(order, dtype=dtype))


def mean_of_blocks(squares: Tensor, order: int) -> Tensor:
    """Mean squares `[I]` of rotated inputs, given those of inputs that do not depend on each other."""
    return squares.view(-1, order).mean(1).repeat_interleave(order)
