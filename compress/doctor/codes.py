"""Statistics of the codes and scales of any weight form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.weights.base import Weight
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.layouts import Blocks

SCALE_FIELDS = ("scales", "minima", "divisors", "suh", "svh")
"""Attributes of weights that multiply or divide codes."""


def leaves(weight: Weight) -> Iterator[Weight]:
    """Yields the weights that a form wraps, or the weight itself if it wraps none."""
    inner = [part for part in weight.parts if isinstance(part, Weight)]
    if not inner:
        yield weight
    for part in inner:
        yield from leaves(part)


def scales_of(weight: Weight) -> Iterator[tuple[str, Tensor]]:
    """Yields name and values of every floating-point scale of a weight."""
    for name in SCALE_FIELDS:
        values = getattr(weight, name, None)
        if isinstance(values, Tensor) and values.is_floating_point():
            yield name, values


def grouped_offsets(weight: CodedWeight) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields codes `[rows, G, group]` and their zero points `[rows, G, 1]` in chunks of rows."""
    groups = weight.scales.shape[1]
    rows = max(1, 2**20 // max(1, weight.qweight.shape[1]))
    for codes, zeros in zip(weight.qweight.split(rows), weight.zero_points.split(rows), strict=True):
        yield codes.unflatten(1, (groups, -1)), zeros.unsqueeze(-1)


def expected_saturation(weight: CodedWeight) -> float:
    """Returns the largest share of codes at the ends of their range to expect from rounding.

    A group that spans its range has two such codes. At few bits, the uniform quantizer with the least squared error
    puts more of a normal distribution there, and a uniform distribution fills all codes equally.
    """
    levels = weight.scheme.max_code + 1
    group = weight.qweight.shape[1] // max(1, weight.scales.shape[1])
    # Steps of the optimal uniform quantizer of a unit normal (Max, 1960), by bits.
    step = {2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}[weight.scheme.bits]
    normal = math.erfc((levels / 2 - 1) * step / math.sqrt(2))
    return min(1.0, max(normal, 2 / levels, 2 / max(1, group)))


def saturated_share(weight: CodedWeight) -> float:
    """Returns the share of codes at either end of their range, without groups of a single code."""
    counted, saturated = 0, 0
    for codes, _ in grouped_offsets(weight):
        varied = codes.amin(-1) != codes.amax(-1)
        ends = ((codes == 0) | (codes == weight.scheme.max_code)).sum(-1)
        saturated += int(ends[varied].sum())
        counted += int(varied.sum()) * codes.shape[-1]
    return saturated / counted if counted else 0.0


def constant_groups(weight: CodedWeight) -> int:
    """Counts groups of more than one column whose codes are all equal and not zero."""
    total = 0
    for codes, zeros in grouped_offsets(weight):
        if codes.shape[-1] > 1:
            same = codes.amin(-1) == codes.amax(-1)
            total += int((same & (codes[..., :1] != zeros)[..., 0]).sum())
    return total


def erased_groups(weight: CodedWeight) -> int:
    """Counts groups with scale 0 and nonzero codes."""
    total, start = 0, 0
    for codes, zeros in grouped_offsets(weight):
        scales = weight.scales[start : start + len(codes)]
        total += int(((codes != zeros).any(-1) & (scales == 0)).sum())
        start += len(codes)
    return total


def erased_runs(weight: Weight) -> int:
    """Counts runs of columns whose scale is 0 though their codes differ, of codes other than integers.

    Blocks of GGUF are left out: their scales of groups are integers, which may round to 0 next to a larger one.
    """
    codes: Any = getattr(weight, "qweight", None)
    scales: Any = getattr(weight, "scales", None)
    if (
        isinstance(weight.scheme, Blocks)
        or codes is None
        or scales is None
        or codes.element_size() != 1
        or codes.shape[1] % scales.shape[-1]
    ):
        return 0
    groups = codes.view(torch.uint8).unflatten(1, (scales.shape[-1], -1))
    differ = groups.amin(-1) != groups.amax(-1)
    return int((differ & (scales.float() == 0)).sum()) if differ.shape == scales.shape else 0


def subnormal_count(scales: Tensor) -> int:
    """Counts nonzero scales below the smallest normal number of their dtype."""
    if scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return 0
    size = scales.double().abs()
    return int(((size > 0) & (size < torch.finfo(scales.dtype).tiny)).sum())
