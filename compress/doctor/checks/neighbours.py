"""Outlier layers: root mean squares of matrices compared with those of neighbouring layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import ClassVar

from compress.doctor.base import CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.view import StoredTensor, View

AROUND = 4
"""Number of nearest layers that a layer is compared with; with fewer, a single layer could decide the median."""
LEAST_RATIO, DEVIATIONS = 4.0, 8.0
"""Thresholds of an outlier layer: ratio to the neighbours, and deviation in robust standard deviations."""
FLOOR = 0.05
"""Lower bound on the standard deviation of the logarithms; that of most models is far larger."""
TO_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""


@CHECKS.register()
class Neighbours(Check):
    """Compares every matrix with the same matrix of the neighbouring layers."""

    name: ClassVar[str] = "neighbours"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._sizes: dict[str, list[tuple[str, float]]] = defaultdict(list)

    def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
        if len(stored.shape) == 2 and stored.kind != stored.name.removesuffix(".weight"):
            self._sizes[stored.kind].append((stored.name, _root_mean_square(stored)))
        yield from ()

    def finish(self) -> Iterator[Finding]:
        for found in self._sizes.values():
            found.sort(key=lambda each: _indices(each[0]))
            for (name, size), near in standing_out(found):
                problem = f"its root mean square is {size:.3g}, that of the neighbouring layers {near:.3g}"
                yield self.warning("standing-out", name, problem, "Compare with the source: --against DENSE")


def standing_out(found: list[tuple[str, float]]) -> list[tuple[tuple[str, float], float]]:
    """Returns matrices whose root mean square deviates from the median of neighbouring layers, each with that median.
    `found`: name and root mean square of one matrix in every layer, in order."""
    usable = [(name, size) for name, size in found if size > 0 and math.isfinite(size)]
    if len(usable) <= AROUND:
        return []
    logs = [math.log(size) for _, size in usable]
    near = [median(_around(logs, at)) for at in range(len(logs))]
    residuals = [own - around for own, around in zip(logs, near, strict=True)]
    deviation = max(FLOOR, TO_DEVIATION * median(map(abs, residuals)))
    limit = max(math.log(LEAST_RATIO), DEVIATIONS * deviation)
    return [(usable[at], math.exp(near[at])) for at, each in enumerate(residuals) if abs(each) > limit]


def _around(values: list[float], at: int) -> list[float]:
    """Returns the values nearest to one index, without its own: the same number at the ends as in the middle."""
    first = min(max(0, at - AROUND // 2), len(values) - AROUND - 1)
    return [values[place] for place in range(first, first + AROUND + 1) if place != at]


def _root_mean_square(stored: StoredTensor) -> float:
    total = sum(float(panel.double().square().sum()) for panel in stored.panels())
    return math.sqrt(total / max(1, math.prod(stored.shape)))


def _indices(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdecimal()]
