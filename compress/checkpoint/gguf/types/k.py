"""K types: super-blocks of 256 values in groups of 16 or 32, whose scales (and minima) are integers times a float16.

q3_k and q6_k are integers around the midpoint; the product of both scales is exact in float32. The others have minima
that are no multiples of their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import (
    SUPER_BLOCK,
    BlockType,
    IntegerCodes,
    float16,
    half_bytes,
    join_planes,
    planes,
    scaled,
)


@dataclass(frozen=True, slots=True)
class KBlocks:
    """Super-blocks taken apart; types without minima have `min_codes` and `super_minima` of no columns.

    Attributes:
        codes: uint8 `[N, 256]`.
        scale_codes: int8 `[N, G]`, multiples of `super_scales` that scale the groups.
        min_codes: int8 `[N, G]`, multiples of `super_minima` that are subtracted from the groups.
        super_scales, super_minima: float16 `[N, 1]`.
    """

    codes: Tensor
    scale_codes: Tensor
    min_codes: Tensor
    super_scales: Tensor
    super_minima: Tensor

    @classmethod
    def symmetric(cls, codes: Tensor, scale_codes: Tensor, super_scales: Tensor) -> KBlocks:
        """Blocks of a type without minima."""
        return cls(codes, scale_codes, scale_codes[:, :0], super_scales, super_scales[:, :0])

    @property
    def scales(self) -> Tensor:
        """Float32 `[N, G]`."""
        return self.scale_codes.float() * self.super_scales.float()

    @property
    def minima(self) -> Tensor:
        """Float32 `[N, G]`, of types that have them."""
        return self.min_codes.float() * self.super_minima.float()


@dataclass(frozen=True, slots=True)
class KLayout:
    """The bytes of a K type.

    Attributes:
        bits: width of a code.
        group_size: values that share a scale.
        scale_range: least and largest code of a scale.
        has_minima: whether groups have a minimum; without them codes are integers around the midpoint.
        split: takes blocks uint8 `[N, nbytes]` apart.
        join: the inverse of `split`.
    """

    bits: int
    group_size: int
    scale_range: tuple[int, int]
    has_minima: bool
    split: Callable[[Tensor], KBlocks]
    join: Callable[[KBlocks], Tensor]

    def dequantize(self, blocks: Tensor) -> Tensor:
        """Returns the values float32 `[N, 256]` of blocks."""
        parts = self.split(blocks)
        if self.has_minima:
            return scaled(parts.scales, parts.codes.float(), parts.minima)
        return scaled(parts.scales, parts.codes.float() - (1 << (self.bits - 1)))

    def integers(self) -> IntegerCodes:
        """Returns the codes of a type without minima as plain integers."""

        def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
            parts = self.split(blocks)
            return parts.codes, parts.scales

        return IntegerCodes(self.bits, self.group_size, read)


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def _signed(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8)


def _split_q2(blocks: Tensor) -> KBlocks:
    steps, codes = blocks[:, :16], planes(blocks[:, 16:80], 32, 2)
    return KBlocks(codes, _signed(steps & 15), _signed(steps >> 4), float16(blocks, 80), float16(blocks, 82))


def _join_q2(parts: KBlocks) -> Tensor:
    steps = _bytes(parts.scale_codes) | (_bytes(parts.min_codes) << 4)
    halves = half_bytes(parts.super_scales), half_bytes(parts.super_minima)
    return torch.cat([steps, join_planes(parts.codes, 32, 2), *halves], dim=1)


def _split_q3(blocks: Tensor) -> KBlocks:
    high, low, steps = planes(blocks[:, :32], 32, 1), planes(blocks[:, 32:96], 32, 2), blocks[:, 96:108]
    six_bits = planes(steps[:, :8], 8, 4) | (planes(steps[:, 8:], 4, 2) << 4)
    return KBlocks.symmetric(low | (high << 2), _signed(six_bits) - 32, float16(blocks, 108))


def _join_q3(parts: KBlocks) -> Tensor:
    codes, six_bits = parts.codes, _bytes(parts.scale_codes + 32)
    low, high = join_planes(six_bits & 15, 8, 4), join_planes(six_bits >> 4, 4, 2)
    planes_of_codes = join_planes(codes >> 2, 32, 1), join_planes(codes & 3, 32, 2)
    return torch.cat([*planes_of_codes, low, high, half_bytes(parts.super_scales)], dim=1)


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


def _split_with_minima(blocks: Tensor, codes: Tensor) -> KBlocks:
    """Takes q4_k and q5_k apart, which begin with both float16 and 12 bytes of scales and minima."""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    return KBlocks(codes, _signed(scales), _signed(minima), float16(blocks, 0), float16(blocks, 2))


def _head_with_minima(parts: KBlocks) -> tuple[Tensor, ...]:
    steps = join_six_bits(_bytes(parts.scale_codes), _bytes(parts.min_codes))
    return half_bytes(parts.super_scales), half_bytes(parts.super_minima), steps


def _split_q4(blocks: Tensor) -> KBlocks:
    return _split_with_minima(blocks, planes(blocks[:, 16:], 32, 4))


def _join_q4(parts: KBlocks) -> Tensor:
    return torch.cat([*_head_with_minima(parts), join_planes(parts.codes, 32, 4)], dim=1)


def _split_q5(blocks: Tensor) -> KBlocks:
    return _split_with_minima(blocks, planes(blocks[:, 48:], 32, 4) | (planes(blocks[:, 16:48], 32, 1) << 4))


def _join_q5(parts: KBlocks) -> Tensor:
    high, low = join_planes(parts.codes >> 4, 32, 1), join_planes(parts.codes & 15, 32, 4)
    return torch.cat([*_head_with_minima(parts), high, low], dim=1)


def _split_q6(blocks: Tensor) -> KBlocks:
    codes = planes(blocks[:, :128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    return KBlocks.symmetric(codes, _signed(blocks[:, 192:208]), float16(blocks, 208))


def _join_q6(parts: KBlocks) -> Tensor:
    low, high = join_planes(parts.codes & 15, 64, 4), join_planes(parts.codes >> 4, 32, 2)
    return torch.cat([low, high, _bytes(parts.scale_codes), half_bytes(parts.super_scales)], dim=1)


LAYOUTS = {
    "q2_k": KLayout(2, 16, (0, 15), True, _split_q2, _join_q2),
    "q3_k": KLayout(3, 16, (-32, 31), False, _split_q3, _join_q3),
    "q4_k": KLayout(4, 32, (0, 63), True, _split_q4, _join_q4),
    "q5_k": KLayout(5, 32, (0, 63), True, _split_q5, _join_q5),
    "q6_k": KLayout(6, 16, (-128, 127), False, _split_q6, _join_q6),
}
"""Layouts by type."""


def _with_minima(name: str, code: int, nbytes: int) -> BlockType:
    return BlockType(name, code, SUPER_BLOCK, nbytes, LAYOUTS[name].dequantize, form=name)


def _symmetric(name: str, code: int, nbytes: int) -> BlockType:
    return BlockType.of_integers(name, code, SUPER_BLOCK, nbytes, LAYOUTS[name].integers())


TYPES = (
    _with_minima("q2_k", 10, 84),
    _symmetric("q3_k", 11, 110),
    _with_minima("q4_k", 12, 144),
    _with_minima("q5_k", 13, 176),
    _symmetric("q6_k", 14, 210),
)
