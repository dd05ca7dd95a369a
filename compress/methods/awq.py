"""AWQ: input channels with large activations are scaled up before rounding, and ranges are clipped where that pays.

Lin et al. 2023, https://arxiv.org/abs/2306.00978: section 3.2 (the scale search) and the released code's clipping.
`W x = (W s)(x / s)`: the factor `1 / s` is folded into whatever produced x (see `folding`), so it costs nothing later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from compress.checkpoint.weights import Int
from compress.methods.base import Layer, Needs, QuantizationMethod, ScaleSearch, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.scale_search import GroupScales
    from compress.checkpoint.weights.integer import IntegerWeight
    from compress.methods.shared.smoothing import Candidate, Loss, SmoothingResult

NUM_RATIOS = 10
CLIP_ROWS = 512
# Errors of queries and keys pass through a softmax, where the least error of the projection is not the best choice.
_UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv")


@register
class AWQ(QuantizationMethod):
    """Activation-aware weight quantization."""

    name: ClassVar[str] = "awq"
    help: ClassVar[str] = "activation-aware scales and clipping"
    smooths: ClassVar[bool] = True

    def needs(self, options: Any) -> Needs:
        return Needs(inputs=True, sample_rows=CLIP_ROWS)

    def smoothing_scale(self, search: ScaleSearch, options: Any) -> SmoothingResult:
        return search_smoothing(
            search.weights,
            search.statistics.abs_mean,
            search.quantize,
            search.loss,
            NUM_RATIOS,
            group_size=search.group_size,
            heads_per_group=search.heads_per_group,
            head_dim=search.head_dim,
        )

    def compress(self, layer: Layer) -> IntegerWeight:
        rows = None if any(part in layer.name for part in _UNCLIPPED) else layer.inputs.sample(CLIP_ROWS)
        clip = None if rows is None else search_clip(layer.weight, rows, layer.integers, layer.dtype)
        layer.details["clipped"] = clip is not None
        return quantize_awq(layer.weight, layer.integers, layer.importance, clip, layer.dtype)


def search_smoothing(
    weights: list[Tensor],
    abs_mean: Tensor,
    quantize: Callable[[Tensor], Tensor],
    loss: Loss,
    num_ratios: int = 20,
    *,
    group_size: int | None = None,
    heads_per_group: int = 1,
    head_dim: int = 1,
) -> SmoothingResult:
    """Tries `s = x^r` and `s = x^r / w^(1-r)` over a grid of r, and keeps the identity unless one is better.

    Every second r of the grid is tried, then both neighbours of the best: losses change slowly with r.

    Args:
        weights: the linears `[O_k, I]` that read the smoothed input.
        abs_mean: `[I]`, mean magnitude x of that input.
        quantize: fake quantization of one weight, same shape out.
        loss: error of the parent module's output with these weights, given the original inputs.
        num_ratios: grid points per form.
        group_size: columns per scale, for w: the mean over rows of |W| relative to its group's largest.
        heads_per_group: query heads that share a key-value head, for the input of o_proj; their scales are tied.
        head_dim: channels per head, with `heads_per_group`.

    Raises:
        NumericsError: NaN or infinity in a weight, the magnitudes or the unsmoothed loss.
    """
    from compress.common.device import require_finite
    from compress.methods.shared.smoothing import Candidate, best_scale, share_across_heads

    require_finite(abs_mean, "the mean input magnitude")
    x = abs_mean.float().clamp(min=float(abs_mean.max()) * 1e-5 + 1e-12)
    w = _relative_magnitude(weights, group_size)

    def candidate(step: int, duo: bool) -> Candidate:
        ratio = step / num_ratios
        raw = x**ratio / (w ** (1.0 - ratio) + 1e-4) if duo else x**ratio
        return Candidate(ratio, duo, _balanced(share_across_heads(raw, heads_per_group, head_dim)))

    def neighbours(best: SmoothingResult) -> Iterator[Candidate]:
        middle = round(best.ratio * num_ratios)
        return (candidate(step, duo) for duo, steps in forms for step in (middle - 1, middle + 1) if step in steps)

    # Without x^0, which changes nothing, and without x^1 / w^0, which is x^1.
    forms = (False, range(num_ratios, 0, -1)), (True, range(num_ratios))
    tried = (candidate(step, duo) for duo, steps in forms for step in steps[::2])
    return best_scale(weights, tried, quantize, loss, refine=neighbours)


def search_clip(
    weight: Tensor,
    inputs: Tensor,
    scheme: Int,
    scale_dtype: torch.dtype | None = None,
) -> GroupScales:
    """Return each group's range, clipped where that lowers the error of the group's share of the output on real inputs.

    The released code tries ten symmetric limits per group. Here every candidate of the scale search is judged by
    that same error instead: both signs, finer steps, and zero points where there are any.

    Args:
        weight: `[O, I]`, after smoothing.
        inputs: `[T, I]` sample rows, after smoothing; 512 are plenty.
        scheme: how the weight will be quantized.
        scale_dtype: dtype of stored scales; None is bfloat16.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or inputs.
    """
    import torch

    from compress.checkpoint.scale_search import search_scales

    return search_scales(weight, scheme, None, scale_dtype or torch.bfloat16, inputs=inputs)


def quantize_awq(
    weight: Tensor,
    scheme: Int,
    importance: Tensor | None = None,
    clip: GroupScales | None = None,
    scale_dtype: torch.dtype | None = None,
) -> IntegerWeight:
    """Quantizes an already smoothed `weight [O, I]`: in the ranges of `search_clip` where given, else under the scale
    search weighted by `importance [I]`, the mean square of the smoothed inputs.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or importance.
    """
    import torch

    from compress.checkpoint.scale_search import encode, search_scales

    return encode(weight, clip or search_scales(weight, scheme, importance, scale_dtype or torch.bfloat16), scheme)


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
