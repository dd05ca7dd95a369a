"""Round to nearest: every weight to its nearest code, under scales chosen for the least squared error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.scheme import Scheme
from compress.methods.base import EMBEDDING, HEAD, Layer, QuantizationMethod, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.weights import CodedWeight
    from compress.checkpoint.weights.fp8 import Fp8Weight
    from compress.checkpoint.weights.integer import IntegerWeight
    from compress.checkpoint.weights.low_rank import LowRankWeight


@register
class RTN(QuantizationMethod):
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    help: ClassVar[str] = "round to nearest, without calibration"
    is_fallback: ClassVar[bool] = True
    rounds_factors: ClassVar[bool] = True
    matrices: ClassVar[frozenset[str]] = frozenset((EMBEDDING, HEAD))

    def unsupported(self, scheme: Scheme) -> str:
        return ""

    def compress(self, layer: Layer) -> CodedWeight:
        return round_to_nearest(layer)

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Round `right [r, I]`, then `left [O, r]` for inputs that are taken as independent."""
        import torch

        from compress.checkpoint.weights.low_rank import LowRankWeight, values

        first = quantize_rtn(right, layer.scheme, layer.importance, layer.dtype)
        passed = values(first, torch.float32).square()
        between = None if layer.importance is None else passed @ layer.importance
        last = quantize_rtn(left, layer.scheme, between, layer.dtype)
        return LowRankWeight(last, first, replace(layer.scheme, rank=len(right)))


def round_to_nearest(layer: Layer) -> CodedWeight:
    """Round a layer to integers or 8-bit floats, its columns weighted by the mean squares of their inputs.

    Raises:
        SchemeError: the group size does not divide the inputs.
        NumericsError: NaN or infinity in the weight.
    """
    quantize = quantize_fp8 if layer.scheme.fp8 else quantize_rtn
    return quantize(layer.weight, layer.scheme, layer.importance, layer.dtype)


def quantize_rtn(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> IntegerWeight:
    """Quantize `weight [O, I]` without calibration, or with `importance [I]` = diag(H) when there is some.

    Args:
        scale_dtype: dtype of stored scales; None is bfloat16.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or importance.
    """
    import torch

    from compress.checkpoint.weights.integer import encode, search_scales

    return encode(weight, search_scales(weight, scheme, importance, scale_dtype or torch.bfloat16), scheme)


STEPS = tuple(2 ** (step / 8) for step in range(8))
"""Factors on the scale that spans a row of 8-bit floats: within one octave, rounding errors differ."""


def quantize_fp8(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> Fp8Weight:
    """Round `weight [O, I]` to 8-bit floats under the scales with the least squared error.

    Args:
        importance: `[I]`, mean square of each input; None weighs all columns alike.
        scale_dtype: dtype of stored scales; None is bfloat16.

    Raises:
        NumericsError: NaN or infinity in the weight.
    """
    import torch

    from compress.checkpoint.weights.fp8 import Fp8Weight
    from compress.checkpoint.weights.integer import PANEL_ELEMENTS
    from compress.common.device import require_finite

    require_finite(weight, "the weight")
    dtype = scale_dtype or torch.bfloat16
    rows = max(1, PANEL_ELEMENTS // weight.shape[1])
    scale = torch.cat([_best_scale(part.float(), importance, dtype) for part in weight.split(rows)])
    codes = torch.cat([_codes(*parts) for parts in zip(weight.split(rows), scale.split(rows), strict=True)])
    return Fp8Weight(codes, scale.to(dtype), scheme)


def round_to_fp8(weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
    """Return `weight [O, I]` as float32, rounded to 8-bit floats under the scales that span its rows."""
    import torch

    scale = _full_scale(weight.float(), scale_dtype or torch.bfloat16)
    return _codes(weight, scale).float() * scale


def _best_scale(weight: Tensor, importance: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return scales `[O, 1]`, float32 with values of `dtype`."""
    import torch

    from compress.checkpoint.weights.integer import storable

    full = _full_scale(weight, dtype)
    best, least = full, torch.full_like(full, torch.inf)
    for step in STEPS:
        scale = storable(full * step, dtype)
        squares = (_codes(weight, scale).float() * scale - weight).square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _full_scale(weight: Tensor, dtype: torch.dtype) -> Tensor:
    from compress.checkpoint.weights.fp8 import MAX_FP8
    from compress.checkpoint.weights.integer import storable

    return storable(weight.abs().amax(1, keepdim=True) / MAX_FP8, dtype)


def _codes(weight: Tensor, scale: Tensor) -> Tensor:
    from compress.checkpoint.weights.fp8 import FP8, MAX_FP8

    return (weight.float() / scale).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
