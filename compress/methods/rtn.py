"""Round to nearest: every weight to its nearest code, under scales chosen for the least squared error."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import Int, LowRank, Scheme
from compress.methods.base import EMBEDDING, HEAD, Layer, QuantizationMethod, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.weights import Weight
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

    def compress(self, layer: Layer) -> Weight:
        return round_to_nearest(layer)

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Round `right [r, I]`, then `left [O, r]` for inputs that are taken as independent."""

        from compress.checkpoint.weights.low_rank import LowRankWeight

        first = layer.integers.round(right, layer.importance, layer.dtype)
        passed = first.dequantize().square()
        between = None if layer.importance is None else passed @ layer.importance
        last = layer.integers.round(left, between, layer.dtype)
        return LowRankWeight(last, first, LowRank(layer.integers, len(right)))


def round_to_nearest(layer: Layer) -> Weight:
    """Round a layer to the nearest values of its scheme, its columns weighted by the mean squares of their inputs.

    Raises:
        SchemeError: the group size does not divide the inputs.
        NumericsError: NaN or infinity in the weight.
    """
    return layer.scheme.round(layer.weight, layer.importance, layer.dtype)


def quantize_rtn(
    weight: Tensor, scheme: Int, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> IntegerWeight:
    """Quantize `weight [O, I]` without calibration, or with `importance [I]` = diag(H) when there is some.

    Args:
        scale_dtype: dtype of stored scales; None is bfloat16.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or importance.
    """
    return scheme.round(weight, importance, scale_dtype)
