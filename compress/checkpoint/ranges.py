"""What a group of weights spans, and the scales and zero points that could cover it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme

_TINY = torch.finfo(torch.float32).tiny
# Fractions of the full range that are tried first; clipping to a quarter is already rare at 2 bits.
_COARSE = tuple(1.0 - 0.04 * step for step in range(20))
# Fractions of either side of an asymmetric range, in all combinations.
_SIDES = (1.0, 0.8, 0.6, 0.4, 0.25)
# Around the best of them, closer than one coarse step.
_FINE = (0.97, 0.98, 0.99, 1.01, 1.02, 1.03)


@dataclass(frozen=True, slots=True)
class GroupRange:
    """What each group `[R, G, 1]` spans: `low <= 0 <= high`, and the signed element of largest magnitude."""

    low: Tensor
    high: Tensor
    scheme: Scheme

    @classmethod
    def of(cls, rows: Tensor, scheme: Scheme) -> GroupRange:
        return cls(rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0), scheme)

    def full(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point that cover the range."""
        return self.shrunk(1.0) if self.scheme.symmetric else self.between(1.0, 1.0)

    def shrunk(self, fraction: float) -> tuple[Tensor, Tensor]:
        """Symmetric: the element of largest magnitude, with its sign, lands on code 0, i.e. on -midpoint."""
        peak = torch.where(self.high > -self.low, self.high, self.low)
        return peak * (-fraction / self.scheme.midpoint), torch.full_like(peak, self.scheme.midpoint)

    def between(self, below: float, above: float) -> tuple[Tensor, Tensor]:
        """Asymmetric: codes span `below` of the negative side and `above` of the positive one."""
        low, high = self.low * below, self.high * above
        scale = (high - low) / self.scheme.max_code
        return scale, (-low / scale.clamp(min=_TINY)).round_().clamp_(0, self.scheme.max_code)

    def candidates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales and zero points across the range, from the whole of it down."""
        if self.scheme.symmetric:
            half = self.scheme.midpoint
            # The first fraction clips nothing on the short side either: the range of an unsigned scale.
            for fraction in (half / (half - 1), *_fractions(self.scheme.bits)):
                scale, zero = self.shrunk(fraction)
                yield scale, zero
                yield -scale, zero
        else:
            for fraction in _fractions(self.scheme.bits):
                yield self.between(fraction, fraction)
            for below, above in permutations(_SIDES, 2):
                yield self.between(below, above)

    def neighbours(self, scale: Tensor, zero: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales and zero points close to those of a good candidate."""
        for factor in _FINE:
            yield scale * factor, zero
        for shift in () if self.scheme.symmetric else (-1, 1):
            shifted = (zero + shift).clamp_(0, self.scheme.max_code)
            for factor in (1.0, *_FINE):
                yield scale * factor, shifted


def _fractions(bits: int) -> tuple[float, ...]:
    """Parts of a range to try: with 16 levels and more not below half, as AWQ's released code stops there."""
    return _COARSE if bits < 4 else tuple(fraction for fraction in _COARSE if fraction > 0.5)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they will be read back; one that would be stored as 0 (a group of zeros) becomes a harmless 1."""
    limit = torch.finfo(dtype).max
    rounded = scale.clamp(-limit, limit).to(dtype).float()
    return torch.where(rounded.abs() < _TINY, torch.ones_like(rounded), rounded)


def round_to_grid(rows: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme, out: Tensor) -> Tensor:
    """The nearest representable values of `rows [R, G, g]`, written to `out`."""
    codes = torch.mul(rows, scale.reciprocal(), out=out).round_()
    if scheme.symmetric:
        codes.clamp_(-scheme.midpoint, scheme.midpoint - 1)
    else:
        codes.add_(zero).clamp_(0, scheme.max_code).sub_(zero)
    return codes.mul_(scale)
