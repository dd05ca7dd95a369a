"""Types whose codes are looked up: 16 levels that are denser around zero, and floating-point numbers of 4 bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import (
    BLOCK_TYPES,
    SUPER_BLOCK,
    BlockType,
    Codec,
    float32,
    look_up,
    planes,
    scaled,
)
from compress.checkpoint.gguf.types.legacy import SIZE, join, split
from compress.checkpoint.weights.forms import E2M1_VALUES, IQ4_NL_VALUES

E2M1_DOUBLED = tuple(2 * value + 0.0 for value in E2M1_VALUES)
"""Values of four-bit floating-point numbers times two; files have no negative zero."""


CODECS = {"iq4_nl": Codec(partial(split, bits=4), partial(join, bits=4))}
"""Codecs by type."""


def _iq4_xs(blocks: Tensor) -> Tensor:
    low, high = planes(blocks[:, 4:8], 1, 4), planes(blocks[:, 2:4], 1, 2)
    scales = ((low | (high << 4)).float() - 32) * float32(blocks, 0)
    return scaled(scales, look_up(IQ4_NL_VALUES, planes(blocks[:, 8:], 16, 4)))


def half_power_of_two(exponents: Tensor) -> Tensor:
    """Returns `2 ** (exponent - 128)` of E8M0 bytes, float32, denormal for the lowest two."""
    return torch.exp2(exponents.to(torch.float64) - 128).to(torch.float32)


def _mxfp4(blocks: Tensor) -> Tensor:
    return scaled(half_power_of_two(blocks[:, :1]), look_up(E2M1_DOUBLED, planes(blocks[:, 1:], 16, 4)))


def half_e4m3(scales: Tensor) -> Tensor:
    """Returns half of E4M3 bytes, float32. Signs are ignored, and the byte of NaN, 0x7f, is zero."""
    magnitude = scales & 0x7F
    values = magnitude.contiguous().view(torch.float8_e4m3fn).to(torch.float32) / 2
    return torch.where(scales == 0x7F, 0.0, torch.where(scales == 0xFF, torch.tensor(240.0), values))


def _nvfp4(blocks: Tensor) -> Tensor:
    return scaled(half_e4m3(blocks[:, :4]), look_up(E2M1_DOUBLED, planes(blocks[:, 4:], 8, 4)))


for each in (
    BlockType.of_form("iq4_nl", 20, SIZE, 18),
    BlockType("iq4_xs", 23, SUPER_BLOCK, 136, _iq4_xs),
    BlockType("mxfp4", 39, SIZE, 17, _mxfp4),
    BlockType("nvfp4", 40, 64, 36, _nvfp4),
):
    BLOCK_TYPES.register()(each)
