"""What a kernel is: a way to multiply by one quantized weight, and the conditions under which it may be chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from compress.checkpoint.packed import CodedWeight
from compress.checkpoint.scheme import Scheme

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
