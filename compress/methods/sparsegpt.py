"""SparseGPT: prunes column by column, and lets the columns still to come make up for what is gone.

Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774, sections 3 and 3.4: the mask is chosen on the weights as
they are by then, and where a scheme is given each kept weight is rounded in the same loop, so that the feedback of one
serves both. Columns are taken as they stand: patterns lie in the original order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme, Sparsity
from compress.checkpoint.weights.integer import IntegerWeight, encode, search_scales
from compress.methods.pruning import keep_pattern, keep_share, scores
from compress.methods.shared.column_solver import Choice, GPTQSolver, Grid
from compress.methods.shared.hessian import HessianFactor, HessianOptions

OPTIONS = HessianOptions(activation_order=False)
"""How the Hessian must be factorized."""


def prune_sparsegpt(
    weight: Tensor,
    factor: HessianFactor,
    pattern: Sparsity | None,
    share: float,
    scheme: Scheme | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> IntegerWeight | Tensor:
    """Prunes `weight [O, I]`, and quantizes what is kept when there is a scheme; zeros are exact either way.

    Args:
        factor: of the inputs' Hessian, under `OPTIONS`.
        pattern: N:M; None prunes a `share` of the weights wherever they stand.

    Returns:
        Integers under the scheme, or float32 `[O, I]`.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in the weight.
    """
    guess = _keep(scores("wanda", weight, factor.importance), pattern, share)
    likely = weight.float().masked_fill(~guess, 0.0)
    grid = None
    if scheme is not None:
        # Weights that will be gone must not widen the range of those that stay.
        grid = Grid(search_scales(likely, scheme, factor.importance, scale_dtype), scheme)
    if factor.feedback is None or factor.spread is None:
        return likely if grid is None else encode(likely, grid.scales, grid.scheme)
    columns = GPTQSolver(weight, factor.order, factor.feedback, grid, choice=Choice(factor.spread, pattern, share))
    columns.run()
    if grid is None:
        return columns.in_original_order(columns.values)
    return IntegerWeight(columns.in_original_order(columns.codes), grid.scales.scale, grid.scales.zero, grid.scheme)


def _keep(score: Tensor, pattern: Sparsity | None, share: float) -> Tensor:
    return keep_pattern(score, pattern) if pattern else keep_share(score, share, per_output=True)
