"""Search of scales and minima with the least squared error, for many groups at a time.

Candidates spread the extreme of a group over the codes, a little wider and narrower; the best is refined in turns:
codes for the scale, then the least-squares scale for the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Nearest = Callable[[Tensor], Tensor]
"""Returns the nearest levels of numbers in units of the scale."""
SPREADS = (0.7, 0.78, 0.84, 0.88, 0.92, 0.96, 1.0, 1.04)
"""Parts of the largest level to which the extreme of a group is put."""
SHRINKS = ((1.0, 1.0), (0.95, 0.95), (0.9, 0.9), (0.85, 0.85), (1.0, 0.9), (0.9, 1.0), (0.8, 0.8))
"""Parts of the lower and of the upper end of a group's range that the codes span."""
TURNS = 4
TINY = 1e-30


def uniform(low: int, high: int) -> Nearest:
    """Returns what rounds to integers from `low` to `high`."""
    return lambda x: x.round().clamp(low, high)


def divided(values: Tensor, scales: Tensor) -> Tensor:
    """Returns `values / scales`, zero where the scale is zero."""
    safe = torch.where(scales.abs() < TINY, torch.ones_like(scales), scales)
    return torch.where(scales.abs() < TINY, torch.zeros_like(values), values / safe)


def to_half(scales: Tensor) -> Tensor:
    """Rounds to float16, and returns float32; the largest finite number in the place of larger ones."""
    largest = torch.finfo(torch.float16).max
    return scales.clamp(-largest, largest).to(torch.float16).to(torch.float32)


def squared_error(values: Tensor, found: Tensor) -> Tensor:
    """Returns the squared error of each group, `[..., 1]`."""
    return (values - found).square().sum(-1, keepdim=True)


def search_scales(values: Tensor, nearest: Nearest, extremes: Sequence[float], half: bool = True) -> Tensor:
    """Returns scales `[..., 1]` for groups `[..., K]`; they may be negative.

    Args:
        extremes: the largest level of each sign.
        half: only numbers of float16.
    """
    rounded = to_half if half else torch.clone
    place = values.abs().argmax(-1, keepdim=True)
    extreme = values.gather(-1, place)
    best = torch.zeros_like(extreme)
    least = squared_error(values, torch.zeros_like(values))
    for level in (level * spread for level in extremes for spread in SPREADS):
        best, least = _better(values, nearest, rounded(extreme / level), best, least)
    for _ in range(TURNS):
        levels = nearest(divided(values, best))
        exact = divided((values * levels).sum(-1, keepdim=True), levels.square().sum(-1, keepdim=True))
        best, least = _better(values, nearest, rounded(exact), best, least)
    return best


def _better(values: Tensor, nearest: Nearest, scales: Tensor, best: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    error = squared_error(values, nearest(divided(values, scales)) * scales)
    wins = error < least
    return torch.where(wins, scales, best), torch.where(wins, error, least)


def search_ranges(values: Tensor, top: int, below_zero: bool, half: bool = True) -> tuple[Tensor, Tensor]:
    """Returns scales and minima, each `[..., 1]`, of `scale * code + minimum` with codes from 0 to `top`.

    Args:
        below_zero: minima must not be positive.
        half: only numbers of float16.
    """
    rounded = to_half if half else torch.clone
    limit = (lambda x: x.clamp(max=0.0)) if below_zero else torch.clone
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    low = limit(low)
    middle = (low + high) / 2
    scales, minima = rounded((high - low) / top), rounded(low)
    least = squared_error(values, _at(values, scales, minima, top))
    for lower, upper in SHRINKS:
        begin = limit(middle + (low - middle) * lower)
        step = (middle + (high - middle) * upper - begin) / top
        scales, minima, least = _better_range(values, rounded(step), rounded(begin), top, scales, minima, least)
    for _ in range(TURNS):
        codes = _codes(values, scales, minima, top)
        centered = codes - codes.mean(-1, keepdim=True)
        exact = divided((values * centered).sum(-1, keepdim=True), centered.square().sum(-1, keepdim=True))
        begin = limit((values - exact * codes).mean(-1, keepdim=True))
        scales, minima, least = _better_range(values, rounded(exact), rounded(begin), top, scales, minima, least)
    return scales, minima


def _codes(values: Tensor, scales: Tensor, minima: Tensor, top: int) -> Tensor:
    return divided(values - minima, scales).round().clamp(0, top)


def _at(values: Tensor, scales: Tensor, minima: Tensor, top: int) -> Tensor:
    return scales * _codes(values, scales, minima, top) + minima


def _better_range(
    values: Tensor, scales: Tensor, minima: Tensor, top: int, *best: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    before, below, least = best
    error = squared_error(values, _at(values, scales, minima, top))
    wins = (error < least) & (scales >= 0)
    pairs = ((scales, before), (minima, below), (error, least))
    first, second, third = (torch.where(wins, new, old) for new, old in pairs)
    return first, second, third
