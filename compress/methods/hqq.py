"""HQQ: scales and zero points from nothing but the weights, by half-quadratic splitting of an outlier-robust norm.

Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". The error `sum |w - q|^p` with p < 1
is split into `|e|^p + beta/2 (w - q - e)^2`: e, the outlier part of the error, has a closed form (generalized soft
thresholding), and given e the zero point is a mean. There are two differences to the paper. Zero points are stored as
integers, and a mean of rounding errors rarely moves one by a whole step, so the scale is refitted too (for symmetric
codes, only the scale). And errors are measured in steps of the grid, which makes `beta` independent of the group's
range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import Int
from compress.methods.base import Layer, QuantizationMethod, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.weights.coded import CodedWeight


@register
class HQQ(QuantizationMethod):
    """Half-quadratic quantization."""

    name: ClassVar[str] = "hqq"
    help: ClassVar[str] = "half-quadratic quantization, without calibration"

    def compress(self, layer: Layer) -> CodedWeight:
        return quantize_hqq(layer.weight, layer.integers, layer.dtype)


@dataclass(frozen=True, slots=True)
class Splitting:
    """Constants of the half-quadratic splitting.

    Attributes:
        exponent: p of the norm, 0 < p <= 1.
        beta: initial weight of the quadratic part: errors above `beta ** (-1 / (2 - p))` steps count as outliers.
        growth: factor on beta in each iteration.
    """

    exponent: float = 0.7
    beta: float = 1.0
    growth: float = 1.05
    iterations: int = 20


def quantize_hqq(
    weight: Tensor, scheme: Int, scale_dtype: torch.dtype | None = None, options: Splitting = Splitting()
) -> CodedWeight:
    """Quantizes `weight [O, I]` without calibration.

    Iterations start from the scales of round to nearest, and each group keeps its best state: in `norm_error` the
    result is never worse than round to nearest. Raises SchemeError: the group size does not divide `I`; NumericsError:
    NaN or infinity in the weight. `scale_dtype`: dtype of stored scales; None is bfloat16.
    """
    import torch

    from compress.checkpoint.scale_search import GroupScales, encode, search_scales

    dtype = scale_dtype or torch.bfloat16
    start = search_scales(weight, scheme, None, dtype)
    rows = weight.float().unflatten(1, (start.scales.shape[1], -1))
    best = _Groups(rows, scheme, dtype, options)
    best.improve(start.scales.float().unsqueeze(-1), start.zero_points.float().unsqueeze(-1))
    scales = GroupScales(best.scale.squeeze(-1).to(dtype), best.zero.squeeze(-1).to(torch.uint8))
    return encode(weight, scales, scheme)


def norm_error(change: Tensor, exponent: float) -> Tensor:
    """Returns `sum |change|^p` over the last dimension `[..., g]`, kept as `[..., 1]`."""
    return change.abs().pow(exponent).sum(-1, keepdim=True)


class _Groups:
    """Groups `[O, G, g]` with the best scale and zero point `[O, G, 1]` of each."""

    def __init__(self, rows: Tensor, scheme: Int, scale_dtype: torch.dtype, options: Splitting) -> None:
        self._rows, self._scheme, self._dtype, self._options = rows, scheme, scale_dtype, options
        self.scale = self.zero = rows.new_zeros(*rows.shape[:2], 1)
        self._error = self.scale.new_full(self.scale.shape, float("inf"))

    def improve(self, scale: Tensor, zero: Tensor) -> None:
        beta = self._options.beta
        for _ in range(self._options.iterations):
            scale, zero = self._next(scale, zero, self._consider(scale, zero), beta)
            beta *= self._options.growth
        self._consider(scale, zero)

    def _consider(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Returns the rounded groups, and stores those that are the best so far."""
        import torch

        from compress.checkpoint.scale_search import round_to_grid

        rounded = round_to_grid(self._rows, scale, zero, self._scheme, torch.empty_like(self._rows))
        error = norm_error(rounded - self._rows, self._options.exponent)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        return rounded

    def _next(self, scale: Tensor, zero: Tensor, rounded: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        """Returns the best zero point, then the best scale, for these codes without outliers."""
        import torch

        from compress.checkpoint.scale_search import storable

        outliers = _shrink((self._rows - rounded) / scale, self._options.exponent, beta) * scale
        wanted = self._rows - outliers
        codes = rounded / scale + zero
        if not self._scheme.symmetric:
            zero = (codes - wanted / scale).mean(-1, keepdim=True).round_().clamp_(0, self._scheme.max_code)
        offsets = codes - zero
        fitted = (offsets * wanted).sum(-1, keepdim=True) / offsets.square().sum(-1, keepdim=True).clamp(min=1)
        # The fitted scale can be zero (a group of zeros), which cannot be stored.
        return storable(torch.where(fitted == 0, scale, fitted), self._dtype), zero


def _shrink(errors: Tensor, exponent: float, beta: float) -> Tensor:
    """Applies generalized soft thresholding: the e that minimizes `|e|^p + beta/2 (errors - e)^2`, to first order."""
    import torch

    magnitude = errors.abs()
    excess = magnitude - magnitude.clamp(min=torch.finfo(magnitude.dtype).tiny).pow(exponent - 1) / beta
    return errors.sign() * excess.clamp_(min=0)
