"""Meeting a target that only a finished checkpoint can confirm: how much to allow next. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLOSE = 0.97
"""A checkpoint whose divergence is at least this share of what is allowed is close enough."""


@dataclass(frozen=True, slots=True)
class Try:
    """One checkpoint that was made.

    Attributes:
        predicted: sum of the sensitivities of its layers, in nats.
        measured: its mean divergence, in nats.
        bytes: of its weight files.
    """

    predicted: float
    measured: float
    bytes: int


def best(tries: Sequence[Try], limit: float) -> Try | None:
    """The smallest that keeps the limit; None when none does."""
    return min((each for each in tries if each.measured <= limit), key=lambda each: each.bytes, default=None)


def next_allowed(tries: Sequence[Try], limit: float) -> float | None:
    """The sum of sensitivities to allow next; None when the best is close enough.

    Measured divergence grows with the predicted one, nearly in proportion: so the last ratio tells what to allow.
    What is known to be too much, or not too much, bounds it.
    """
    if not tries:
        return limit
    kept = max((each for each in tries if each.measured <= limit), key=lambda each: each.predicted, default=None)
    if kept and kept.measured >= CLOSE * limit:
        return None
    low = kept.predicted if kept else 0.0
    high = min((each.predicted for each in tries if each.measured > limit), default=math.inf)
    last = tries[-1]
    aim = last.predicted * limit / last.measured * (1 + CLOSE) / 2 if last.measured > 0 else math.inf
    if low < aim < high:
        return aim
    if math.isinf(high):
        return 2 * low
    return math.sqrt(low * high) if low else high / 2
