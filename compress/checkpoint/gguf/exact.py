"""Blocks that hold the codes of a packed weight as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import BlockParts
from compress.checkpoint.gguf.types.legacy import SIZE, join
from compress.checkpoint.weights.base import cast_exactly
from compress.checkpoint.weights.coded import INT, CodedWeight
from compress.checkpoint.weights.layouts import Blocks
from compress.common.errors import SchemeError

SYMMETRIC = {"q4_0": 4, "q5_0": 5, "q8_0": 8}
WITH_MINIMA = {"q4_1": 4, "q5_1": 5}
"""Bits of a code by type, the narrowest first."""


def exact_type(weight: CodedWeight) -> str | None:
    """Returns the narrowest type that holds the codes of a weight and its scales; None where there is none.

    Minima of asymmetric codes, the scale times the zero point, are rounded to float16.
    """
    if weight.scheme.numbers != INT:
        return weight.scheme.word if isinstance(weight.scheme, Blocks) else None
    columns, groups = weight.shape[1], weight.scales.shape[1]
    if columns % SIZE or (columns // groups) % SIZE:
        return None
    try:
        cast_exactly(weight.scales, torch.float16)
    except SchemeError:
        return None
    widths = SYMMETRIC if weight.is_symmetric else WITH_MINIMA
    return next((name for name, bits in widths.items() if bits >= weight.scheme.bits), None)


def exact_blocks(weight: CodedWeight, name: str) -> Tensor:
    """Returns the blocks uint8 `[O, bytes of a row]` of a weight whose `exact_type` is `name`."""
    if isinstance(weight.scheme, Blocks):
        return weight.scheme.blocks(weight)
    rows, columns = weight.shape
    repeats = columns // SIZE // weight.scales.shape[1]
    scales = weight.scales.repeat_interleave(repeats, dim=1).reshape(-1, 1)
    codes = weight.qweight.reshape(-1, SIZE)
    if name in SYMMETRIC:
        shift = (1 << (SYMMETRIC[name] - 1)) - weight.scheme.zero
        return join(BlockParts(codes + shift, scales), SYMMETRIC[name]).view(rows, -1)
    zero_points = weight.zero_points.repeat_interleave(repeats, dim=1).reshape(-1, 1)
    minima = zero_points.to(torch.float64) * scales.to(torch.float64)
    return join(BlockParts(codes, scales, minima), WITH_MINIMA[name]).view(rows, -1)
