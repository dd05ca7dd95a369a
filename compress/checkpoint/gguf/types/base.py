"""Block types: how many values share a block, how many bytes it takes, and what its bytes stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from compress.checkpoint.scheme import FORMS
from compress.checkpoint.weights.coded import Coded, CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.checkpoint.weights.layouts import Blocks
from compress.common.errors import CheckpointError
from compress.common.registry import Registry

SUPER_BLOCK = 256
"""Values of a block of the K types, which share scales of scales."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Blocks taken apart, under the names of `CodedWeight`; what a type does not have is None.

    Attributes:
        qweight: codes uint8 `[N, size]`.
        scales, minima: float16 `[N, 1]`; minima are subtracted.
        steps, minimum_steps: int8 `[N, G]`, integers of groups that multiply the scale and the minimum.
    """

    qweight: Tensor
    scales: Tensor
    minima: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Returns its tensors by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def group_scales(self) -> Tensor:
        """`[N, G]`, in float32 where they are products."""
        return self.scales if self.steps is None else self.steps.float() * self.scales.float()


@dataclass(frozen=True, slots=True)
class Codec:
    """Conversion of the bytes of a type that is a weight form.

    Attributes:
        split: takes blocks uint8 `[N, nbytes]` apart.
        join: the inverse of `split`.
    """

    split: Callable[[Tensor], BlockParts]
    join: Callable[[BlockParts], Tensor]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type of GGUF.

    Attributes:
        name: as `--gguf-type` spells it.
        code: its number in files.
        size: values of a block.
        nbytes: bytes of a block.
        dequantize: blocks uint8 `[N, nbytes]` to values float32 `[N, size]`.
        scheme: weight form that holds its codes and scales exactly; None for none.
        read: rows of blocks uint8 `[R, bytes]` to a weight of this form.
        package: that dequantizes it; "" for this one.
    """

    name: str
    code: int
    size: int
    nbytes: int
    dequantize: Callable[[Tensor], Tensor]
    scheme: Coded | None = None
    read: Callable[[Tensor], CodedWeight] | None = None
    package: str = ""

    @classmethod
    def of_integers(
        cls, name: str, code: int, size: int, nbytes: int, scheme: Int, split: Callable[[Tensor], BlockParts]
    ) -> BlockType:
        """Returns a type whose codes are read as plain integers."""

        def read(blocks: Tensor) -> CodedWeight:
            parts, rows = split(blocks.reshape(-1, nbytes)), len(blocks)
            return scheme.weight(parts.qweight.view(rows, -1), parts.group_scales.reshape(rows, -1))

        return cls(name, code, size, nbytes, lambda blocks: read(blocks).dequantize(), scheme, read)

    @classmethod
    def of_form(cls, name: str, code: int, size: int, nbytes: int) -> BlockType:
        """Returns the type whose blocks the weight form of its name holds."""
        form = cast(Blocks, FORMS[name].target())
        return cls(
            name, code, size, nbytes, lambda blocks: form.from_blocks(blocks).dequantize(), form, form.from_blocks
        )

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values, a multiple of `size`."""
        return columns // self.size * self.nbytes


BLOCK_TYPES: Registry[BlockType] = Registry("GGUF type", "compress.checkpoint.gguf.types", CheckpointError)


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


def scaled(scales: Tensor, values: Tensor) -> Tensor:
    """Returns `scales [N, G] * values [N, size]` of each group."""
    return (values.view(len(values), scales.shape[1], -1) * scales.unsqueeze(-1)).flatten(1)


def look_up(table: Sequence[float], codes: Tensor) -> Tensor:
    """Returns the entries of a table by code, float32 of the shape of `codes`."""
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]
