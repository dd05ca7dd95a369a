"""Rounding to blocks of 32 values with one float16 scale, and their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.rounding.search import Groups, divided, search_ranges, search_scales, uniform
from compress.checkpoint.gguf.types.base import half_bytes, join_planes
from compress.checkpoint.weights.nonlinear import LEVEL_VALUES


def code_bytes(codes: Tensor, bits: int) -> Tensor:
    """Returns the bytes of codes uint8 `[N, 32]`: of 5 bits the fifth ones first."""
    if bits == 8:
        return codes ^ 0x80
    if bits == 4:
        return join_planes(codes, 16, 4)
    return torch.cat([join_planes(codes >> 4, 1, 1), join_planes(codes & 15, 16, 4)], dim=1)


def join_symmetric(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Returns the blocks of q4_0, q5_0 or q8_0: codes uint8 `[N, 32]` around the midpoint, and scales `[N, 1]`."""
    return torch.cat([half_bytes(scales), code_bytes(codes, bits)], dim=1)


def join_minima(codes: Tensor, scales: Tensor, minima: Tensor, bits: int) -> Tensor:
    """Returns the blocks of q4_1 or q5_1."""
    return torch.cat([half_bytes(scales), half_bytes(minima), code_bytes(codes, bits)], dim=1)


def round_symmetric(values: Tensor, bits: int) -> Tensor:
    """Rounds float32 `[N, 32]` to blocks of q4_0, q5_0 or q8_0."""
    middle = 1 << (bits - 1)
    nearest = uniform(-middle, middle - 1)
    scales = search_scales(Groups(values), nearest, (-middle, middle - 1))
    return join_symmetric((nearest(divided(values, scales)) + middle).to(torch.uint8), scales, bits)


def round_minima(values: Tensor, bits: int) -> Tensor:
    """Rounds float32 `[N, 32]` to blocks of q4_1 or q5_1."""
    top = (1 << bits) - 1
    scales, minima = search_ranges(Groups(values), top, below_zero=False)
    codes = divided(values - minima, scales).round().clamp(0, top)
    return join_minima(codes.to(torch.uint8), scales, minima, bits)


def nearest_nonlinear(x: Tensor) -> Tensor:
    """Returns the nearest levels of iq4_nl."""
    levels = torch.tensor(LEVEL_VALUES, dtype=x.dtype)
    return levels[_nonlinear_codes(x)]


def _nonlinear_codes(x: Tensor) -> Tensor:
    levels = torch.tensor(LEVEL_VALUES, dtype=x.dtype)
    return torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)


def round_nonlinear(values: Tensor) -> Tensor:
    """Rounds float32 `[N, 32]` to blocks of iq4_nl."""
    scales = search_scales(Groups(values), nearest_nonlinear, (LEVEL_VALUES[0], LEVEL_VALUES[-1]))
    return join_symmetric(_nonlinear_codes(divided(values, scales)).to(torch.uint8), scales, 4)
