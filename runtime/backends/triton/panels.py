"""Products of many tokens with packed weights: rows are dequantized, a panel at a time, for a dense product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.backends.triton.device import num_processors
from runtime.backends.triton.kernels.configs import PANEL_STEP, panel_rows

PANEL_ELEMENTS = 12 * 2**20
"""Weights that are dense at one time: 24 MB stay in the second-level cache of a large GPU."""

Expand = Callable[[int, Tensor], None]
"""Fills `out [R, K]` with the dequantized rows of a weight from a first one on, a multiple of 64."""


def multiply_by_panels(x: Tensor, rows: int, bias: Tensor | None, expand: Expand) -> Tensor:
    """Multiplies `x [M, K]` by a weight `[rows, K]`: `x W^T + bias [M, rows]`, each panel's part written where it
    belongs."""
    tokens, inputs = x.shape
    step = panel_rows(rows, PANEL_ELEMENTS // inputs, tokens, num_processors(x.device))
    # Of one size for all weights, so that the allocator and the pool of a graph hand the same memory out again.
    panel = x.new_empty(max(PANEL_ELEMENTS, PANEL_STEP * inputs))
    y = x.new_empty(tokens, rows)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        dense = panel[: (stop - first) * inputs].view(-1, inputs)
        expand(first, dense)
        if bias is None:
            torch.mm(x, dense.T, out=y[:, first:stop])
        else:
            torch.addmm(bias[first:stop], x, dense.T, out=y[:, first:stop])
    return y
