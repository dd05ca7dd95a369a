"""Types with one float16 scale for 32 values: integers around the midpoint (`_0`), or above a float16 minimum (`_1`).

Codes of a block of 4 bits: the low halves of its 16 bytes, then the high ones. A fifth bit of each value is in 4
bytes of their own, lowest bit first.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import (
    BLOCK_TYPES,
    BlockParts,
    BlockType,
    Codec,
    float16,
    half_bytes,
    join_planes,
    planes,
)
from compress.checkpoint.weights.integer import Int

SIZE = 32


def nibbles(blocks: Tensor, begin: int) -> Tensor:
    """Reads the 4-bit codes `[N, 32]` in the 16 bytes from `begin` on."""
    return planes(blocks[:, begin : begin + 16], 16, 4)


def five_bits(blocks: Tensor, begin: int) -> Tensor:
    """Reads the 5-bit codes `[N, 32]` from `begin` on: fifth bits, then the others."""
    fifth = planes(blocks[:, begin : begin + 4], 1, 1)
    return nibbles(blocks, begin + 4) | (fifth << 4)


def codes_of(blocks: Tensor, begin: int, bits: int) -> Tensor:
    """Reads the codes `[N, 32]` from byte `begin` on."""
    if bits == 8:
        return blocks[:, begin:] ^ 0x80
    return nibbles(blocks, begin) if bits == 4 else five_bits(blocks, begin)


def split(blocks: Tensor, bits: int) -> BlockParts:
    """Takes blocks of q4_0, q5_0, q8_0 and iq4_nl apart."""
    return BlockParts(codes_of(blocks, 2, bits), float16(blocks, 0))


def _split_with_minima(blocks: Tensor, bits: int) -> BlockParts:
    """Minima of files are added."""
    return BlockParts(codes_of(blocks, 4, bits), float16(blocks, 0), -float16(blocks, 2))


def _symmetric(name: str, code: int, nbytes: int, bits: int) -> BlockType:
    return BlockType.of_integers(name, code, SIZE, nbytes, Int(bits, SIZE), partial(split, bits=bits))


def code_bytes(codes: Tensor, bits: int) -> Tensor:
    """Returns the bytes of codes uint8 `[N, 32]`: of 5 bits the fifth ones first."""
    if bits == 8:
        return codes ^ 0x80
    if bits == 4:
        return join_planes(codes, 16, 4)
    return torch.cat([join_planes(codes >> 4, 1, 1), join_planes(codes & 15, 16, 4)], dim=1)


def join(parts: BlockParts, bits: int) -> Tensor:
    """Returns the blocks of q4_0, q5_0, q8_0 and iq4_nl, or with minima those of q4_1 and q5_1."""
    minima = [] if parts.minima is None else [half_bytes(-parts.minima)]
    return torch.cat([half_bytes(parts.scales), *minima, code_bytes(parts.qweight, bits)], dim=1)


CODECS = {
    name: Codec(partial(_split_with_minima, bits=bits), partial(join, bits=bits))
    for name, bits in {"q4_1": 4, "q5_1": 5}.items()
}
"""Codecs by type."""
for each in (
    _symmetric("q4_0", 2, 18, 4),
    BlockType.of_form("q4_1", 3, SIZE, 20),
    _symmetric("q5_0", 6, 22, 5),
    BlockType.of_form("q5_1", 7, SIZE, 24),
    _symmetric("q8_0", 8, 34, 8),
):
    BLOCK_TYPES.register()(each)
