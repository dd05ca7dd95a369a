"""Grids of representable values under given scales, for methods that choose codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from compress.checkpoint.float_scales import Numbers, nearest_codes
from compress.checkpoint.scale_search import GroupScales, divided, encode
from compress.checkpoint.weights import Int, Weight
from compress.checkpoint.weights.coded import CodedWeight
from compress.cpu.gptq import ColumnGrid

Rounded = TypeVar("Rounded", bound=Weight, covariant=True)


class OrderedGrid(ABC):
    """A grid by columns in the order of a loop over them.

    Attributes:
        compiled: parameters of the grid for C code; None if C code does not support it.
    """

    compiled: ColumnGrid | None = None

    def shifted(self, columns: Tensor) -> Tensor:
        """Returns the `columns [I, O]` that the loop rounds: the weight plus the offset that the grid subtracts."""
        return columns

    @abstractmethod
    def round(self, target: Tensor, column: int, codes: Tensor, kept: Tensor | None) -> Tensor:
        """Returns the nearest value on the grid `[O]` and writes its codes, those of zero for pruned weights."""


class Grid(ABC, Generic[Rounded]):
    """Representable values of a weight `[O, I]` under given scales."""

    @abstractmethod
    def encode(self, weight: Tensor) -> Rounded:
        """Rounds `weight [O, I]` to the nearest values, ties to even."""

    @abstractmethod
    def weight(self, codes: Tensor) -> Rounded:
        """Creates the weight from codes `[O, I]`, uint8."""

    @abstractmethod
    def ordered(self, order: Tensor) -> OrderedGrid:
        """Returns the grid for a loop over all or some columns in this `order`."""


@dataclass(frozen=True, slots=True)
class IntegerGrid(Grid[CodedWeight]):
    """Multiples of scales, from zero points on."""

    scales: GroupScales
    scheme: Int

    def encode(self, weight: Tensor) -> CodedWeight:
        return encode(weight, self.scales, self.scheme)

    def weight(self, codes: Tensor) -> CodedWeight:
        return self.scheme.weight(codes, self.scales.scales, self.scales.zero_points)

    def ordered(self, order: Tensor) -> OrderedGrid:
        size, scales = self.scheme.group_size, self.scales
        group = order // size if size else torch.zeros_like(order)
        return OrderedIntegers(scales.scales, scales.zero_points, group, self.scheme.max_code)


class OrderedIntegers(OrderedGrid):
    """Scales and zero points by column of the loop."""

    compiled: ColumnGrid

    def __init__(self, scales: Tensor, zeros: Tensor, group: Tensor, max_code: int) -> None:
        """Takes scales and zero points `[O, G]`, and the group of each column of the loop `[I]`."""
        scale, zero = (each.float().T.contiguous() for each in (scales, zeros))
        self.compiled = ColumnGrid(scale, zero, group, max_code)
        self._group = self.compiled.group.tolist()

    def round(self, target: Tensor, column: int, codes: Tensor, kept: Tensor | None) -> Tensor:
        group = self._group[column]
        scale, zero = self.compiled.scale[group], self.compiled.zero[group]
        found = (target / scale).round_().add_(zero).clamp_(0, self.compiled.max_code)
        if kept is not None:
            found = torch.where(kept[column], found, zero)
        codes[column] = found
        return found.sub_(zero).mul_(scale)


SMALLEST_SCALE = 1e-30
"""Stands for scales of zero: under it every code has the same value, but none is the result of a division by zero."""


@dataclass(frozen=True, slots=True)
class BlockGrid(Grid[CodedWeight]):
    """Multiples of scales less minima, as block types of GGUF have them.

    Attributes:
        start: the scales and minima, with any codes.
    """

    start: CodedWeight

    def encode(self, weight: Tensor) -> CodedWeight:
        scales, minima = self.start.group_scales(), self.start.group_minima()
        grouped = weight.float().unflatten(1, (scales.shape[1], -1))
        if minima is not None:
            grouped = grouped + minima.unsqueeze(-1)
        codes = divided(grouped, scales.unsqueeze(-1)).round_().add_(self.start.scheme.zero)
        return self.weight(codes.clamp_(0, self.start.scheme.max_code).to(torch.uint8).flatten(1))

    def weight(self, codes: Tensor) -> CodedWeight:
        return replace(self.start, qweight=codes)

    def ordered(self, order: Tensor) -> OrderedGrid:
        scheme, minima = self.start.scheme, self.start.group_minima()
        scales = divisors(self.start.group_scales())
        zeros, group = torch.full_like(scales, scheme.zero), order // scheme.columns(self.start.shape[1])
        if minima is None:
            return OrderedIntegers(scales, zeros, group, scheme.max_code)
        return OrderedAboveMinima(scales, zeros, group, scheme.max_code, minima)


def divisors(scales: Tensor) -> Tensor:
    """Returns scales by which to divide: a tiny number in the place of 0."""
    return torch.where(scales == 0, SMALLEST_SCALE, scales)


class OrderedAboveMinima(OrderedIntegers):
    """Multiples of scales alone: minima `[O, G]` are added to the columns before the loop, which sees only their
    errors."""

    def __init__(self, scales: Tensor, zeros: Tensor, group: Tensor, max_code: int, minima: Tensor) -> None:
        super().__init__(scales, zeros, group, max_code)
        self._minima = minima.T.contiguous()

    def shifted(self, columns: Tensor) -> Tensor:
        return columns + self._minima[self.compiled.group]


@dataclass(frozen=True, slots=True)
class FloatGrid(Grid[Rounded]):
    """Multiples of scales by floating point numbers.

    Attributes:
        numbers: what codes stand for.
        steps: float32 `[O, G]`, the scale of each row and group of columns.
        group_size: columns of a group; the last one may have fewer.
        form: makes the weight of codes `[O, I]`, uint8.
    """

    numbers: Numbers
    steps: Tensor
    group_size: int
    form: Callable[[Tensor], Rounded]

    def encode(self, weight: Tensor) -> Rounded:
        return self.form(nearest_codes(weight, self.steps, self.group_size, self.numbers))

    def weight(self, codes: Tensor) -> Rounded:
        return self.form(codes)

    def ordered(self, order: Tensor) -> OrderedGrid:
        return OrderedFloats(self.numbers, self.steps.T.contiguous(), (order // self.group_size).tolist())


@dataclass(slots=True)
class OrderedFloats(OrderedGrid):
    """Scales `steps [G, O]` and the group of each column of the loop."""

    numbers: Numbers
    steps: Tensor
    group: list[int]

    def round(self, target: Tensor, column: int, codes: Tensor, kept: Tensor | None) -> Tensor:
        scale = self.steps[self.group[column]]
        found = self.numbers.nearest(target / scale)
        if kept is not None:
            found = torch.where(kept[column], found, 0.0)
        codes[column] = self.numbers.codes(found)
        return found.mul_(scale)
