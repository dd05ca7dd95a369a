"""GPTQ: rounds one column at a time and compensates its error in the columns that follow.

Frantar et al. 2023, https://arxiv.org/abs/2210.17323, sections 3.2 and 3.3, with the options of best quality that do
not affect the runtime: scales from the original weight (static groups), columns in order of descending diag(H)
(activation order), scales searched under diag(H), at 2 bits under each group's block of H.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from compress.checkpoint.weights import LowRank, OutlierColumns, Scheme, Weight
from compress.methods.base import HEAD, Layer, Needs, QuantizationMethod, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.weights.coded import CodedWeight
    from compress.checkpoint.weights.low_rank import LowRankWeight
    from compress.checkpoint.weights.outlier_columns import OutlierWeight
    from compress.methods.shared.hessian import HessianFactor


@register
class GPTQ(QuantizationMethod):
    """GPTQ."""

    name: ClassVar[str] = "gptq"
    help: ClassVar[str] = "column by column, errors compensated by second-order statistics"
    rounds_factors: ClassVar[bool] = True
    joins_pruning: ClassVar[bool] = True
    takes_grids: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset((HEAD,))
    data: ClassVar[Needs] = Needs(inputs=True, hessian=True)

    def compress(self, layer: Layer) -> Weight:
        return compress_gptq(layer)

    def compress_beside(self, layer: Layer, columns: Tensor) -> OutlierWeight:
        from compress.methods.outlier_columns import quantize_gptq_beside
        from compress.methods.shared.hessian import HessianOptions

        factor = layer.inputs.factor(HessianOptions(last=tuple(columns.tolist())))
        layer.details |= factor.facts()
        return quantize_gptq_beside(
            layer.weight, factor, OutlierColumns(layer.integers, len(columns)), columns, layer.dtype
        )

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Rounds `right [r, I]` with the layer's inputs, then `left [O, r]` with the outputs of the rounded right
        factor."""

        from compress.checkpoint.weights.low_rank import LowRankWeight
        from compress.methods.shared.hessian import factorize

        factor = layer.inputs.factor()
        layer.details["recovery"] = "; ".join(filter(None, (layer.details.get("recovery", ""), factor.recovery)))
        first = cast("CodedWeight", quantize_gptq(right, factor, layer.integers, layer.dtype))
        passed = first.dequantize()
        between = factorize(passed @ layer.inputs.hessian @ passed.T)
        last = cast("CodedWeight", quantize_gptq(left, between, layer.integers, layer.dtype))
        return LowRankWeight(last, first, LowRank(layer.integers, len(right)))


def compress_gptq(layer: Layer) -> Weight:
    """Quantizes a layer with the Hessian of its inputs. Raises as `quantize_gptq`."""
    factor = layer.inputs.factor()
    layer.details |= factor.facts()
    return quantize_gptq(layer.weight, factor, layer.scheme, layer.dtype, layer.kept)


def quantize_gptq(
    weight: Tensor,
    factor: HessianFactor,
    scheme: Scheme,
    scale_dtype: torch.dtype | None = None,
    kept: Tensor | None = None,
) -> Weight:
    """Quantizes `weight [O, I]` with a factorized Hessian; returns codes in the original column order. Raises
    SchemeError: the group size does not divide `I`, or the form has no grid; NumericsError: NaN or infinity in the
    weight.

    Args:
        scale_dtype: dtype of stored scales; None is bfloat16.
        kept: bool `[O, I]`; False sets a weight to exactly zero, which other columns also compensate.
    """
    from compress.methods.shared.column_solver import GPTQSolver

    # At 2 bits most of the error is clipping, which adds up over correlated inputs; diag(H) cannot see that.
    inputs = factor.equivalent_inputs() if scheme.bits == 2 and scheme.group_size else None
    remaining = weight if kept is None else weight * kept
    grid = scheme.grid(remaining, factor.importance, scale_dtype, inputs)
    if factor.feedback is None:
        return grid.encode(remaining)
    solver = GPTQSolver(weight, factor.order, factor.feedback, grid, kept)
    solver.run()
    return grid.weight(solver.in_original_order(solver.codes))
