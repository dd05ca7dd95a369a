"""Search for the smoothing scale between the producer of an activation and the linears that read it.

`W x = (W s)(x / s)`: the factor `1 / s` is folded into the producer of x (see `folding`), so it is free at run time.
AWQ and SmoothQuant differ in their candidate scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.common.errors import NumericsError
from compress.methods.base import ScaleSearch


@dataclass(frozen=True, slots=True)
class SmoothingResult:
    """Best scale of one smoothing mapping.

    Attributes:
        scale: `[I]` float32, ones if the identity is best.
        ratio: exponent of the input magnitudes; 0 for the identity.
        duo: whether the magnitudes of the weights are included.
    """

    scale: Tensor
    ratio: float
    duo: bool
    loss_before: float
    loss_after: float

    @property
    def applies(self) -> bool:
        """Whether the scale differs from the identity."""
        return self.ratio != 0 or self.duo


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate scale `[I]` with its exponent."""

    ratio: float
    duo: bool
    scale: Tensor


def best_scale(
    search: ScaleSearch,
    candidates: Iterable[Candidate],
    *,
    insist: bool = False,
    refine: Callable[[SmoothingResult], Iterable[Candidate]] = lambda _best: (),
) -> SmoothingResult:
    """Evaluates every candidate and the identity by the loss of quantized weights. Raises NumericsError: the loss
    without smoothing is NaN or infinite.

    Args:
        insist: whether to take the best candidate even if the identity is better.
        refine: function from the best candidate so far to further ones.
    """
    weights, quantize, loss = search.weights, search.quantize, search.loss
    identity = torch.ones(weights[0].shape[1], device=weights[0].device)
    loss_before = loss([quantize(weight) for weight in weights], identity)
    if not loss_before < float("inf"):
        raise NumericsError(f"the output error before smoothing is {loss_before}", "Check the source checkpoint")

    def better(best: SmoothingResult, limit: float, tried: Iterable[Candidate]) -> SmoothingResult:
        for each in tried:
            current = loss([quantize(weight * each.scale).float().div_(each.scale) for weight in weights], each.scale)
            if current < limit:
                limit = current
                best = SmoothingResult(each.scale, each.ratio, each.duo, loss_before, current)
        return best

    unsmoothed = SmoothingResult(identity, 0.0, False, loss_before, loss_before)
    best = better(unsmoothed, float("inf") if insist else loss_before, candidates)
    return better(best, best.loss_after, refine(best))


def scale_norm(norm: Tensor, scale: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Divides a norm's weight `[I]`, stored relative to `offset`, by `scale [I]`.

    Returns the weight in its own dtype, and the scale that this rounded weight inverts exactly, for the linears that
    read it.
    """
    whole = norm.float() + offset
    divided = (whole / scale - offset).to(norm.dtype)
    undone = whole / (divided.float() + offset)
    return divided, torch.where(torch.isfinite(undone) & (undone > 0), undone, scale)


def scale_outputs(weight: Tensor, scale: Tensor) -> Tensor:
    """Divides the outputs of a linear, its `weight [O, I]` or `bias [O]`, by `scale [O]`; preserves the dtype."""
    divisor = scale.unsqueeze(-1) if weight.dim() == 2 else scale
    return (weight.float() / divisor).to(weight.dtype)


def scale_inputs(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiplies the columns of `weight [O, I]` by `scale [I]`; preserves the dtype."""
    return (weight.float() * scale).to(weight.dtype)


def share_across_heads(scale: Tensor, heads_per_group: int, head_dim: int) -> Tensor:
    """Ties the scale of o_proj's input `[query_heads * head_dim]` across query heads of one key-value head.

    With grouped queries, v_proj's output channel d of a key-value head feeds channel d of all its query heads, so
    these can only share one factor: their geometric mean. The fold is then exact for any grouping; with one query
    head each nothing changes.
    """
    if heads_per_group == 1:
        return scale
    heads = scale.view(-1, heads_per_group, head_dim)
    return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)


def one_per_value_head(scale: Tensor, heads_per_group: int, head_dim: int) -> Tensor:
    """Returns the tied scale `[query_heads * head_dim]` for v_proj's outputs, `[value_heads * head_dim]`."""
    return scale.view(-1, heads_per_group, head_dim)[:, 0].reshape(-1)
