"""Round to nearest: every weight to its nearest code, under scales chosen for the least squared error."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import LowRank, Scheme
from compress.methods.base import EMBEDDING, HEAD, Layer, QuantizationMethod, register

if TYPE_CHECKING:
    from torch import Tensor

    from compress.checkpoint.weights import Weight
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
        """Round to the nearest values, columns weighted by the mean squares of their inputs."""
        return layer.scheme.round(layer.weight, layer.importance, layer.dtype)

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Round `right [r, I]`, then `left [O, r]` for inputs that are taken as independent."""

        from compress.checkpoint.weights.low_rank import LowRankWeight

        first = layer.integers.round(right, layer.importance, layer.dtype)
        passed = first.dequantize().square()
        between = None if layer.importance is None else passed @ layer.importance
        last = layer.integers.round(left, between, layer.dtype)
        return LowRankWeight(last, first, LowRank(layer.integers, len(right)))
