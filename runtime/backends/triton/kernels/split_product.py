"""Products with one packed weight whose launches are prepared once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.backends.triton.launcher import BoundKernel
from runtime.backends.triton.sizes import cdiv


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """A product in one size of tiles, whose inputs are cut into splits with sums of their own.

    Attributes:
        kernel: given all but the input, the tensors that go with it, the sums, and the number of tokens.
        rows: of the weight.
        blocks_n: blocks of rows.
        block_m: tokens of a program.
        dtype: of the sums.
        is_grouped: programs that share weights follow each other, see `grouped_tile`.
    """

    kernel: BoundKernel
    rows: int
    blocks_n: int
    splits: int
    block_m: int
    dtype: torch.dtype = torch.float32
    is_grouped: bool = False

    def __call__(self, x: Tensor, *beside: Tensor) -> Tensor:
        """Sums `[splits, M, rows]` of `x [M, K]`."""
        tokens = x.shape[0]
        sums = x.new_empty(self.splits, tokens, self.rows, dtype=self.dtype)
        blocks_m = cdiv(tokens, self.block_m)
        grid = (self.blocks_n * blocks_m, self.splits, 1) if self.is_grouped else (self.blocks_n, self.splits, blocks_m)
        self.kernel(grid, x, *beside, sums, tokens)
        return sums
