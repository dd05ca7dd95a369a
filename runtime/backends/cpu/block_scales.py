"""Codes whose scales may be integers times one of a block, perhaps above minima: as block types of GGUF have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockScaledCodes:
    """Weight `W [O, I] ~ numbers * scales * steps - minima * minimum_steps`, repeated over blocks or groups of columns.

    Attributes:
        codes: uint8 `[O, I]`.
        bits: width of a code.
        scales: any float dtype, or uint8 `e` of powers of two `2^(e - 127)`, `[O, B]`.
        minima: `[O, B]` in the dtype of scales. Codes are numbers then; without minima, integers around their midpoint.
        steps: int8 `[O, G]`, each of a group of columns; None where every block is one group.
        minimum_steps: int8 `[O, G]`, there with both others.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    minima: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // (self.scales if self.steps is None else self.steps).shape[1]

    @property
    def offset(self) -> int:
        """Code that stands for zero, before minima."""
        return 0 if self.minima is not None else 1 << (self.bits - 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values `[O, I]`, computed in `dtype`."""
        numbers = (self.codes.to(dtype) - self.offset).unflatten(1, (-1, self.group))
        values = numbers * of_groups(self.scales, self.steps, dtype, numbers.shape[1])
        if self.minima is not None:
            values = values - of_groups(self.minima, self.minimum_steps, dtype, numbers.shape[1])
        return values.flatten(1)


def of_groups(scales: Tensor, steps: Tensor | None, dtype: torch.dtype, groups: int) -> Tensor:
    """Returns scales or minima `[O, groups, 1]` of groups from those of blocks `[O, B]`."""
    is_power = scales.dtype == torch.uint8
    numbers = torch.ldexp(torch.ones(scales.shape, dtype=dtype), scales.int() - 127) if is_power else scales
    repeated = numbers.to(dtype).repeat_interleave(groups // scales.shape[1], 1)
    return (repeated if steps is None else repeated * steps.to(dtype)).unsqueeze(-1)
