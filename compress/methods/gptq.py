"""GPTQ: rounds one column at a time and lets the columns still to come make up for the error.

Frantar et al. 2023, https://arxiv.org/abs/2210.17323, sections 3.2 and 3.3, with the choices that give the best
quality at no cost to the runtime: scales from the original weight before any column is touched (static groups),
columns taken by falling diag(H) (activation order), scales searched under diag(H), at 2 bits under each group's block
of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.integer import IntegerWeight, encode, search_scales
from compress.methods.shared.column_solver import GPTQSolver, Grid
from compress.methods.shared.hessian import HessianFactor


def quantize_gptq(
    weight: Tensor,
    factor: HessianFactor,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.bfloat16,
    kept: Tensor | None = None,
) -> IntegerWeight:
    """Quantizes `weight [O, I]` against a factorized Hessian; codes come back in the original column order.

    Args:
        kept: bool `[O, I]`; where it is False the result is exactly zero, and other columns make up for that too.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in the weight.
    """
    # At 2 bits most of the error is clipping, which adds up over correlated inputs; diag(H) cannot see that.
    inputs = factor.equivalent_inputs() if scheme.bits == 2 and scheme.group_size else None
    remaining = weight if kept is None else weight * kept
    scales = search_scales(remaining, scheme, factor.importance, scale_dtype, inputs=inputs)
    if factor.feedback is None:
        return encode(remaining, scales, scheme)
    columns = GPTQSolver(weight, factor.order, factor.feedback, Grid(scales, scheme), kept)
    columns.run()
    return IntegerWeight(columns.in_original_order(columns.codes), scales.scale, scales.zero, scheme)
