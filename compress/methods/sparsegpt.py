"""SparseGPT: prunes column by column and compensates the error in the columns that follow.

Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774, sections 3 and 3.4: the mask is selected from the updated
weights, and if a scheme is given, kept weights are rounded in the same loop, so both errors share one feedback. Columns
keep their order, which N:M patterns require.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import Int, NMSparsity
from compress.methods.base import Layer, Needs, Pruned, PruningMethod, register
from compress.methods.pruning import keep, wanda_score

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.weights.coded import CodedWeight
    from compress.methods.shared.hessian import HessianFactor


@register
class SparseGPT(PruningMethod):
    """SparseGPT."""

    name: ClassVar[str] = "sparsegpt"
    order: ClassVar[int] = 3
    help: ClassVar[str] = "column by column, errors compensated by second-order statistics"
    data: ClassVar[Needs] = Needs(inputs=True, hessian=True)
    is_default: ClassVar[bool] = True

    def prune(
        self, layer: Layer, pattern: NMSparsity | None, sparsity: float, joint: Int | None
    ) -> Pruned | CodedWeight:
        from torch import Tensor

        from compress.methods.shared.hessian import HessianOptions

        factor = layer.inputs.factor(HessianOptions(activation_order=False))
        layer.details |= factor.facts()
        found = prune_sparsegpt(layer.weight, factor, pattern, sparsity, joint, layer.dtype)
        return Pruned(found, found != 0) if isinstance(found, Tensor) else found


def prune_sparsegpt(
    weight: Tensor,
    factor: HessianFactor,
    pattern: NMSparsity | None,
    share: float,
    scheme: Int | None = None,
    scale_dtype: torch.dtype | None = None,
) -> CodedWeight | Tensor:
    """Prunes `weight [O, I]`, and quantizes the kept weights if a scheme is given; zeros are exact in both cases.
    Raises SchemeError: the group size does not divide `I`; NumericsError: NaN or infinity in the weight.

    Args:
        factor: factor of the inputs' Hessian, without activation order.
        pattern: N:M pattern; None prunes a `share` of the weights anywhere.

    Returns:
        Integers under the scheme, or float32 `[O, I]`.
    """
    from compress.checkpoint.grids import IntegerGrid
    from compress.checkpoint.scale_search import encode, search_scales
    from compress.methods.shared.column_solver import Choice, GPTQSolver

    likely_kept = keep(wanda_score(weight, factor.importance), pattern, share, per_output=True)
    likely = weight.float().masked_fill(~likely_kept, 0.0)
    grid = None
    if scheme is not None:
        # Pruned weights must not widen the range of kept ones.
        grid = IntegerGrid(search_scales(likely, scheme, factor.importance, scale_dtype), scheme)
    if factor.feedback is None or factor.spread is None:
        return likely if grid is None else encode(likely, grid.scales, grid.scheme)
    columns = GPTQSolver(weight, factor.order, factor.feedback, grid, choice=Choice(factor.spread, pattern, share))
    columns.run()
    if grid is None:
        return columns.in_original_order(columns.values)
    return grid.weight(columns.in_original_order(columns.codes))
