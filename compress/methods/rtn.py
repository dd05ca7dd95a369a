"""Round to nearest: rounds every weight to its nearest code, with scales of least squared error."""

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
        """Rounds to the nearest values, with columns weighted by the mean squares of their inputs."""
        return layer.scheme.round(layer.weight, layer.importance, layer.dtype)

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Rounds `right [r, I]`, then `left [O, r]` under the assumption of independent inputs."""

        from compress.checkpoint.weights.low_rank import LowRankWeight

        first = layer.integers.round(right, layer.importance, layer.dtype)
        passed = first.dequantize().square()
        between = None if layer.importance is None else passed @ layer.importance
        last = layer.integers.round(left, between, layer.dtype)
        return LowRankWeight(last, first, LowRank(layer.integers, len(right)))
