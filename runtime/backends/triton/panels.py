"""Products of many tokens with packed weights: rows are dequantized for a dense product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime.backends.triton.launcher import BoundKernel
from runtime.backends.triton.sizes import cdiv
from runtime.core.memory_plan import PANEL_ELEMENTS

EXPANDED_ROWS = 64
"""Rows of a program that dequantizes."""
STEP = 256
"""Rows of a panel are a multiple of this: a tile of a large dense product on Hopper."""


@dataclass(frozen=True, slots=True)
class Expander:
    """Fills `out [R, K]` with the dequantized rows of a weight from a first one on, a multiple of EXPANDED_ROWS.

    Attributes:
        kernel: given all but the output, the first row and R.
        blocks_k: blocks of inputs.
    """

    kernel: BoundKernel
    blocks_k: int

    def __call__(self, first: int, out: Tensor) -> None:
        rows = out.shape[0]
        self.kernel((self.blocks_k, cdiv(rows, EXPANDED_ROWS)), out, first, rows)


def multiply_by_panels(x: Tensor, rows: int, bias: Tensor | None, expand: Callable[[int, Tensor], None]) -> Tensor:
    """Multiplies `x [M, K]` by a weight `[rows, K]`: `x W^T + bias [M, rows]`. The whole weight is dense at one time
    where that takes at most PANEL_ELEMENTS; else a panel of its rows, each panel's part written where it belongs."""
    tokens, inputs = x.shape
    if rows * inputs <= PANEL_ELEMENTS:
        weight = x.new_empty(rows, inputs)
        expand(0, weight)
        return functional.linear(x, weight, bias)
    step = max(STEP, PANEL_ELEMENTS // inputs // STEP * STEP)
    panel, y = x.new_empty(step, inputs), x.new_empty(tokens, rows)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        dense = panel[: stop - first]
        expand(first, dense)
        if bias is None:
            torch.mm(x, dense.T, out=y[:, first:stop])
        else:
            torch.addmm(bias[first:stop], x, dense.T, out=y[:, first:stop])
    return y
