"""Rounding to K types: scales of groups first, then the float16 of which they are multiples, then both in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.search import (
    Groups,
    Nearest,
    groups_of,
    search_ranges,
    search_scales,
    to_half,
    uniform,
)
from compress.checkpoint.gguf.types.base import SUPER_BLOCK, BlockParts
from compress.checkpoint.scale_search import divided
from compress.checkpoint.weights.layouts import Blocks

TURNS = 3


@dataclass(frozen=True)
class Minima:
    """Blocks `d * steps * codes - m * falls` under the search.

    Attributes:
        groups: values `[N, G, K]`.
        d, m: float16 numbers `[N, 1, 1]`.
        steps, falls: integers `[N, G, 1]` from 0 to `most`.
        top: largest code.
    """

    groups: Groups
    d: Tensor
    m: Tensor
    steps: Tensor
    falls: Tensor
    most: int
    top: int

    @classmethod
    def begin(cls, groups: Groups, most: int, top: int) -> Minima:
        scales, minima = search_ranges(groups, top, below_zero=True, half=False)
        d, m = to_half(scales.amax(1, keepdim=True) / most), to_half((-minima).amax(1, keepdim=True) / most)
        steps, falls = divided(scales, d).round().clamp(0, most), divided(-minima, m).round().clamp(0, most)
        return cls(groups, d, m, steps, falls, most, top)

    def codes(self) -> Tensor:
        """Returns the nearest codes, float32 `[N, G, K]`."""
        return divided(self.groups.values + self.m * self.falls, self.d * self.steps).round().clamp(0, self.top)

    def error(self) -> Tensor:
        """Returns the squared error of each group, `[N, G, 1]`."""
        return self.groups.error(self.d * self.steps * self.codes() - self.m * self.falls)

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
        v = self.groups.values
        x, y = self.steps * self.codes(), -self.falls.expand_as(v)
        xx, xy, yy, xv, yv = (self._sum(product) for product in (x * x, x * y, y * y, x * v, y * v))
        determinant = xx * yy - xy * xy
        d = divided(xv * yy - yv * xy, determinant)
        m = divided(yv * xx - xv * xy, determinant)
        is_flat = determinant.abs() < 1e-9 * (xx * yy).clamp(min=1e-30)
        d, m = torch.where(is_flat, divided(xv, xx), d), torch.where(is_flat, self.m, m)
        other = replace(self, d=to_half(d), m=to_half(m.clamp(min=0)))
        wins = (other.error().sum(1, keepdim=True) < self.error().sum(1, keepdim=True)) & (other.d > 0)
        return replace(self, d=torch.where(wins, other.d, self.d), m=torch.where(wins, other.m, self.m))

    def blocks(self) -> BlockParts:
        """Returns the blocks found."""
        steps, falls = self.steps.flatten(1).to(torch.int8), self.falls.flatten(1).to(torch.int8)
        d, m = (number.flatten(1).to(torch.float16) for number in (self.d, self.m))
        return BlockParts(self.codes().flatten(1).to(torch.uint8), d, m, steps, falls)

    def _sum(self, products: Tensor) -> Tensor:
        return self.groups.sum(products).sum(1, keepdim=True)


def _search_minima(groups: Groups, most: int, top: int) -> BlockParts:
    found = Minima.begin(groups, most, top)
    for _ in range(TURNS):
        found = found.with_near_steps().with_exact_scales()
    return found.blocks()


def _search_symmetric(groups: Groups, most: int, middle: int) -> BlockParts:
    """Searches steps from `-most` to `most - 1` for codes from `-middle` to `middle - 1`."""
    values, nearest = groups.values, uniform(-middle, middle - 1)
    scales = search_scales(groups, nearest, (-middle, middle - 1), half=False)
    extreme = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    d = to_half(extreme / -most)
    steps = divided(scales, d).round().clamp(-most, most - 1)
    for _ in range(TURNS):
        steps = _near_steps(groups, nearest, d, steps, most)
        levels = steps * nearest(divided(values, d * steps))
        sums = (groups.sum(product).sum(1, keepdim=True) for product in (values * levels, levels * levels))
        exact = to_half(divided(*sums))
        errors = [groups.error(nearest(divided(values, s * steps)) * s * steps) for s in (exact, d)]
        d = torch.where(errors[0].sum(1, keepdim=True) < errors[1].sum(1, keepdim=True), exact, d)
    codes = (nearest(divided(values, d * steps)) + middle).flatten(1).to(torch.uint8)
    return BlockParts(codes, d.flatten(1).to(torch.float16), steps=steps.flatten(1).to(torch.int8))


def _near_steps(groups: Groups, nearest: Nearest, d: Tensor, steps: Tensor, most: int) -> Tensor:
    def error(tried: Tensor) -> Tensor:
        return groups.error(nearest(divided(groups.values, d * tried)) * d * tried)

    best, least = steps, error(steps)
    for change in (1, -1):
        tried = (steps + change).clamp(-most, most - 1)
        found = error(tried)
        best, least = torch.where(found < least, tried, best), torch.minimum(found, least)
    return best


def magnitudes(values: Tensor) -> Tensor:
    """Returns weights for groups `[N, G, K]` without statistics of inputs: magnitudes, plus their group's root mean
    square. In place of equal weights they lowered the KL of the demo model by 5 % at q4_k and by 1 % at q3_k."""
    return values.abs() + values.square().mean(-1, keepdim=True).sqrt()


def search_blocks(values: Tensor, form: Blocks, weights: Tensor | None = None) -> BlockParts:
    """Searches the super-blocks of float32 `[N, 256]`.

    Args:
        weights: of the squared errors, float32 `[N, 256]`; without them large values count more.
    """

    def grouped(tensor: Tensor) -> Tensor:
        return tensor.view(len(tensor), -1, cast(int, form.group_size))

    found = grouped(values)
    groups = Groups(found, magnitudes(found) if weights is None else grouped(weights))
    if form.scales.has_minima:
        return _search_minima(groups, (1 << form.scales.step_bits) - 1, form.max_code)
    return _search_symmetric(groups, 1 << (form.scales.step_bits - 1), form.zero)


def search_weight(weight: Tensor, form: Blocks, importance: Tensor | None = None) -> BlockParts:
    """Searches the super-blocks of `weight [O, I]`, row by row.

    Args:
        importance: `[I]`, weight of the squared error of each column; without it large values count more.

    Raises:
        NumericsError: NaN or infinity.
    """
    blocks = groups_of(weight, SUPER_BLOCK, importance)
    found = [search_blocks(each.values, form, each.weights) for each in blocks]
    named = [each.named() for each in found]
    return BlockParts(**{name: torch.cat([each[name] for each in named]) for name in named[0]})
