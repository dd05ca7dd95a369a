"""Codes of a few bits as one little-endian stream, for every format and width.

Code `i` takes bits `[i * bits, (i + 1) * bits)` of the stream, which is cut into int32 words or bytes. Eight codes fill
exactly `bits` bytes, which is the unit both directions work on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from compress.checkpoint.weights.base import PANEL_ELEMENTS
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor


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
    import torch

    if dim == 0:
        return pack_bits(codes.T, bits, 1).T.contiguous()
    if codes.numel() and int(codes.max()) >> bits:
        raise SchemeError(f"code {int(codes.max())} does not fit in {bits} bits")
    return torch.cat([_pack_rows(rows, bits) for rows in _panels(codes)])


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    import torch

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
    import torch

    if dim == 0:
        return unpack_bits(words.T, bits, count, 1).T.contiguous()
    if words.shape[1] != num_words(count, bits):
        raise SchemeError(f"{count} codes of {bits} bits need {num_words(count, bits)} words, not {words.shape[1]}")
    unpack = _unpack_nibbles if bits in (4, 8) else _unpack_rows
    return torch.cat([unpack(_octets(panel), bits, count) for panel in _panels(words)])


def _octets(words: Tensor) -> Tensor:
    """Returns words `[R, C]` as bytes; one word per row may have any stride, with which torch cannot view it."""
    import torch

    return words.contiguous().flatten().view(torch.uint8).view(words.shape[0], -1)


def _unpack_nibbles(octets: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks 4 and 8 bits in fewer passes than `_unpack_rows`, which halves the time to load."""
    import torch

    if bits == 4:
        wide = octets.to(torch.int16)
        octets = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)
    return octets[:, :count]


def _unpack_rows(stored: Tensor, bits: int, count: int) -> Tensor:
    import torch

    rows = stored.shape[0]
    octets = -(-count // 8)
    packed = _resize_columns(stored, octets * bits).view(rows, octets, bits)
    stream = torch.zeros(rows, octets, 8, dtype=torch.uint8, device=stored.device)
    stream[:, :, :bits] = packed
    wide = stream.view(torch.int64).view(rows, octets)
    codes = torch.empty(rows, octets, 8, dtype=torch.uint8, device=stored.device)
    for lane in range(8):
        codes[:, :, lane] = (wide >> (lane * bits)) & ((1 << bits) - 1)
    return codes.view(rows, octets * 8)[:, :count].contiguous()


def _panels(matrix: Tensor) -> tuple[Tensor, ...]:
    """Splits a matrix into row panels: both directions need several times the memory of their input."""
    return cast("tuple[Tensor, ...]", matrix.split(max(1, PANEL_ELEMENTS // max(1, matrix.shape[1]))))


def _resize_columns(matrix: Tensor, columns: int) -> Tensor:
    """Cuts or zero-pads `[R, C]` to `[R, columns]`; only padding bits are cut."""
    import torch

    resized = torch.zeros(matrix.shape[0], columns, dtype=matrix.dtype, device=matrix.device)
    kept = min(columns, matrix.shape[1])
    resized[:, :kept] = matrix[:, :kept]
    return resized


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """Bytes `[O, I * bits / 8]` of codes `[O, I]`: a little-endian stream of bits, of 4 bits two in a byte."""
    import torch

    if bits == 4:
        return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    words = pack_bits(codes, bits, 1)
    return words.view(torch.uint8)[:, : codes.shape[1] * bits // 8].contiguous()


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bytes`."""
    import torch

    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    columns = packed.shape[1] * 8 // bits
    padding = 4 * num_words(columns, bits) - packed.shape[1]
    return unpack_bits(torch.nn.functional.pad(packed, (0, padding)).view(torch.int32), bits, columns, 1)
