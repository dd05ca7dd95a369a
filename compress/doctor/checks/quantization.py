"""Sanity of quantized weights: dead scales, scales far from the others, saturated codes, groups of one value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import ClassVar

import torch
from torch import Tensor

from compress.checkpoint.weights.base import Weight
from compress.checkpoint.weights.coded import INT, CodedWeight
from compress.doctor.base import AGAIN, CHECKS, Check
from compress.doctor.codes import (
    constant_groups,
    erased_groups,
    erased_runs,
    expected_saturation,
    leaves,
    saturated_share,
    scales_of,
    subnormal_count,
)
from compress.doctor.findings import Finding
from compress.doctor.view import StoredTensor, View

FAR = 2.0**12
"""Threshold of an outlier scale: ratio of the largest scale of a matrix to the median."""
SUBNORMAL_SHARE, CONSTANT_SHARE = 1e-3, 1e-2
"""Shares of scales and of groups above which they are reported."""
SHIFT = 0.1
"""Ratio of mean to root mean square of most matrices above which zero points are suspected."""
QUANTIZE = "Quantize the source again: compress quantize SOURCE --out OTHER"
COMPARE = "Compare with the source: --against DENSE"


@CHECKS.register()
class Quantization(Check):
    """Checks the codes and scales of every quantized weight."""

    name: ClassVar[str] = "quantization"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._shifts: list[float] = []

    def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
        if not isinstance(stored.content, Weight):
            return
        for leaf in leaves(stored.content):
            for field, scales in scales_of(leaf):
                yield from self._scales(stored.name, field, scales)
            if isinstance(leaf, CodedWeight) and leaf.scheme.numbers == INT:
                yield from self._codes(stored.name, leaf)
            elif dead := erased_runs(leaf):
                yield self.error("dead-scales", stored.name, f"{dead} scales are 0, which erases their codes", AGAIN)
        if isinstance(stored.content, CodedWeight) and not stored.content.is_symmetric:
            self._shifts.append(_shift(stored))

    def finish(self) -> Iterator[Finding]:
        """Zero points that are 1 off, as in files of GPTQ whose version is not the one that config.json names."""
        usual = median(self._shifts) if self._shifts else 0.0
        if usual > SHIFT:
            problem = f"in the median of {len(self._shifts)} matrices the mean is {usual:.2f} of the root mean square"
            remedy = f"{COMPARE}; for GPTQ, see whether checkpoint_format should be gptq_v2"
            yield self.warning("shifted-values", "zero points", problem, remedy)

    def _scales(self, where: str, field: str, scales: Tensor) -> Iterator[Finding]:
        sizes = scales.float().abs()
        finite = sizes[torch.isfinite(sizes)]
        if bad := sizes.numel() - finite.numel():
            yield self.error("dead-scales", where, f"{bad} of {sizes.numel()} {field} are NaN or infinite", AGAIN)
        if (count := subnormal_count(scales)) > SUBNORMAL_SHARE * sizes.numel():
            dtype = str(scales.dtype).removeprefix("torch.")
            problem = f"{count} of {sizes.numel()} {field} are subnormal in {dtype}, so they have few significant bits"
            yield self.warning("denormal-scales", where, problem, QUANTIZE)
        used = finite[finite > 0]
        median = float(used.median()) if used.numel() else 0.0
        if not median and sizes.numel():
            yield self.error("dead-scales", where, f"all {sizes.numel()} {field} are 0 or not finite", AGAIN)
        elif used.numel() and float(used.max()) > FAR * median:
            problem = f"the largest of {sizes.numel()} {field} is {float(used.max()):.3g}, the median {median:.3g}"
            yield self.warning("far-scales", where, problem, COMPARE)

    def _codes(self, where: str, weight: CodedWeight) -> Iterator[Finding]:
        groups = weight.scales.numel()
        if dead := erased_groups(weight):
            problem = f"{dead} of {groups} groups have the scale 0, which erases their codes"
            yield self.error("dead-scales", where, problem, AGAIN)
        if (same := constant_groups(weight)) > CONSTANT_SHARE * groups:
            problem = f"{same} of {groups} groups hold a single code that is not zero"
            yield self.warning("constant-groups", where, problem, COMPARE)
        share, expected = saturated_share(weight), expected_saturation(weight)
        if share > min(2 * expected, (1 + expected) / 2):
            bits = weight.scheme.bits
            problem = (
                f"{share:.1%} of the {bits}-bit codes are at an end of their range, at most {expected:.1%} are expected"
            )
            yield self.warning("saturated-codes", where, problem, f"{QUANTIZE}, with smaller groups")


def _shift(stored: StoredTensor) -> float:
    """The magnitude of the mean over the root mean square, which for weights is near 0."""
    total, squares = 0.0, 0.0
    for panel in stored.panels():
        total, squares = total + float(panel.double().sum()), squares + float(panel.double().square().sum())
    return abs(total) / math.sqrt(squares * stored.values.numel()) if squares else 0.0
