"""Types with one float16 scale for 32 values: integers around the midpoint (`_0`), or above a float16 minimum (`_1`).

Codes of a block of 4 bits: the low halves of its 16 bytes, then the high ones. A fifth bit of each value is in 4
bytes of their own, lowest bit first.
"""

from __future__ import annotations

from torch import Tensor

from compress.checkpoint.gguf.types.base import BlockType, IntegerCodes, float16, float32, planes, scaled

SIZE = 32


def nibbles(blocks: Tensor, begin: int) -> Tensor:
    """Reads the 4-bit codes `[N, 32]` in the 16 bytes from `begin` on."""
    return planes(blocks[:, begin : begin + 16], 16, 4)


def five_bits(blocks: Tensor, begin: int) -> Tensor:
    """Reads the 5-bit codes `[N, 32]` from `begin` on: fifth bits, then the others."""
    fifth = planes(blocks[:, begin : begin + 4], 1, 1)
    return nibbles(blocks, begin + 4) | (fifth << 4)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return nibbles(blocks, 2), float16(blocks, 0)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return five_bits(blocks, 2), float16(blocks, 0)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, 2:] ^ 0x80, float16(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return scaled(float32(blocks, 0), nibbles(blocks, 4).float(), -float32(blocks, 2))


def _q5_1(blocks: Tensor) -> Tensor:
    return scaled(float32(blocks, 0), five_bits(blocks, 4).float(), -float32(blocks, 2))


TYPES = (
    BlockType.of_integers("q4_0", 2, SIZE, 18, IntegerCodes(4, SIZE, _q4_0)),
    BlockType("q4_1", 3, SIZE, 20, _q4_1, form="q4_1"),
    BlockType.of_integers("q5_0", 6, SIZE, 22, IntegerCodes(5, SIZE, _q5_0)),
    BlockType("q5_1", 7, SIZE, 24, _q5_1, form="q5_1"),
    BlockType.of_integers("q8_0", 8, SIZE, 34, IntegerCodes(8, SIZE, _q8_0)),
)
