"""Scales of a diagram: from values to pixels, and the round values that are labelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_FROM = 20.0


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a diagram.

    Attributes:
        low, high: values at the ends; `low < high`, both above 0 if `is_log`.
        start, end: pixels at the ends.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def spanning(
        cls, values: Sequence[float], start: float, end: float, *, from_zero: bool = True, may_log: bool = True
    ) -> Axis:
        """An axis that holds all values: logarithmic where they differ by more than 20 times and all are above 0."""
        low, high = min(values), max(values)
        if may_log and low > 0 and high / low > _LOG_FROM:
            return cls(low / 1.3, high * 1.3, start, end, is_log=True)
        if from_zero:
            return cls(min(low, 0.0), high * 1.08 if high > 0 else 1.0, start, end)
        room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(low - room, high + room, start, end)

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About five round values between the ends."""
        return self._powers() if self.is_log else self._even()

    def _powers(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1, 2, 5) if math.log10(self.high / self.low) < 3.2 else (1,)
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        inside = [value for value in values if self.low <= value <= self.high]
        return inside[:: math.ceil(len(inside) / 8)] if inside else [self.low, self.high]

    def _even(self) -> list[float]:
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(each * unit for each in _STEPS if each * unit >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def block_ticks(count: int) -> list[int]:
    """Which of `count` block indices are labelled."""
    step = next(each for each in (1, 2, 4, 5, 10, 20, 50, 100, 1000, count) if each * 10 >= count)
    return list(range(0, count, step))


def short(value: float) -> str:
    """Three significant digits: `0`, `0.0397`, `4.1e-5`, `65.6`, `1,234`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def size(count: float) -> str:
    """`6.65 MB`: decimal units, three digits."""
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.{2 if count < 100 * unit else 0}f} {name}"
    return f"{count:.0f} bytes"


def change(before: float, after: float) -> str:
    """`+2.56 %`."""
    return f"{100 * (after / before - 1):+.2f} %"


def maybe(value: float | None) -> str:
    """Three digits, or `-` for nothing."""
    return "-" if value is None else short(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def times(before: float, after: float) -> str:
    """`2.05 times smaller`, or larger where it is."""
    if not before or not after:
        return "-"
    return f"{before / after:.2f} times smaller" if after <= before else f"{after / before:.2f} times larger"
