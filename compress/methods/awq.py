"""AWQ: input channels with large activations are scaled up before rounding, and ranges are clipped where that pays.

Lin et al. 2023, https://arxiv.org/abs/2306.00978: section 3.2 (the scale search) and the released recipe's clipping.
`W x = (W s)(x / s)`: the factor `1 / s` is folded into whatever produced x (see `folding`), so it costs nothing later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.errors import NumericsError
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scheme import Scheme
from compress.methods.folding import share_across_heads
from compress.methods.numerics import require_finite
from compress.methods.scales import GroupScales, encode, range_scales, search_scales

# Limits tried by the clip search, as shares of each group's largest magnitude.
_CLIP_SHARES = tuple(1.0 - 0.05 * step for step in range(1, 10))
_CLIP_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class SmoothingResult:
    """The best scale of one smoothing edge.

    Attributes:
        scale: `[I]` float32, ones when nothing beat the identity.
        ratio: the exponent of the input magnitudes; 0 for the identity.
        duo: whether the weights' own magnitudes took part.
        loss_before: loss of plain quantization.
        loss_after: loss under `scale`; never above `loss_before`.
    """

    scale: Tensor
    ratio: float
    duo: bool
    loss_before: float
    loss_after: float


def search_smoothing(
    weights: list[Tensor],
    abs_mean: Tensor,
    quantize: Callable[[Tensor], Tensor],
    loss: Callable[[list[Tensor]], float],
    num_ratios: int = 20,
    *,
    group_size: int | None = None,
    heads_per_group: int = 1,
    head_dim: int = 1,
) -> SmoothingResult:
    """Tries `s = x^r` and `s = x^r / w^(1-r)` over a grid of r, and keeps the identity unless one is better.

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
    require_finite(abs_mean, "the mean input magnitude")
    loss_before = loss([quantize(weight) for weight in weights])
    if not loss_before < float("inf"):
        raise NumericsError(f"the output error before smoothing is {loss_before}", "Check the source checkpoint")
    best = SmoothingResult(torch.ones_like(abs_mean, dtype=torch.float32), 0.0, False, loss_before, loss_before)
    magnitude = _relative_magnitude(weights, group_size)
    for ratio, duo, raw in _raw_scales(abs_mean.float(), magnitude, num_ratios):
        scale = _balanced(share_across_heads(raw, heads_per_group, head_dim))
        current = loss([quantize(weight * scale).float() / scale for weight in weights])
        if current < best.loss_after:
            best = SmoothingResult(scale, ratio, duo, loss_before, current)
    return best


def search_clip(weight: Tensor, inputs: Tensor, scheme: Scheme) -> Tensor:
    """Symmetric limits `[O, G]` on each group's weights that give the least error of the group's own output.

    The caller leaves out query and key projections, whose errors pass through a softmax.

    Args:
        weight: `[O, I]`, after smoothing.
        inputs: `[T, I]` sample rows, after smoothing.
        scheme: how the weight will be quantized.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or inputs.
    """
    groups = scheme.num_groups(weight.shape[1])
    require_finite(inputs, "the sample inputs")
    basis = _error_basis(inputs, groups)
    rows = max(1, _CLIP_CHUNK_ELEMENTS // weight.shape[1])
    return torch.cat([_clip_rows(chunk.float(), basis, scheme) for chunk in weight.split(rows)])


def quantize_awq(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    clip: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> IntegerWeight:
    """Quantizes an already smoothed `weight [O, I]`: within clip limits `[O, G]` where given, else under the scale
    search weighted by `importance [I]`, the mean square of the smoothed inputs.

    Raises:
        SchemeError: the group size does not divide `I`.
        NumericsError: NaN or infinity in weight or importance.
    """
    if clip is None:
        return encode(weight, search_scales(weight, scheme, importance, scale_dtype), scheme)
    return _within(weight, clip, scheme, scale_dtype)


def _within(weight: Tensor, clip: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> IntegerWeight:
    limit = clip.float().unsqueeze(-1)
    clipped = weight.float().unflatten(1, (clip.shape[1], -1)).clamp(-limit, limit).flatten(1)
    scales: GroupScales = range_scales(clipped, scheme, scale_dtype)
    return encode(clipped, scales, scheme)


def _raw_scales(abs_mean: Tensor, magnitude: Tensor, num_ratios: int) -> Iterator[tuple[float, bool, Tensor]]:
    x = abs_mean.clamp(min=float(abs_mean.max()) * 1e-5 + 1e-12)
    for step in range(num_ratios):
        ratio = (step + 1) / num_ratios
        yield ratio, False, x**ratio
        ratio = step / num_ratios
        yield ratio, True, x**ratio / (magnitude ** (1.0 - ratio) + 1e-4)


def _balanced(raw: Tensor) -> Tensor:
    scale = raw / (raw.max() * raw.min()).sqrt()
    return torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))


def _relative_magnitude(weights: list[Tensor], group_size: int | None) -> Tensor:
    total = torch.zeros(weights[0].shape[1], device=weights[0].device)
    for weight in weights:
        grouped = weight.float().abs().unflatten(1, (-1, group_size or weight.shape[1]))
        largest = grouped.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total += (grouped / largest).flatten(1).sum(0)
    return total / sum(len(weight) for weight in weights)


def _error_basis(inputs: Tensor, groups: int) -> Tensor:
    """`[G, k, g]` rows whose Gram matrix is that of the inputs, group by group: the same errors from at most g rows."""
    grouped = inputs.float().unflatten(1, (groups, -1)).transpose(0, 1)
    return torch.linalg.qr(grouped, mode="r").R


def _clip_rows(rows: Tensor, basis: Tensor, scheme: Scheme) -> Tensor:
    groups = basis.shape[0]
    largest = rows.unflatten(1, (groups, -1)).abs().amax(-1)
    best, least = largest.clone(), _output_error(rows, largest, basis, scheme)
    for share in _CLIP_SHARES:
        limit = largest * share
        error = _output_error(rows, limit, basis, scheme)
        best = torch.where(error < least, limit, best)
        least = torch.minimum(error, least)
    return best


def _output_error(rows: Tensor, limit: Tensor, basis: Tensor, scheme: Scheme) -> Tensor:
    """`[R, G]`: squared error of each group's share of each output."""
    change = _within(rows, limit, scheme, torch.bfloat16).dequantize() - rows
    change = change.unflatten(1, (basis.shape[0], -1)).transpose(0, 1)
    return (change @ basis.transpose(1, 2)).square().sum(-1).T
