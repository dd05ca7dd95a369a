"""4- and 8-bit floats in groups that share a scale: the nearest numbers, and the search for scales.

Stored scales are mostly one of few numbers, powers of two (e8m0) or 8-bit floats (e4m3); then the search tries those
around the one that spans a group. Of scales in 16 bits it tries parts of that one. Errors are those of `scale_search`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.checkpoint.scale_search import FP8, MAX_FP8, Measure, error_of_groups, row_chunks, storable


class Numbers(ABC):
    """The numbers that codes stand for, before scales.

    Attributes:
        largest: the largest one.
    """

    largest: float

    @abstractmethod
    def nearest(self, x: Tensor) -> Tensor:
        """The nearest numbers, ties to the even one, in float32; those beyond the range become its ends."""

    @abstractmethod
    def codes(self, numbers: Tensor) -> Tensor:
        """Codes of such numbers, one byte each."""


@dataclass(frozen=True, slots=True)
class E2M1(Numbers):
    """4-bit floats: a sign, 2 bits of exponent and 1 of mantissa."""

    largest = 6.0

    def nearest(self, x: Tensor) -> Tensor:
        size = x.abs().clamp_(max=self.largest)
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        rounded = size.div_(step).round_().mul_(step)
        return torch.where(x < 0, -rounded, rounded)

    def codes(self, numbers: Tensor) -> Tensor:
        # Twice the magnitudes are 0, 1, 2, 3, 4, 6, 8 and 12.
        sizes = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8, device=numbers.device)
        return sizes[(numbers.abs() * 2).int()] | torch.signbit(numbers).to(torch.uint8) << 3


@dataclass(frozen=True, slots=True)
class E4M3(Numbers):
    """8-bit floats: a sign, 4 bits of exponent and 3 of mantissa; codes are their bytes."""

    largest = MAX_FP8

    def nearest(self, x: Tensor) -> Tensor:
        return x.clamp(-self.largest, self.largest).to(FP8).float()

    def codes(self, numbers: Tensor) -> Tensor:
        return numbers.to(FP8).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Codebook(Numbers):
    """The numbers of a table, by code; no two are alike, and 0 is among them."""

    values: tuple[float, ...]

    @property
    def largest(self) -> float:  # type: ignore[override]
        return max(map(abs, self.values))

    def nearest(self, x: Tensor) -> Tensor:
        numbers, _ = torch.tensor(self.values, device=x.device).sort()
        return numbers[torch.bucketize(x, (numbers[1:] + numbers[:-1]) / 2)]

    def codes(self, numbers: Tensor) -> Tensor:
        known, order = torch.tensor(self.values, device=numbers.device).sort()
        return order.to(torch.uint8)[torch.searchsorted(known, numbers.contiguous())]


def positive_floats() -> Tensor:
    """Float32 `[127]`: e4m3 numbers by code, from 0 to 448."""
    return torch.arange(127, dtype=torch.uint8).view(FP8).float()


@dataclass(frozen=True, slots=True)
class ScaleSearch(ABC):
    """The search for a scale of every row and group of columns, around the one that spans the group.

    Attributes:
        numbers: what codes stand for.
        tried: steps from the scale that spans a group.
        dtype: of what is found.
        whole: the step to that scale itself.
    """

    numbers: Numbers
    tried: Sequence[float]
    dtype: torch.dtype
    whole: ClassVar[float]

    @abstractmethod
    def near(self, span: Tensor, step: float) -> Tensor:
        """Returns what stands for the scales at a step from those that span groups."""

    @abstractmethod
    def steps_of(self, found: Tensor) -> Tensor:
        """Returns the scales, float32, of what was found."""

    def span(self, rows: Tensor) -> Tensor:
        """Returns the scales `[R, G, 1]` under which nothing in `rows [R, G, g]` is clipped."""
        return rows.abs().amax(-1, keepdim=True) / self.numbers.largest

    def best(
        self, weight: Tensor, group_size: int, importance: Tensor | None = None, inputs: Tensor | None = None
    ) -> Tensor:
        """Finds, `[O, G]`, the scales with the least error; arguments as those of `search_scales`.

        Raises:
            NumericsError: NaN or infinity.
        """
        groups = weight.shape[1] // group_size
        measure = error_of_groups(weight, groups, importance, inputs)
        found = [self._best(rows, measure) for rows in row_chunks(weight, groups)]
        return torch.cat(found).squeeze(-1).to(self.dtype)

    def in_range(self, weight: Tensor, group_size: int) -> Tensor:
        """Finds, `[O, G]`, the scales that span each group."""
        chunks = row_chunks(weight, weight.shape[1] // group_size)
        return torch.cat([self.near(self.span(rows), self.whole) for rows in chunks]).squeeze(-1).to(self.dtype)

    def _best(self, rows: Tensor, measure: Measure) -> Tensor:
        span = self.span(rows)
        best, least = self.near(span, self.whole), torch.full_like(span, torch.inf, dtype=torch.float32)
        for step in self.tried:
            found = self.near(span, step)
            scale = self.steps_of(found)
            error = measure(self.numbers.nearest(rows / scale).mul_(scale).sub_(rows))
            best, least = torch.where(error < least, found, best), torch.minimum(error, least)
        return best


class RangeSearch(ScaleSearch):
    """The search for scales that are plain numbers, which are what is found; steps are factors."""

    __slots__ = ()
    whole = 1.0

    def near(self, span: Tensor, step: float) -> Tensor:
        return storable(span * step, self.dtype)

    def steps_of(self, found: Tensor) -> Tensor:
        return found.float()


@dataclass(frozen=True, slots=True)
class GroupSearch(ScaleSearch):
    """The search for scales that are few numbers; places among them are found, which steps count.

    Attributes:
        scales: float32 `[S]`, rising: what a group may be multiplied by.
        first: the least place that is a scale.
    """

    scales: Tensor
    first: int = 0
    whole = 0

    def span(self, rows: Tensor) -> Tensor:
        return self.near(torch.searchsorted(self.scales.to(rows.device), ScaleSearch.span(self, rows)), 0)

    def near(self, span: Tensor, step: float) -> Tensor:
        return (span + int(step)).clamp_(self.first, len(self.scales) - 1)

    def steps_of(self, found: Tensor) -> Tensor:
        return self.scales.to(found.device)[found.long()]


def nearest_codes(weight: Tensor, steps: Tensor, group_size: int, numbers: Numbers) -> Tensor:
    """Codes `[O, I]`, uint8, of `weight [O, I]` under scales `steps [O, G]`; the last group may be smaller."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    rows = max(1, (1 << 19) // weight.shape[1])
    for out, values, scales in zip(*(each.split(rows) for each in (codes, weight, steps)), strict=True):
        repeated = scales.repeat_interleave(group_size, 1)[:, : weight.shape[1]]
        out.copy_(numbers.codes(numbers.nearest(values.float() / repeated)))
    return codes
