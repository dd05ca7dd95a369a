"""The grid that columns are rounded to, ordered as the loop over columns takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scales import GroupScales
from compress.checkpoint.scheme import Scheme
from compress.native.columns import ColumnGrid


@dataclass(frozen=True, slots=True)
class Grid:
    """Where values may lie: scales of a weight `[O, I]` and its scheme."""

    scales: GroupScales
    scheme: Scheme


class OrderedGrid:
    """Scales and zero points by column of the loop.

    Attributes:
        compiled: the same as compiled code takes it.
    """

    def __init__(self, grid: Grid, num_columns: int, order: Tensor) -> None:
        scale, zero = (each.float().T.contiguous() for each in (grid.scales.scale, grid.scales.zero))
        self.compiled = ColumnGrid(scale, zero, order // (num_columns // len(scale)), grid.scheme.max_code)
        self._group = self.compiled.group.tolist()

    def round(self, target: Tensor, column: int, codes: Tensor, kept: Tensor | None) -> Tensor:
        """The nearest value on the grid `[O]`; writes its codes, the zero point for what is pruned."""
        group = self._group[column]
        scale, zero = self.compiled.scale[group], self.compiled.zero[group]
        found = (target / scale).round_().add_(zero).clamp_(0, self.compiled.max_code)
        if kept is not None:
            found = torch.where(kept[column], found, zero)
        codes[column] = found
        return found.sub_(zero).mul_(scale)
