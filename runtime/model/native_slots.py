"""Single tokens moved inside of native pages (`kv_pages.h`), where neighbouring tokens may share words."""

from __future__ import annotations

import torch
from torch import Tensor


def move_token(content: Tensor, name: str, bits: int, block_size: int, source: int, target: int) -> None:
    """Puts what stands at a slot (block * block_size + offset) to another, in all layers.

    Args:
        content: `[layers, blocks, kv_heads, bytes]` of `name`: `keys` or `values`, or their scales `[layers, blocks,
            kv_heads, 2, block_size]`.
        bits: of a number of the keys or values.
    """
    old, new = (content[:, slot // block_size] for slot in (source, target))
    if name == "values" and bits != 16:
        _move_codes(old, new, block_size, bits, source % block_size, target % block_size)
    else:
        _at(new, name, block_size, target % block_size).copy_(_at(old, name, block_size, source % block_size))


def _at(block: Tensor, name: str, block_size: int, token: int) -> Tensor:
    """A token's words, members or scales."""
    if name == "keys":
        return block.view(torch.int32).unflatten(-1, (-1, block_size))[..., token]
    if name == "values":
        return block.view(torch.int16).unflatten(-1, (block_size // 2, -1, 2))[..., token // 2, :, token % 2]
    return block[..., token]


def _move_codes(old: Tensor, new: Tensor, block_size: int, bits: int, source: int, target: int) -> None:
    """Eight tokens share a word of values; 8 bits are two planes of such words."""
    before, shift = _byte(old, block_size, bits, source)
    after, place = _byte(new, block_size, bits, target)
    after.copy_(after & ~(15 << place) & 255 | (before >> shift & 15) << place)


def _byte(block: Tensor, block_size: int, bits: int, token: int) -> tuple[Tensor, int]:
    """The bytes that hold half of them for a token, and the lower bit of its half."""
    bit = 16 * (token % 2) + 4 * (token % 8 // 2)
    words = block.unflatten(-1, (bits // 4, block_size // 8, -1, 4))
    return words[..., token // 8, :, bit // 8], bit % 8
