"""Types of GGUF with a float16 scale and a float16 minimum for each 32 columns: q4_1 and q5_1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compress.checkpoint.scheme import register
from compress.checkpoint.weights.base import scale_problems
from compress.checkpoint.weights.gguf_blocks import INTEGERS, BlockIntegers, BlockScheme
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor

    from compress.checkpoint.grids import BlockGrid


class MinimaBlocks(BlockScheme):
    """`W ~ qweight * scale + minimum`."""

    __slots__ = ()
    group_size = 32
    block_size = 32
    has_minima = True
    holds_zeros = False
    numbers = INTEGERS

    def from_blocks(self, blocks: Tensor) -> MinimaWeight:
        from compress.checkpoint.gguf.types.base import float16
        from compress.checkpoint.gguf.types.legacy import five_bits, nibbles

        rows, flat = len(blocks), blocks.reshape(-1, self.block_bytes)
        codes = nibbles(flat, 4) if self.bits == 4 else five_bits(flat, 4)
        scales, minima = (float16(flat, begin).reshape(rows, -1) for begin in (0, 2))
        return MinimaWeight(codes.reshape(rows, -1), scales, minima, self)

    def search(self, weight: Tensor, importance: Tensor | None) -> BlockGrid[MinimaWeight]:
        import torch

        from compress.checkpoint.gguf.rounding.search import groups_of, search_ranges
        from compress.checkpoint.grids import BlockGrid

        blocks = groups_of(weight, self.group_size, importance)
        found = zip(*(search_ranges(each, self.max_code, below_zero=False) for each in blocks), strict=True)
        scales, minima = (torch.cat(each).reshape(len(weight), -1).to(torch.float16) for each in found)
        codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
        return BlockGrid(MinimaWeight(codes, scales, minima, self))


@register("q4_1")
@dataclass(frozen=True, slots=True)
class Q4Minima(MinimaBlocks):
    """4 bits."""

    word = "q4_1"
    bits = 4
    block_bytes = 20


@register("q5_1")
@dataclass(frozen=True, slots=True)
class Q5Minima(MinimaBlocks):
    """5 bits."""

    word = "q5_1"
    bits = 5
    block_bytes = 24


@dataclass(frozen=True, slots=True)
class MinimaWeight(BlockIntegers):
    """`W [O, I] ~ qweight * group_scales + group_minima`, both repeated over each group of columns.

    Attributes:
        qweight: uint8 `[O, I]`.
        group_scales, group_minima: float16 `[O, I / 32]`.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    group_scales: Tensor
    group_minima: Tensor
    scheme: MinimaBlocks

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        found = [tuple(part.shape) for part in (self.group_scales, self.group_minima)]
        expected = [(rows, self.scheme.num_groups(columns))] * 2
        if found != expected:
            raise SchemeError(f"scales and minima {found} must be {expected} for {self.scheme}")

    @property
    def scales(self) -> Tensor:
        return self.group_scales.float()

    @property
    def minima(self) -> Tensor:
        return -self.group_minima.float()

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.group_scales, self.group_minima

    def with_factors(self, for_scales: Tensor, for_minima: Tensor) -> MinimaWeight:
        return replace(self, group_scales=for_scales, group_minima=for_minima)

    def with_codes(self, codes: Tensor) -> MinimaWeight:
        return replace(self, qweight=codes)

    def blocks(self) -> Tensor:
        from compress.checkpoint.gguf.rounding.legacy import join_minima

        codes, scales, minima = self.qweight.reshape(-1, 32), self.group_scales, self.group_minima
        return join_minima(codes, scales.reshape(-1, 1), minima.reshape(-1, 1), self.scheme.bits).view(len(scales), -1)

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(module, self.group_scales)
        yield from scale_problems(module, self.group_minima)
