"""K types: 256 values in groups of 16 or 32, whose scales (and minima) are integers times a float16.

q3_k and q6_k are integers around the midpoint; the product of both scales is exact in float32. The others have minima
that are no multiples of their scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import SUPER_BLOCK, BlockType, IntegerCodes, float32, planes, scaled


def _q2_k(blocks: Tensor) -> Tensor:
    steps, codes = blocks[:, :16], planes(blocks[:, 16:80], 32, 2)
    scales, minima = (steps & 15).float() * float32(blocks, 80), (steps >> 4).float() * float32(blocks, 82)
    return scaled(scales, codes.float(), minima)


def _q3_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    high, low, steps = planes(blocks[:, :32], 32, 1), planes(blocks[:, 32:96], 32, 2), blocks[:, 96:108]
    six_bits = planes(steps[:, :8], 8, 4) | (planes(steps[:, 8:], 4, 2) << 4)
    return low | (high << 2), (six_bits.float() - 32) * float32(blocks, 108)


def six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Reads eight scales and eight minima of 6 bits, each uint8 `[N, 8]`, from 12 bytes: those of the first four
    groups in the low bits of the first eight bytes, the upper two bits of the others above them."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], dim=1)
    return scales, minima


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Computes the values of q4_k and q5_k, which begin with both float16 and 12 bytes of scales and minima."""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    return scaled(scales.float() * float32(blocks, 0), codes.float(), minima.float() * float32(blocks, 2))


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, planes(blocks[:, 16:], 32, 4))


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, planes(blocks[:, 48:], 32, 4) | (planes(blocks[:, 16:48], 32, 1) << 4))


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    codes = planes(blocks[:, :128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    return codes, blocks[:, 192:208].contiguous().view(torch.int8).float() * float32(blocks, 208)


TYPES = (
    BlockType("q2_k", 10, SUPER_BLOCK, 84, _q2_k),
    BlockType.of_integers("q3_k", 11, SUPER_BLOCK, 110, IntegerCodes(3, 16, _q3_k)),
    BlockType("q4_k", 12, SUPER_BLOCK, 144, _q4_k),
    BlockType("q5_k", 13, SUPER_BLOCK, 176, _q5_k),
    BlockType.of_integers("q6_k", 14, SUPER_BLOCK, 210, IntegerCodes(6, 16, _q6_k)),
)
