"""Round to nearest: every weight to its nearest code, under scales chosen for the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.fp8 import FP8, MAX_FP8, Fp8Weight
from compress.checkpoint.weights.integer import PANEL_ELEMENTS, IntegerWeight, encode, search_scales, storable
from compress.common.device import require_finite


def quantize_rtn(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> IntegerWeight:
    """Quantizes `weight [O, I]` without calibration, or with `importance [I]` = diag(H) when there is some.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or importance.
    """
    return encode(weight, search_scales(weight, scheme, importance, scale_dtype), scheme)


STEPS = tuple(2 ** (step / 8) for step in range(8))


def quantize_fp8(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, scale_dtype: torch.dtype = torch.bfloat16
) -> Fp8Weight:
    """Rounds `weight [O, I]` under the scales with the least squared error.

    Args:
        importance: `[I]`, mean square of each input; None weighs all columns alike.
        scale_dtype: dtype in which scales are stored.

    Raises:
        NumericsError: NaN or infinity in the weight.
    """
    require_finite(weight, "the weight")
    rows = max(1, PANEL_ELEMENTS // weight.shape[1])
    scale = torch.cat([_best_scale(part.float(), importance, scale_dtype) for part in weight.split(rows)])
    codes = torch.cat([_codes(*parts) for parts in zip(weight.split(rows), scale.split(rows), strict=True)])
    return Fp8Weight(codes, scale.to(scale_dtype), scheme)


def round_to_fp8(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`weight [O, I]` as float32, rounded under the scales that span its rows: what a search over something else tries
    often."""
    scale = _full_scale(weight.float(), scale_dtype)
    return _codes(weight, scale).float() * scale


def _best_scale(weight: Tensor, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[O, 1]`, float32 with values of `dtype`."""
    full = _full_scale(weight, dtype)
    best, least = full, torch.full_like(full, torch.inf)
    for step in STEPS:
        scale = storable(full * step, dtype)
        squares = (_codes(weight, scale).float() * scale - weight).square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _full_scale(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return storable(weight.abs().amax(1, keepdim=True) / MAX_FP8, dtype)


def _codes(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() / scale).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
