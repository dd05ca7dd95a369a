"""K types of GGUF: integers in groups of 16 or 32, whose scales and minima are integers times a float16 of 256 columns.

Weights are stored as the very blocks of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compress.checkpoint.scheme import register
from compress.checkpoint.weights.base import scale_problems
from compress.checkpoint.weights.gguf_blocks import INTEGERS, BlockIntegers, BlockScheme
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.gguf.types.k import KBlocks, KLayout
    from compress.checkpoint.grids import BlockGrid

SUPER_BLOCK = 256
"""Columns that share the float16 of their scales, and that of their minima."""


class KQuant(BlockScheme):
    """A K type."""

    __slots__ = ()
    block_size = SUPER_BLOCK
    numbers = INTEGERS
    structure = "the super-blocks"

    @property
    def holds_zeros(self) -> bool:
        return not self.has_minima

    @property
    def midpoint(self) -> int:
        """The code of zero of types without minima."""
        return 1 << (self.bits - 1)

    @property
    def layout(self) -> KLayout:
        """The bytes of the blocks."""
        from compress.checkpoint.gguf.types.k import LAYOUTS

        return LAYOUTS[self.word]

    def from_blocks(self, blocks: Tensor) -> KQuantWeight:
        return self.of(self.layout.split(blocks.reshape(-1, self.block_bytes)), len(blocks))

    def of(self, parts: KBlocks, rows: int) -> KQuantWeight:
        """The weight `[rows, I]` of super-blocks in the order of its rows."""

        def by_row(part: Tensor) -> Tensor:
            return part.reshape(rows, len(part) // rows * part.shape[1])

        scale_codes, min_codes = by_row(parts.scale_codes), by_row(parts.min_codes)
        super_scales, super_minima = by_row(parts.super_scales), by_row(parts.super_minima)
        return KQuantWeight(by_row(parts.codes), scale_codes, min_codes, super_scales, super_minima, self)

    def search(self, weight: Tensor, importance: Tensor | None) -> BlockGrid[KQuantWeight]:
        from compress.checkpoint.gguf.rounding.k import search_weight
        from compress.checkpoint.grids import BlockGrid

        return BlockGrid(self.of(search_weight(weight, self.layout, importance), len(weight)))

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> KQuantWeight:
        self.num_blocks(weight.shape[1])
        return self.search(weight, importance).start


@register("q2_k")
@dataclass(frozen=True, slots=True)
class Q2K(KQuant):
    """2 bits in groups of 16, with scales and minima of 4 bits."""

    word = "q2_k"
    bits = 2
    group_size = 16
    block_bytes = 84
    has_minima = True


@register("q3_k")
@dataclass(frozen=True, slots=True)
class Q3K(KQuant):
    """3 bits in groups of 16, with scales of 6 bits."""

    word = "q3_k"
    bits = 3
    group_size = 16
    block_bytes = 110


@register("q4_k")
@dataclass(frozen=True, slots=True)
class Q4K(KQuant):
    """4 bits in groups of 32, with scales and minima of 6 bits."""

    word = "q4_k"
    bits = 4
    group_size = 32
    block_bytes = 144
    has_minima = True


@register("q5_k")
@dataclass(frozen=True, slots=True)
class Q5K(KQuant):
    """5 bits in groups of 32, with scales and minima of 6 bits."""

    word = "q5_k"
    bits = 5
    group_size = 32
    block_bytes = 176
    has_minima = True


@register("q6_k")
@dataclass(frozen=True, slots=True)
class Q6K(KQuant):
    """6 bits in groups of 16, with scales of 8 bits."""

    word = "q6_k"
    bits = 6
    group_size = 16
    block_bytes = 210


@dataclass(frozen=True, slots=True)
class KQuantWeight(BlockIntegers):
    """`W [O, I] ~ qweight * scales - minima`, without minima `(qweight - midpoint) * scales`.

    Scales and minima are repeated over each group of columns; types without minima have parts of no columns for them.

    Attributes:
        qweight: uint8 `[O, I]`.
        scale_codes: int8 `[O, G]`.
        min_codes: int8 `[O, G]` or `[O, 0]`.
        super_scales: float16 `[O, I / 256]`, of which scales are multiples by `scale_codes`.
        super_minima: float16 `[O, I / 256]` or `[O, 0]`.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    scale_codes: Tensor
    min_codes: Tensor
    super_scales: Tensor
    super_minima: Tensor
    scheme: KQuant

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        groups, blocks = self.scheme.num_groups(columns), self.scheme.num_blocks(columns)
        sizes = (groups, groups, blocks, blocks) if self.scheme.has_minima else (groups, 0, blocks, 0)
        found, expected = [tuple(part.shape) for part in self._scaling], [(rows, size) for size in sizes]
        if found != expected:
            raise SchemeError(f"scales and minima {found} must be {expected} for {self.scheme}")

    @property
    def _scaling(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.scale_codes, self.min_codes, self.super_scales, self.super_minima

    @property
    def scales(self) -> Tensor:
        return _products(self.scale_codes, self.super_scales)

    @property
    def minima(self) -> Tensor | None:
        return _products(self.min_codes, self.super_minima) if self.scheme.has_minima else None

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.super_scales, self.super_minima

    def with_factors(self, for_scales: Tensor, for_minima: Tensor) -> KQuantWeight:
        return replace(self, super_scales=for_scales, super_minima=for_minima)

    def with_codes(self, codes: Tensor) -> KQuantWeight:
        return replace(self, qweight=codes)

    def blocks(self) -> Tensor:
        from compress.checkpoint.gguf.types.k import KBlocks

        rows, columns = self.shape
        count = rows * self.scheme.num_blocks(columns)
        parts = (part.reshape(count, rows * part.shape[1] // max(1, count)) for part in (self.qweight, *self._scaling))
        return self.scheme.layout.join(KBlocks(*parts)).reshape(rows, -1)

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(module, self.super_scales)
        yield from scale_problems(module, self.super_minima)


def _products(codes: Tensor, numbers: Tensor) -> Tensor:
    """Float32 `[O, G]`: codes `[O, G]` times the number `[O, I / 256]` of their super-block."""
    return (codes.float().unflatten(1, (numbers.shape[1], -1)) * numbers.float().unsqueeze(-1)).flatten(1)
