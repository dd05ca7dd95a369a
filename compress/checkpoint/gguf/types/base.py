"""Block types: how many values share a block, how many bytes it takes, and what its bytes stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256
"""Values of a block of the K types, which share scales of scales."""


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """Codes of a type that are integers around the midpoint, so that `Int` holds them exactly.

    Attributes:
        bits: width of a code.
        group_size: values that share a scale.
        read: blocks uint8 `[N, nbytes]` to codes uint8 `[N, size]` and scales float16 or float32 `[N, size / group]`.
    """

    bits: int
    group_size: int
    read: Callable[[Tensor], tuple[Tensor, Tensor]]

    def dequantize(self, blocks: Tensor) -> Tensor:
        """Returns the values float32 `[N, size]` of blocks."""
        codes, scales = self.read(blocks)
        return scaled(scales.to(torch.float32), codes.to(torch.float32) - (1 << (self.bits - 1)))


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type of GGUF.

    Attributes:
        name: as `--gguf-type` spells it.
        code: its number in files.
        size: values of a block.
        nbytes: bytes of a block.
        dequantize: blocks uint8 `[N, nbytes]` to values float32 `[N, size]`.
        integers: its codes where `Int` holds them exactly.
        form: key of the weight form that holds its blocks as they are; "" for none.
    """

    name: str
    code: int
    size: int
    nbytes: int
    dequantize: Callable[[Tensor], Tensor]
    integers: IntegerCodes | None = None
    form: str = ""

    @property
    def is_packed(self) -> bool:
        """Whether a weight form holds its codes."""
        return self.integers is not None or bool(self.form)

    @classmethod
    def of_integers(cls, name: str, code: int, size: int, nbytes: int, integers: IntegerCodes) -> BlockType:
        return cls(name, code, size, nbytes, integers.dequantize, integers)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values, a multiple of `size`."""
        return columns // self.size * self.nbytes


def float16(blocks: Tensor, begin: int) -> Tensor:
    """Reads the float16 at byte `begin` of every block, `[N, 1]`."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16)


def float32(blocks: Tensor, begin: int) -> Tensor:
    """Reads the float16 at byte `begin` of every block as float32 `[N, 1]`."""
    return float16(blocks, begin).to(torch.float32)


def half_bytes(numbers: Tensor) -> Tensor:
    """Returns the bytes uint8 `[N, 2 * M]` of numbers `[N, M]` as float16."""
    return numbers.to(torch.float16).contiguous().view(torch.uint8)


def planes(data: Tensor, run: int, width: int, count: int | None = None) -> Tensor:
    """Takes bytes apart into codes of `width` bits: from each `run` of bytes the lowest bits of all of them, then the
    next ones.

    Args:
        data: uint8 `[N, M]`, `M` a multiple of `run`.
        count: codes of a byte; all of `8 / width` without it.

    Returns:
        uint8 `[N, M * count]`.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)[:count].view(1, 1, -1, 1)
    parts = data.reshape(len(data), -1, 1, run) >> shifts
    return (parts & ((1 << width) - 1)).flatten(1)


def join_planes(codes: Tensor, run: int, width: int) -> Tensor:
    """Returns the bytes uint8 `[N, M]` of which `planes` makes `codes` `[N, M * 8 / width]`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device).view(1, 1, -1, 1)
    parts = codes.reshape(len(codes), -1, shifts.numel(), run) << shifts
    return parts.sum(2, dtype=torch.uint8).flatten(1)


def scaled(scales: Tensor, values: Tensor, minima: Tensor | None = None) -> Tensor:
    """Returns `scales [N, G] * values [N, size]` of each group, less `minima [N, G]`."""
    groups = values.view(len(values), scales.shape[1], -1) * scales.unsqueeze(-1)
    return (groups if minima is None else groups - minima.unsqueeze(-1)).flatten(1)


def look_up(table: Sequence[float], codes: Tensor) -> Tensor:
    """Returns the entries of a table by code, float32 of the shape of `codes`."""
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]
