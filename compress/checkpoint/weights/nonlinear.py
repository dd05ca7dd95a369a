"""The type iq4_nl of GGUF: 4-bit codes that are places among 16 levels, with one float16 scale for 32 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.scheme import register
from compress.checkpoint.weights.base import dequantize_by_rows, scale_problems
from compress.checkpoint.weights.gguf_blocks import BlockScheme, BlockWeight
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.grids import FloatGrid

LEVELS = "non-linear level"
LEVEL_VALUES = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
"""The level of each code, as GGUF has them; none is 0."""


@register("iq4_nl")
@dataclass(frozen=True, slots=True)
class Iq4Nl(BlockScheme):
    """`W ~ code_values[qweight] * scale`; scales may be negative."""

    word = "iq4_nl"
    bits = 4
    group_size = 32
    block_size = 32
    block_bytes = 18
    holds_zeros = False
    numbers = LEVELS
    code_values = LEVEL_VALUES

    def from_blocks(self, blocks: Tensor) -> NonlinearWeight:
        from compress.checkpoint.gguf.types.base import float16
        from compress.checkpoint.gguf.types.legacy import nibbles

        rows, flat = len(blocks), blocks.reshape(-1, self.block_bytes)
        return NonlinearWeight(nibbles(flat, 2).reshape(rows, -1), float16(flat, 0).reshape(rows, -1), self)

    def search(self, weight: Tensor, importance: Tensor | None) -> FloatGrid[NonlinearWeight]:
        import torch

        from compress.checkpoint.float_scales import Codebook
        from compress.checkpoint.gguf.rounding.search import groups_of, search_scales
        from compress.checkpoint.grids import FloatGrid, divisors

        numbers, extremes = Codebook(LEVEL_VALUES), (LEVEL_VALUES[0], LEVEL_VALUES[-1])
        blocks = groups_of(weight, self.group_size, importance)
        found = torch.cat([search_scales(each, numbers.nearest, extremes) for each in blocks]).reshape(len(weight), -1)
        scales = found.to(torch.float16)
        return FloatGrid(numbers, divisors(found), self.group_size, lambda codes: NonlinearWeight(codes, scales, self))


@dataclass(frozen=True, slots=True)
class NonlinearWeight(BlockWeight):
    """`W [O, I] ~ code_values[qweight] * scales`, scales repeated over each group of columns.

    Attributes:
        qweight: uint8 `[O, I]`, codes below 16.
        scales: float16 `[O, I / 32]`.

    Raises:
        SchemeError: shapes that contradict the scheme.
    """

    qweight: Tensor
    scales: Tensor
    scheme: Iq4Nl

    def __post_init__(self) -> None:
        rows, columns = self.qweight.shape
        expected = rows, self.scheme.num_groups(columns)
        if tuple(self.scales.shape) != expected:
            raise SchemeError(f"scales {tuple(self.scales.shape)} must be {expected} for {self.scheme}")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`: computed in float32 as llama.cpp does, then rounded to `dtype`."""
        import torch

        levels = torch.tensor(LEVEL_VALUES, device=self.qweight.device)

        def panel(codes: Tensor, scales: Tensor) -> Tensor:
            return (levels[codes.int()].unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.scales.float())

    def blocks(self) -> Tensor:
        from compress.checkpoint.gguf.rounding.legacy import join_symmetric

        codes, scales = self.qweight.reshape(-1, 32), self.scales.reshape(-1, 1)
        return join_symmetric(codes, scales, self.scheme.bits).view(len(self.scales), -1)

    def problems(self, module: str) -> Iterator[str]:
        yield from scale_problems(module, self.scales)
