"""Rounding to K types: scales of groups first, then the float16 of which they are multiples, then both in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.legacy import half_bytes
from compress.checkpoint.gguf.rounding.search import (
    Nearest,
    divided,
    search_ranges,
    search_scales,
    squared_error,
    to_half,
    uniform,
)
from compress.checkpoint.gguf.types.base import join_planes

TURNS = 3


@dataclass(frozen=True)
class Minima:
    """Blocks `d * steps * codes - m * falls` under the search.

    Attributes:
        values: float32 `[N, G, K]`.
        d, m: float16 numbers `[N, 1, 1]`.
        steps, falls: integers `[N, G, 1]` from 0 to `most`.
        top: largest code.
    """

    values: Tensor
    d: Tensor
    m: Tensor
    steps: Tensor
    falls: Tensor
    most: int
    top: int

    @classmethod
    def begin(cls, values: Tensor, most: int, top: int) -> Minima:
        scales, minima = search_ranges(values, top, below_zero=True, half=False)
        d, m = to_half(scales.amax(1, keepdim=True) / most), to_half((-minima).amax(1, keepdim=True) / most)
        steps, falls = divided(scales, d).round().clamp(0, most), divided(-minima, m).round().clamp(0, most)
        return cls(values, d, m, steps, falls, most, top)

    def codes(self) -> Tensor:
        return divided(self.values + self.m * self.falls, self.d * self.steps).round().clamp(0, self.top)

    def error(self) -> Tensor:
        """Returns the squared error of each group, `[N, G, 1]`."""
        return squared_error(self.values, self.d * self.steps * self.codes() - self.m * self.falls)

    def with_near_steps(self) -> Minima:
        """Returns the best of the neighbours of each group's steps and falls."""
        best, least = self, self.error()
        for change in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)):
            steps = (self.steps + change[0]).clamp(0, self.most)
            falls = (self.falls + change[1]).clamp(0, self.most)
            other = replace(self, steps=steps, falls=falls)
            error = other.error()
            wins = error < least
            steps, falls = torch.where(wins, steps, best.steps), torch.where(wins, falls, best.falls)
            best, least = replace(self, steps=steps, falls=falls), torch.where(wins, error, least)
        return best

    def with_exact_scales(self) -> Minima:
        """Returns the blocks with least-squares `d` and `m` for their codes, where that is better."""
        x, y, v = self.steps * self.codes(), -self.falls.expand_as(self.values), self.values
        xx, xy, yy, xv, yv = (_sum(product) for product in (x * x, x * y, y * y, x * v, y * v))
        determinant = xx * yy - xy * xy
        d = divided(xv * yy - yv * xy, determinant)
        m = divided(yv * xx - xv * xy, determinant)
        is_flat = determinant.abs() < 1e-9 * (xx * yy).clamp(min=1e-30)
        d, m = torch.where(is_flat, divided(xv, xx), d), torch.where(is_flat, self.m, m)
        other = replace(self, d=to_half(d), m=to_half(m.clamp(min=0)))
        wins = (other.error().sum(1, keepdim=True) < self.error().sum(1, keepdim=True)) & (other.d > 0)
        return replace(self, d=torch.where(wins, other.d, self.d), m=torch.where(wins, other.m, self.m))


def _sum(products: Tensor) -> Tensor:
    return products.sum((1, 2), keepdim=True)


def _search_minima(values: Tensor, group: int, most: int, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns d and m `[N, 1]`, steps and falls uint8 `[N, G]`, and codes uint8 `[N, 256]`."""
    found = Minima.begin(values.view(len(values), -1, group), most, top)
    for _ in range(TURNS):
        found = found.with_near_steps().with_exact_scales()
    steps, falls, codes = (part.flatten(1).to(torch.uint8) for part in (found.steps, found.falls, found.codes()))
    return found.d.flatten(1), found.m.flatten(1), steps, falls, codes


def join_six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Returns the 12 bytes of eight scales and eight minima of 6 bits."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], dim=1)


def round_q2(values: Tensor) -> Tensor:
    """Rounds float32 `[N, 256]` to blocks of q2_k."""
    d, m, steps, falls, codes = _search_minima(values, 16, 15, 3)
    return torch.cat([steps | (falls << 4), join_planes(codes, 32, 2), half_bytes(d), half_bytes(m)], dim=1)


def round_q4(values: Tensor) -> Tensor:
    """Rounds float32 `[N, 256]` to blocks of q4_k."""
    d, m, steps, falls, codes = _search_minima(values, 32, 63, 15)
    return torch.cat([half_bytes(d), half_bytes(m), join_six_bits(steps, falls), join_planes(codes, 32, 4)], dim=1)


def round_q5(values: Tensor) -> Tensor:
    """Rounds float32 `[N, 256]` to blocks of q5_k."""
    d, m, steps, falls, codes = _search_minima(values, 32, 63, 31)
    high, low = join_planes(codes >> 4, 32, 1), join_planes(codes & 15, 32, 4)
    return torch.cat([half_bytes(d), half_bytes(m), join_six_bits(steps, falls), high, low], dim=1)


def _search_symmetric(values: Tensor, most: int, middle: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns d `[N, 1]`, steps int16 `[N, 16]` from `-most` to `most - 1`, and codes uint8 `[N, 256]`."""
    groups, nearest = values.view(len(values), 16, 16), uniform(-middle, middle - 1)
    scales = search_scales(groups, nearest, (-middle, middle - 1), half=False)
    extreme = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    d = to_half(extreme / -most)
    steps = divided(scales, d).round().clamp(-most, most - 1)
    for _ in range(TURNS):
        steps = _near_steps(groups, nearest, d, steps, most)
        levels = steps * nearest(divided(groups, d * steps))
        exact = to_half(divided(_sum(groups * levels), _sum(levels * levels)))
        errors = [squared_error(groups, nearest(divided(groups, s * steps)) * s * steps) for s in (exact, d)]
        d = torch.where(errors[0].sum(1, keepdim=True) < errors[1].sum(1, keepdim=True), exact, d)
    codes = nearest(divided(groups, d * steps)) + middle
    return d.flatten(1), steps.flatten(1).to(torch.int16), codes.flatten(1).to(torch.uint8)


def _near_steps(groups: Tensor, nearest: Nearest, d: Tensor, steps: Tensor, most: int) -> Tensor:
    def error(tried: Tensor) -> Tensor:
        return squared_error(groups, nearest(divided(groups, d * tried)) * d * tried)

    best, least = steps, error(steps)
    for change in (1, -1):
        tried = (steps + change).clamp(-most, most - 1)
        found = error(tried)
        best, least = torch.where(found < least, tried, best), torch.minimum(found, least)
    return best


def round_q3(values: Tensor) -> Tensor:
    """Rounds float32 `[N, 256]` to blocks of q3_k."""
    d, steps, codes = _search_symmetric(values, 32, 4)
    six_bits = (steps + 32).to(torch.uint8)
    low, high = join_planes(six_bits & 15, 8, 4), join_planes(six_bits >> 4, 4, 2)
    return torch.cat([join_planes(codes >> 2, 32, 1), join_planes(codes & 3, 32, 2), low, high, half_bytes(d)], dim=1)


def round_q6(values: Tensor) -> Tensor:
    """Rounds float32 `[N, 256]` to blocks of q6_k."""
    d, steps, codes = _search_symmetric(values, 128, 32)
    low, high = join_planes(codes & 15, 64, 4), join_planes(codes >> 4, 32, 2)
    return torch.cat([low, high, steps.to(torch.int8).view(torch.uint8), half_bytes(d)], dim=1)
