"""GPTQ: rounds one column at a time and lets the columns still to come make up for the error.

Frantar et al. 2023, https://arxiv.org/abs/2210.17323, sections 3.2 and 3.3, with the choices that give the best
quality at no cost to the runtime: scales from the original weight before any column is touched (static groups),
columns taken by falling diag(H) (activation order), scales searched under diag(H), at 2 bits under each group's block
of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scales import GroupScales, encode, search_scales
from compress.checkpoint.scheme import Scheme
from compress.methods.hessian import GptqOptions, HessianFactor, factorize

__all__ = ["GptqOptions", "HessianFactor", "factorize", "quantize_gptq"]

# Columns rounded one by one before their errors are passed on with one matrix product.
_LEAF_COLUMNS = 16


def quantize_gptq(
    weight: Tensor,
    factor: HessianFactor,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> IntegerWeight:
    """Quantizes `weight [O, I]` against a factorized Hessian; codes come back in the original column order.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in the weight.
    """
    # At 2 bits most of the error is clipping, which adds up over correlated inputs; diag(H) cannot see that.
    inputs = factor.equivalent_inputs() if scheme.bits == 2 and scheme.group_size else None
    scales = search_scales(weight, scheme, factor.importance, scale_dtype, inputs=inputs)
    if factor.feedback is None:
        return encode(weight, scales, scheme)
    columns = _Columns(weight, factor.order, factor.feedback, scales, scheme)
    columns.round(0, weight.shape[1])
    codes = torch.empty_like(columns.codes)
    codes[factor.order] = columns.codes
    return IntegerWeight(codes.T.contiguous(), scales.scale, scales.zero, scheme)


class _Columns:
    """The weight's columns in the order of rounding, each a contiguous row of a transposed copy `[I, O]`.

    Attributes:
        targets: the column plus all feedback so far: what will be rounded.
        errors: the original column, minus its rounded value once it has one.
        codes: uint8, filled column by column.
    """

    def __init__(self, weight: Tensor, order: Tensor, feedback: Tensor, scales: GroupScales, scheme: Scheme) -> None:
        self.errors = weight.float().T.contiguous()[order]
        self.targets = self.errors.clone()
        self.codes = torch.empty(self.errors.shape, dtype=torch.uint8, device=weight.device)
        self._feedback = feedback
        self._scale = scales.scale.float().T.contiguous()
        self._zero = scales.zero.float().T.contiguous()
        self._max_code = scheme.max_code
        group_size = weight.shape[1] // scales.scale.shape[1]
        self._group = (order // group_size).tolist()

    def round(self, start: int, stop: int) -> None:
        """Rounds columns `start` to `stop`. Halving the range turns nearly all feedback into large matrix products;
        it is the lazy update of section 3.3 at every block size at once."""
        if stop - start <= _LEAF_COLUMNS:
            return self._round_leaf(start, stop)
        middle = (start + stop) // 2
        self.round(start, middle)
        self.targets[middle:stop].addmm_(self._feedback[start:middle, middle:stop].T, self.errors[start:middle])
        return self.round(middle, stop)

    def _round_leaf(self, start: int, stop: int) -> None:
        for column in range(start, stop):
            target = self.targets[column]
            if column > start:
                target.addmv_(self.errors[start:column].T, self._feedback[start:column, column])
            group = self._group[column]
            scale, zero = self._scale[group], self._zero[group]
            codes = (target / scale).round_().add_(zero).clamp_(0, self._max_code)
            self.codes[column] = codes
            self.errors[column].sub_(codes.sub_(zero).mul_(scale))
