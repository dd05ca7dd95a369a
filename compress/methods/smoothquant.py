"""SmoothQuant: moves activation outliers into the weights, which makes both fit in 8 bits.

Xiao et al. 2022, https://arxiv.org/abs/2211.10438, section 4: `s = max|x|^alpha / max|w|^(1 - alpha)` for each input
channel. The paper uses one alpha per model; here each mapping has its own, chosen by the error of the module's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from compress.checkpoint.weights import Activations, Int, Scheme
from compress.common.cli import option
from compress.methods.base import SMOOTHING_ROWS, Layer, MethodOptions, Needs, QuantizationMethod, ScaleSearch, register

if TYPE_CHECKING:
    from compress.checkpoint.weights import Weight
    from compress.methods.shared.smoothing import Candidate, SmoothingResult

ALPHAS = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
# Channels that are zero in the calibration would get a scale of zero.
_SMALLEST = 1e-5


@dataclass(frozen=True, slots=True)
class SmoothQuantOptions(MethodOptions):
    """Options of SmoothQuant."""

    alpha: float | None = option(
        default=None,
        limits={"at least": 0, "at most": 1},
        help="Exponent for all layers, 0 to 1. Default: searched for each layer.",
    )


@register
class SmoothQuant(QuantizationMethod):
    """SmoothQuant, followed by round to nearest."""

    name: ClassVar[str] = "smoothquant"
    help: ClassVar[str] = "moves activation outliers into the weights, for rounded activations (W8A8, W4A8)"
    Options: ClassVar[type] = SmoothQuantOptions
    smooths: ClassVar[bool] = True
    data: ClassVar[Needs] = Needs(inputs=True, sample_rows=SMOOTHING_ROWS)

    def unsupported(self, scheme: Scheme) -> str:
        return "" if scheme.activation_bits else "it is for rounded activations: set activation_bits: 8"

    def default_scheme(self) -> Scheme:
        return Int(8, None, activations=Activations.INT8)

    def smoothing_scale(self, search: ScaleSearch, options: Any) -> SmoothingResult:
        return search_alpha(search, ALPHAS if options.alpha is None else (options.alpha,), options.alpha is not None)

    def compress(self, layer: Layer) -> Weight:
        return layer.scheme.round(layer.weight, layer.importance, layer.dtype)


def search_alpha(search: ScaleSearch, alphas: Sequence[float] = ALPHAS, insist: bool = False) -> SmoothingResult:
    """Tries every alpha, and keeps the identity unless one is better. Raises NumericsError: a weight, the magnitudes or
    the loss without smoothing contain NaN or infinity. `insist`: whether to fold the best alpha even if the identity is
    better, for an alpha set by the user."""
    import torch

    from compress.common.device import require_finite
    from compress.methods.shared.smoothing import Candidate, best_scale, share_across_heads

    abs_max = search.statistics.abs_max
    require_finite(abs_max, "the largest input magnitude")
    weight_max = torch.stack([weight.float().abs().amax(0) for weight in search.weights]).amax(0)

    def candidates() -> Iterator[Candidate]:
        for alpha in alphas:
            raw = abs_max.float().clamp(min=_SMALLEST) ** alpha / weight_max.clamp(min=_SMALLEST) ** (1 - alpha)
            scale = share_across_heads(raw.clamp(min=_SMALLEST), search.heads_per_group, search.head_dim)
            yield Candidate(alpha, True, scale)

    return best_scale(search, candidates(), insist=insist)
