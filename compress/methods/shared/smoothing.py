"""The search for one scale between what produces an activation and the linears that read it.

`W x = (W s)(x / s)`: the factor `1 / s` is folded into whatever produced x (see `folding`), so it costs nothing later.
AWQ and SmoothQuant differ in which scales they try.
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
    """The best scale of one smoothing mapping.

    Attributes:
        scale: `[I]` float32, ones when nothing beat the identity.
        ratio: the exponent of the input magnitudes; 0 for the identity.
        duo: whether the weights' own magnitudes took part.
        loss_before: loss of plain quantization.
        loss_after: loss under `scale`.
    """

    scale: Tensor
    ratio: float
    duo: bool
    loss_before: float
    loss_after: float

    @property
    def applies(self) -> bool:
        """Whether there is something to fold."""
        return self.ratio != 0 or self.duo


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scale `[I]` to try, and the exponent it came from."""

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
    """Judges every candidate and the identity by the loss of quantized weights.

    Args:
        insist: take the best candidate even where the identity is better.
        refine: further candidates, from the best so far.

    Raises:
        NumericsError: NaN or infinity in the unsmoothed loss.
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
    """Divides a norm's weight `[I]`, which counts from `offset`, by `scale [I]`.

    Returns the weight in its own dtype, and the scale this rounded weight undoes exactly: the one for the readers.
    """
    whole = norm.float() + offset
    divided = (whole / scale - offset).to(norm.dtype)
    undone = whole / (divided.float() + offset)
    return divided, torch.where(torch.isfinite(undone) & (undone > 0), undone, scale)


def scale_outputs(weight: Tensor, scale: Tensor) -> Tensor:
    """Divides the outputs of a linear, its `weight [O, I]` or `bias [O]`, by `scale [O]`; same dtype out."""
    divisor = scale.unsqueeze(-1) if weight.dim() == 2 else scale
    return (weight.float() / divisor).to(weight.dtype)


def scale_inputs(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiplies the columns of `weight [O, I]` by `scale [I]`; same dtype out."""
    return (weight.float() * scale).to(weight.dtype)


def share_across_heads(scale: Tensor, heads_per_group: int, head_dim: int) -> Tensor:
    """Ties the scale of o_proj's input `[query_heads * head_dim]` across query heads that read one key-value head.

    With grouped queries, v_proj's output channel d of a key-value head feeds channel d of all its query heads, so
    these can only share one factor: their geometric mean. The fold is then exact for any grouping; with one query
    head each nothing changes.
    """
    if heads_per_group == 1:
        return scale
    heads = scale.view(-1, heads_per_group, head_dim)
    return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)


def one_per_value_head(scale: Tensor, heads_per_group: int, head_dim: int) -> Tensor:
    """Return the tied scale `[query_heads * head_dim]` as v_proj sees it: `[value_heads * head_dim]`."""
    return scale.view(-1, heads_per_group, head_dim)[:, 0].reshape(-1)
