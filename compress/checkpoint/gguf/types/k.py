"""K types: super-blocks of 256 values in groups of 16 or 32, whose scales (and minima) are integers times a float16.

q3_k and q6_k are integers around the midpoint; the product of both scales is exact in float32. The others have minima
that are not multiples of their scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import (
    BLOCK_TYPES,
    SUPER_BLOCK,
    BlockParts,
    BlockType,
    Codec,
    float16,
    half_bytes,
    join_planes,
    planes,
)
from compress.checkpoint.weights.integer import Int


def _given(part: Tensor | None) -> Tensor:
    """Returns a part that the blocks of a type have. Raises ValueError where it is missing."""
    if part is None:
        raise ValueError("steps or minima are missing")
    return part


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def _signed(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8)


def _split_q2(blocks: Tensor) -> BlockParts:
    steps, codes = blocks[:, :16], planes(blocks[:, 16:80], 32, 2)
    return BlockParts(codes, float16(blocks, 80), float16(blocks, 82), _signed(steps & 15), _signed(steps >> 4))


def _join_q2(parts: BlockParts) -> Tensor:
    steps = _bytes(_given(parts.steps)) | (_bytes(_given(parts.minimum_steps)) << 4)
    halves = half_bytes(parts.scales), half_bytes(_given(parts.minima))
    return torch.cat([steps, join_planes(parts.qweight, 32, 2), *halves], dim=1)


def _split_q3(blocks: Tensor) -> BlockParts:
    high, low, steps = planes(blocks[:, :32], 32, 1), planes(blocks[:, 32:96], 32, 2), blocks[:, 96:108]
    six_bits = planes(steps[:, :8], 8, 4) | (planes(steps[:, 8:], 4, 2) << 4)
    return BlockParts(low | (high << 2), float16(blocks, 108), steps=_signed(six_bits) - 32)


def _join_q3(parts: BlockParts) -> Tensor:
    codes, six_bits = parts.qweight, _bytes(_given(parts.steps) + 32)
    low, high = join_planes(six_bits & 15, 8, 4), join_planes(six_bits >> 4, 4, 2)
    planes_of_codes = join_planes(codes >> 2, 32, 1), join_planes(codes & 3, 32, 2)
    return torch.cat([*planes_of_codes, low, high, half_bytes(parts.scales)], dim=1)


def six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Reads eight scales and eight minima of 6 bits, each uint8 `[N, 8]`, from 12 bytes: those of the first four
    groups in the low bits of the first eight bytes, the upper two bits of the others above them."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], dim=1)
    return scales, minima


def join_six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Returns the 12 bytes of eight scales and eight minima of 6 bits, uint8 `[N, 8]`."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], dim=1)


def _split_with_minima(blocks: Tensor, codes: Tensor) -> BlockParts:
    """Takes q4_k and q5_k apart, which begin with both float16 and 12 bytes of scales and minima."""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    return BlockParts(codes, float16(blocks, 0), float16(blocks, 2), _signed(scales), _signed(minima))


def _head_with_minima(parts: BlockParts) -> tuple[Tensor, ...]:
    steps = join_six_bits(_bytes(_given(parts.steps)), _bytes(_given(parts.minimum_steps)))
    return half_bytes(parts.scales), half_bytes(_given(parts.minima)), steps


def _split_q4(blocks: Tensor) -> BlockParts:
    return _split_with_minima(blocks, planes(blocks[:, 16:], 32, 4))


def _join_q4(parts: BlockParts) -> Tensor:
    return torch.cat([*_head_with_minima(parts), join_planes(parts.qweight, 32, 4)], dim=1)


def _split_q5(blocks: Tensor) -> BlockParts:
    return _split_with_minima(blocks, planes(blocks[:, 48:], 32, 4) | (planes(blocks[:, 16:48], 32, 1) << 4))


def _join_q5(parts: BlockParts) -> Tensor:
    high, low = join_planes(parts.qweight >> 4, 32, 1), join_planes(parts.qweight & 15, 32, 4)
    return torch.cat([*_head_with_minima(parts), high, low], dim=1)


def _split_q6(blocks: Tensor) -> BlockParts:
    codes = planes(blocks[:, :128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    return BlockParts(codes, float16(blocks, 208), steps=_signed(blocks[:, 192:208]))


def _join_q6(parts: BlockParts) -> Tensor:
    low, high = join_planes(parts.qweight & 15, 64, 4), join_planes(parts.qweight >> 4, 32, 2)
    return torch.cat([low, high, _bytes(_given(parts.steps)), half_bytes(parts.scales)], dim=1)


CODECS = {
    "q2_k": Codec(_split_q2, _join_q2),
    "q3_k": Codec(_split_q3, _join_q3),
    "q4_k": Codec(_split_q4, _join_q4),
    "q5_k": Codec(_split_q5, _join_q5),
    "q6_k": Codec(_split_q6, _join_q6),
}
"""Codecs by type."""


for each in (
    BlockType.of_form("q2_k", 10, SUPER_BLOCK, 84),
    BlockType.of_integers("q3_k", 11, SUPER_BLOCK, 110, Int(3, 16), _split_q3),
    BlockType.of_form("q4_k", 12, SUPER_BLOCK, 144),
    BlockType.of_form("q5_k", 13, SUPER_BLOCK, 176),
    BlockType.of_integers("q6_k", 14, SUPER_BLOCK, 210, Int(6, 16), _split_q6),
):
    BLOCK_TYPES.register()(each)
