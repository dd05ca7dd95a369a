"""What linears and the fused kernels around them hand to each other: inputs in the form that a linear multiplies best,
and products whose partial sums are not added yet. Free of Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import CodedWeight

Stored = TypeVar("Stored", bound=CodedWeight, contravariant=True)
"""The kinds of codes that a kernel multiplies by."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where products run and in which dtype activations come and go."""

    device: torch.device
    dtype: torch.dtype


class Linear(Protocol):
    """A weight `[O, I]`, and perhaps a bias, prepared for multiplication."""

    @property
    def nbytes(self) -> int:
        """Memory that the prepared weight holds."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, I] -> x W^T + bias [M, O]`, in the dtype of `x`."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """A linear whose weight can also be read row by row: then a head that is the embedding too needs no second copy."""

    @property
    def reads_rows(self) -> bool:
        """Whether it really can, in the layout that it has here."""
        ...

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[T, I]` of the weight, dequantized in `dtype`, for int64 `indices [T]`; a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel(Generic[Stored]):
    """One entry of the kernel table.

    Attributes:
        summary: what it computes and how exactly, one line.
        refuse: why it cannot serve this scheme and number of input features on this target; empty when it can.
        prepare: turns codes `[O, I]` into the kernel's own layout, once, at load; the bias `[O]` comes in the dtype of
            activations.
    """

    name: str
    summary: str
    refuse: Callable[[Scheme, int, Target], str]
    prepare: Callable[[Stored, Tensor | None, Target], Linear]


ROWS, SUMS, LEVELS, FLOATS = "rows", "sums", "levels", "floats"


@dataclass(frozen=True, slots=True)
class InputForm:
    """How a linear takes its input `[M, K]`.

    Attributes:
        kind: `rows` (as they are, in 16 bits), `sums` (float32 sums of every `unit` inputs beside them), `levels`
            (int8, with a scale for each token, see `compress.checkpoint.weights.fp8`), or `floats` (levels that are
            bytes of e4m3).
        unit: inputs of one sum, a power of two.
        num_sums: of a token; what lies beyond K counts as zeros.
    """

    kind: str = ROWS
    unit: int = 32
    num_sums: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """An input in some form.

    Attributes:
        rows: `[M, K]`, 16-bit numbers, int8 levels or bytes (uint8) of e4m3 levels, contiguous.
        beside: float32; sums `[num_sums, M]`, scales `[M]` of levels, or None.
    """

    rows: Tensor
    beside: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """`x W^T + bias [M, N]`, still in parts: the sum of `parts`, times both scales if there are any, plus the bias;
    rounded to 16 bits once, by whoever adds it up.

    Attributes:
        parts: `[splits, M, at least N]`, float32 or int32, contiguous; or 16-bit rows `[1, M, N]` with nothing left to
            do.
        num_rows: N.
        bias: `[N]`, or None.
        scales: of each token, float32 `[M]`, and of each row of the weight, `N` numbers; or None.
    """

    parts: Tensor
    num_rows: int
    bias: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None


@runtime_checkable
class FusedLinear(Protocol):
    """A linear that leaves its first and its last step to the kernels around it."""

    def input_form(self, num_tokens: int) -> InputForm:
        """What `product` takes for so many tokens."""
        ...

    def product(self, x: Prepared) -> Product:
        """Multiplies an input of the form that `input_form` names."""
        ...


@dataclass(frozen=True, slots=True)
class CalledLinear:
    """Any other linear as a `FusedLinear`: it takes 16-bit rows and leaves nothing to do."""

    linear: Linear

    def input_form(self, num_tokens: int) -> InputForm:
        return InputForm()

    def product(self, x: Prepared) -> Product:
        return finished(self.linear(x.rows))


def fused(linear: Linear) -> FusedLinear:
    """A linear with its first and last step left to others, as far as it can."""
    return linear if isinstance(linear, FusedLinear) else CalledLinear(linear)


def finished(rows: Tensor) -> Product:
    """16-bit rows `[M, N]`, whatever their strides, as a product with nothing left to do."""
    # PyTorch's semi-structured product may give the transpose of what it wrote.
    return Product(rows.contiguous().unsqueeze(0), rows.shape[1])
