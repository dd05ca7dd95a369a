"""Search of scales and minima with the least squared error, for many groups at a time.

Candidates spread the extreme of a group over the codes, a little wider and narrower; the best is refined in turns:
codes for the scale, then the least-squares scale for the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scale_search import column_weights, divided
from compress.common.device import require_finite

Nearest = Callable[[Tensor], Tensor]
"""Returns the nearest levels of numbers in units of the scale."""
SPREADS = (0.7, 0.78, 0.84, 0.88, 0.92, 0.96, 1.0, 1.04)
"""Parts of the largest level to which the extreme of a group is put."""
SHRINKS = ((1.0, 1.0), (0.95, 0.95), (0.9, 0.9), (0.85, 0.85), (1.0, 0.9), (0.9, 1.0), (0.8, 0.8))
"""Parts of the lower and of the upper end of a group's range that the codes span."""
TURNS = 4
ELEMENTS_AT_ONCE = 2**21
"""Weights whose blocks are searched at one time."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Values in groups.

    Attributes:
        values: float32 `[..., K]`.
        weights: of their squared errors, float32 that broadcasts to `values`; None weighs all alike.
    """

    values: Tensor
    weights: Tensor | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Returns the weighted sum over each group, `[..., 1]`."""
        return (x if self.weights is None else x * self.weights).sum(-1, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        """Returns the weighted mean over each group, `[..., 1]`."""
        return x.mean(-1, keepdim=True) if self.weights is None else divided(self.sum(x), self._total)

    def error(self, found: Tensor) -> Tensor:
        """Returns the squared error of each group, `[..., 1]`."""
        return self.sum((self.values - found).square())

    @property
    def _total(self) -> Tensor:
        return self.sum(torch.ones_like(self.values))


def groups_of(weight: Tensor, size: int, importance: Tensor | None = None) -> Iterator[Groups]:
    """Yields the blocks `[N, size]` of some rows of `weight [O, I]` at a time.

    Args:
        importance: `[I]`, weight of the squared error of each column; None leaves errors without weights.

    Raises:
        NumericsError: NaN or infinity.
    """
    require_finite(weight, "the weight")
    columns = None if importance is None else column_weights(weight, importance)
    for part in weight.split(max(1, ELEMENTS_AT_ONCE // weight.shape[1])):
        weights = None if columns is None else columns.expand_as(part).reshape(-1, size)
        yield Groups(part.float().reshape(-1, size), weights)


def uniform(low: int, high: int) -> Nearest:
    """Returns what rounds to integers from `low` to `high`."""
    return lambda x: x.round().clamp(low, high)


def to_half(scales: Tensor) -> Tensor:
    """Rounds to float16, and returns float32; the largest finite number in the place of larger ones."""
    largest = torch.finfo(torch.float16).max
    return scales.clamp(-largest, largest).to(torch.float16).to(torch.float32)


def search_scales(groups: Groups, nearest: Nearest, extremes: Sequence[float], half: bool = True) -> Tensor:
    """Returns scales `[..., 1]` of groups; they may be negative.

    Args:
        extremes: the largest level of each sign.
        half: only numbers of float16.
    """
    rounded, values = to_half if half else torch.clone, groups.values
    place = values.abs().argmax(-1, keepdim=True)
    extreme = values.gather(-1, place)
    best = torch.zeros_like(extreme)
    least = groups.error(torch.zeros_like(values))
    for level in (level * spread for level in extremes for spread in SPREADS):
        best, least = _better(groups, nearest, rounded(extreme / level), best, least)
    for _ in range(TURNS):
        levels = nearest(divided(values, best))
        exact = divided(groups.sum(values * levels), groups.sum(levels.square()))
        best, least = _better(groups, nearest, rounded(exact), best, least)
    return best


def _better(groups: Groups, nearest: Nearest, scales: Tensor, best: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    error = groups.error(nearest(divided(groups.values, scales)) * scales)
    wins = error < least
    return torch.where(wins, scales, best), torch.where(wins, error, least)


def search_ranges(groups: Groups, top: int, below_zero: bool, half: bool = True) -> tuple[Tensor, Tensor]:
    """Returns scales and minima, each `[..., 1]`, of `scale * code + minimum` with codes from 0 to `top`.

    Args:
        below_zero: minima must not be positive.
        half: only numbers of float16.
    """
    rounded, values = to_half if half else torch.clone, groups.values
    limit = (lambda x: x.clamp(max=0.0)) if below_zero else torch.clone
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    low = limit(low)
    middle = (low + high) / 2
    scales, minima = rounded((high - low) / top), rounded(low)
    least = groups.error(_at(values, scales, minima, top))
    for lower, upper in SHRINKS:
        begin = limit(middle + (low - middle) * lower)
        step = (middle + (high - middle) * upper - begin) / top
        scales, minima, least = _better_range(groups, rounded(step), rounded(begin), top, scales, minima, least)
    for _ in range(TURNS):
        codes = _codes(values, scales, minima, top)
        centered = codes - groups.mean(codes)
        exact = divided(groups.sum(values * centered), groups.sum(centered.square()))
        begin = limit(groups.mean(values - exact * codes))
        scales, minima, least = _better_range(groups, rounded(exact), rounded(begin), top, scales, minima, least)
    return scales, minima


def _codes(values: Tensor, scales: Tensor, minima: Tensor, top: int) -> Tensor:
    return divided(values - minima, scales).round().clamp(0, top)


def _at(values: Tensor, scales: Tensor, minima: Tensor, top: int) -> Tensor:
    return scales * _codes(values, scales, minima, top) + minima


def _better_range(
    groups: Groups, scales: Tensor, minima: Tensor, top: int, *best: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    before, below, least = best
    error = groups.error(_at(groups.values, scales, minima, top))
    wins = (error < least) & (scales >= 0)
    pairs = ((scales, before), (minima, below), (error, least))
    first, second, third = (torch.where(wins, new, old) for new, old in pairs)
    return first, second, third
