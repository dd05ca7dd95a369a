"""AWQ: input channels with large activations are scaled up before rounding, and ranges are clipped where that pays.

Lin et al. 2023, https://arxiv.org/abs/2306.00978: section 3.2 (the scale search) and the released code's clipping.
`W x = (W s)(x / s)`: the factor `1 / s` is folded into whatever produced x (see `folding`), so it costs nothing later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from compress.checkpoint.weights import Scheme, Weight
from compress.methods.base import Layer, Needs, QuantizationMethod, ScaleSearch, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.methods.shared.smoothing import Candidate, SmoothingResult

NUM_RATIOS = 10
CLIP_ROWS = 512
# Errors of queries and keys pass through a softmax, where the least error of the projection is not the best choice.
_UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv")


@register
class AWQ(QuantizationMethod):
    """Activation-aware weight quantization."""

    name: ClassVar[str] = "awq"
    help: ClassVar[str] = "activation-aware scales and clipping"
    is_default: ClassVar[bool] = True
    smooths: ClassVar[bool] = True
    takes_grids: ClassVar[bool] = True
    data: ClassVar[Needs] = Needs(inputs=True, sample_rows=CLIP_ROWS)

    def smoothing_scale(self, search: ScaleSearch, options: Any) -> SmoothingResult:
        return search_smoothing(search, NUM_RATIOS)

    def compress(self, layer: Layer) -> Weight:
        rows = None if any(part in layer.name for part in _UNCLIPPED) else layer.inputs.sample(CLIP_ROWS)
        layer.details["clipped"] = rows is not None
        return quantize_awq(layer.weight, layer.scheme, layer.importance, rows, layer.dtype)


def search_smoothing(search: ScaleSearch, num_ratios: int = 20) -> SmoothingResult:
    """Tries `s = x^r` and `s = x^r / w^(1-r)` over a grid of r, and keeps the identity unless one is better.

    x is the mean magnitude of each input, w the mean over rows of |W| relative to its group's largest. Every second r
    of the grid is tried, then both neighbours of the best: losses change slowly with r. Raises NumericsError: NaN or
    infinity in a weight, the magnitudes or the unsmoothed loss. `num_ratios`: grid points per form.
    """
    from compress.common.device import require_finite
    from compress.methods.shared.smoothing import Candidate, best_scale, share_across_heads

    abs_mean = search.statistics.abs_mean
    require_finite(abs_mean, "the mean input magnitude")
    x = abs_mean.float().clamp(min=float(abs_mean.max()) * 1e-5 + 1e-12)
    w = _relative_magnitude(search.weights, search.group_size)

    def candidate(step: int, duo: bool) -> Candidate:
        ratio = step / num_ratios
        raw = x**ratio / (w ** (1.0 - ratio) + 1e-4) if duo else x**ratio
        return Candidate(ratio, duo, _balanced(share_across_heads(raw, search.heads_per_group, search.head_dim)))

    def neighbours(best: SmoothingResult) -> Iterator[Candidate]:
        middle = round(best.ratio * num_ratios)
        return (candidate(step, duo) for duo, steps in forms for step in (middle - 1, middle + 1) if step in steps)

    # Without x^0, which changes nothing, and without x^1 / w^0, which is x^1.
    forms = (False, range(num_ratios, 0, -1)), (True, range(num_ratios))
    tried = (candidate(step, duo) for duo, steps in forms for step in steps[::2])
    return best_scale(search, tried, refine=neighbours)


def quantize_awq(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    inputs: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Weight:
    """Quantizes an already smoothed `weight [O, I]`, its ranges clipped where that lowers the error of each group's
    share of the output on sample inputs.

    The released code tries ten symmetric limits per group. Here every candidate of the scale search is judged by that
    same error instead: both signs, finer steps, and zero points where there are any. Raises SchemeError: the group size
    does not divide `I`, or the form has no grid; NumericsError: NaN or infinity in weight, importance or inputs.

    Args:
        importance: `[I]`, mean square of the smoothed inputs, which decides where there are no samples.
        inputs: `[T, I]` sample rows, after smoothing; 512 are plenty.
        scale_dtype: dtype of stored scales; None is bfloat16.
    """
    return scheme.grid(weight, importance, scale_dtype, inputs).encode(weight)


def _balanced(raw: Tensor) -> Tensor:
    import torch

    scale = raw / raw.max().sqrt() / raw.min().sqrt()
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def _relative_magnitude(weights: list[Tensor], group_size: int | None) -> Tensor:
    import torch

    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        grouped = weight.float().abs().unflatten(1, (-1, group_size or weight.shape[1]))
        largest = grouped.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total += (grouped / largest).flatten(1).sum(0)
    return total / sum(len(weight) for weight in weights)
