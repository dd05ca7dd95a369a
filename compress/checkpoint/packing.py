"""Packs codes into 32-bit words and back: one little-endian bit stream for every format and width.

Element `i` occupies bits `[i * bits, (i + 1) * bits)` of the stream; the stream is cut into int32 words. Eight codes
fill exactly `bits` bytes, which is the unit both directions work on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.common.errors import SchemeError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble `k` of an AWQ word holds output `8 j + AWQ_ORDER[k]`."""
_PANEL_ELEMENTS = 2**22


def num_words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def pack_bits(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Packs unsigned codes along one dimension of a matrix.

    Args:
        codes: integers `[R, C]` in `[0, 2 ** bits)`.
        bits: 1 to 8.
        dim: 0 or 1, the dimension that becomes shorter.

    Returns:
        int32 `[R, ceil(C * bits / 32)]` for `dim=1`, `[ceil(R * bits / 32), C]` for `dim=0`; unused high bits are 0.

    Raises:
        SchemeError: a code that needs more bits.
    """
    if dim == 0:
        return pack_bits(codes.T, bits, 1).T.contiguous()
    if codes.numel() and int(codes.max()) >> bits:
        raise SchemeError(f"code {int(codes.max())} does not fit in {bits} bits")
    return torch.cat([_pack_rows(rows, bits) for rows in _panels(codes)])


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    rows, count = codes.shape
    octets = -(-count // 8)
    padded = torch.zeros(rows, octets * 8, dtype=torch.uint8, device=codes.device)
    padded[:, :count] = codes
    lanes = padded.view(rows, octets, 8)
    stream = torch.zeros(rows, octets, dtype=torch.int64, device=codes.device)
    for lane in range(8):
        stream |= lanes[:, :, lane].to(torch.int64) << (lane * bits)
    packed = stream.view(torch.uint8).view(rows, octets, 8)[:, :, :bits].reshape(rows, octets * bits)
    return _resize_columns(packed, num_words(count, bits) * 4).view(torch.int32)


def unpack_bits(words: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """The inverse of `pack_bits`: uint8 codes, `count` of them along `dim`.

    Args:
        words: int32 matrix.
        count: codes along `dim` before packing (the last word may be partly used).

    Raises:
        SchemeError: too few or too many words for `count` codes.
    """
    if dim == 0:
        return unpack_bits(words.T, bits, count, 1).T.contiguous()
    if words.shape[1] != num_words(count, bits):
        raise SchemeError(f"{count} codes of {bits} bits need {num_words(count, bits)} words, not {words.shape[1]}")
    unpack = _unpack_nibbles if bits in (4, 8) else _unpack_rows
    return torch.cat([unpack(panel, bits, count) for panel in _panels(words)])


def _unpack_nibbles(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks 4 and 8 bits in fewer passes than `_unpack_rows`, which halves the time to load."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        wide = octets.to(torch.int16)
        octets = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)
    return octets[:, :count]


def _unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    rows = words.shape[0]
    octets = -(-count // 8)
    packed = _resize_columns(words.contiguous().view(torch.uint8), octets * bits).view(rows, octets, bits)
    stream = torch.zeros(rows, octets, 8, dtype=torch.uint8, device=words.device)
    stream[:, :, :bits] = packed
    wide = stream.view(torch.int64).view(rows, octets)
    codes = torch.empty(rows, octets, 8, dtype=torch.uint8, device=words.device)
    for lane in range(8):
        codes[:, :, lane] = (wide >> (lane * bits)) & ((1 << bits) - 1)
    return codes.view(rows, octets * 8)[:, :count].contiguous()


def interleave_awq(codes: Tensor) -> Tensor:
    """Reorders outputs `[.., O]` (`O` a multiple of 8) so that plain packing gives AWQ's nibble order."""
    return codes.view(*codes.shape[:-1], -1, 8)[..., list(AWQ_ORDER)].reshape(codes.shape)


def deinterleave_awq(codes: Tensor) -> Tensor:
    """The inverse of `interleave_awq`."""
    inverse = [AWQ_ORDER.index(position) for position in range(8)]
    return codes.view(*codes.shape[:-1], -1, 8)[..., inverse].reshape(codes.shape)


def _panels(matrix: Tensor) -> tuple[Tensor, ...]:
    """Splits a matrix into row panels: both directions need several times the memory of their input."""
    return matrix.split(max(1, _PANEL_ELEMENTS // max(1, matrix.shape[1])))


def _resize_columns(matrix: Tensor, columns: int) -> Tensor:
    """Cuts or zero-pads `[R, C]` to `[R, columns]`; only padding bits are cut."""
    resized = torch.zeros(matrix.shape[0], columns, dtype=matrix.dtype, device=matrix.device)
    kept = min(columns, matrix.shape[1])
    resized[:, :kept] = matrix[:, :kept]
    return resized
