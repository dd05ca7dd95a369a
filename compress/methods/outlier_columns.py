"""Outlier columns: input columns that stay in 16 bits, because rounding them causes the largest error.

OWQ (Lee et al. 2023, https://arxiv.org/abs/2306.02272, section 3.2) takes the columns with the largest `H_jj |dW_j|^2`,
the output error that rounding column j causes; LLM.int8() (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339,
section 3) those with the largest inputs, which would coarsen the quantization step of all other 8-bit activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from compress.checkpoint.weights import Int, OutlierColumns
from compress.common.errors import RecipeError
from compress.methods.base import Layer, QuantizationMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.weights.coded import CodedWeight
    from compress.checkpoint.weights.outlier_columns import OutlierWeight
    from compress.methods.shared.hessian import HessianFactor


def check_amount(wanted: float) -> None:
    """Raises RecipeError unless `wanted` is a share below 1 or a number of columns."""
    if not (0 < wanted < 1 or (float(wanted).is_integer() and wanted > 0)):
        problem = f"outlier_columns={wanted:g} is neither a share below 1 nor a number of columns"
        raise RecipeError(problem, "Use 0.01 to keep 1 % of the columns in 16 bits")


def number_of_columns(wanted: float, in_features: int) -> int:
    """Returns the number of outlier columns of a layer, from a share or a number."""
    return int(wanted) if wanted >= 1 else max(1, round(wanted * in_features))


def compress_rest(method: QuantizationMethod, layer: Layer, columns: Tensor) -> OutlierWeight:
    """Quantizes a layer with any method, except `columns [k]`, which stay in 16 bits. Raises as the method."""
    rest = replace(layer, weight=layer.weight.index_fill(1, columns, 0.0), scheme=layer.integers)
    codes = cast("CodedWeight", method.compress(rest))
    return beside_outliers(layer.weight, codes, columns, OutlierColumns(layer.integers, len(columns)))


def sensitivity(weights: Sequence[Tensor], scheme: Int, importance: Tensor | None) -> Tensor:
    """Returns the output error `[I]` float32 of rounding each input column, over all `weights [O_k, I]` that share it.
    `importance`: `[I]`, mean square of each input; None weights all equally."""
    import torch

    from compress.checkpoint.scale_search import round_in_range

    errors = [(round_in_range(weight, scheme) - weight.float()).square().sum(0) for weight in weights]
    total = torch.stack(errors).sum(0)
    return total if importance is None else total * importance.to(total.device)


def highest(score: Tensor, count: int) -> Tensor:
    """Returns the indices `[count]` of the highest scores `[I]`, int64, ascending; of equal scores the first."""
    return score.argsort(descending=True, stable=True)[:count].sort().values


def beside_outliers(weight: Tensor, codes: CodedWeight, columns: Tensor, scheme: OutlierColumns) -> OutlierWeight:
    """Combines the codes of any method with the unquantized `columns [k]` of `weight [O, I]`."""
    from compress.checkpoint.weights.outlier_columns import OutlierWeight, without_columns

    values = weight[:, columns].to(codes.scales.dtype)
    return OutlierWeight(without_columns(codes, columns), columns.int(), values, scheme)


def quantize_gptq_beside(
    weight: Tensor,
    factor: HessianFactor,
    scheme: OutlierColumns,
    columns: Tensor,
    scale_dtype: torch.dtype | None = None,
) -> OutlierWeight:
    """Quantizes all columns except `columns [k]` by GPTQ; these come last and compensate the error of all others in 16
    bits. Raises SchemeError: the group size does not divide `I`; NumericsError: NaN or infinity in the weight.
    `factor`: factor of a Hessian whose order ends with `columns`, see `HessianOptions.last`."""
    import torch

    from compress.checkpoint.grids import IntegerGrid
    from compress.checkpoint.scale_search import encode, search_scales
    from compress.methods.shared.column_solver import GPTQSolver

    base = scheme.inner
    rest = weight.index_fill(1, columns, 0.0)
    inputs = factor.equivalent_inputs() if base.bits == 2 and base.group_size else None
    scales = search_scales(rest, base, factor.importance, scale_dtype, inputs=inputs)
    if factor.feedback is None:
        return beside_outliers(weight, encode(rest, scales, base), columns, scheme)
    rounded = weight.shape[1] - len(columns)
    order, last = factor.order[:rounded], factor.order[rounded:]
    among = factor.feedback[:rounded, :rounded].contiguous()
    grid = IntegerGrid(scales, base)
    loop = GPTQSolver(weight, order, among, grid)
    loop.run()
    codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
    codes[:, order] = loop.codes.T
    # Feedback of the rounded columns to the outlier columns, and among the latter.
    fed = loop.errors.T @ factor.feedback[:rounded, rounded:]
    among = factor.feedback[rounded:, rounded:]
    moved = weight.float().clone()
    moved[:, last] += torch.linalg.solve_triangular(among, fed, upper=True, left=False, unitriangular=True)
    return beside_outliers(moved, grid.weight(codes), columns, scheme)
