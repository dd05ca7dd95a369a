"""The search for one scale between what produces an activation and the linears that read it.

`W x = (W s)(x / s)`: the factor `1 / s` is folded into whatever produced x (see `folding`), so it costs nothing later.
AWQ and SmoothQuant differ in which scales they try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.errors import NumericsError

Loss = Callable[[list[Tensor], Tensor], float]
"""Error of the parent module's output with these weights, given the original inputs; and the scale `[I]` under which
inputs would be quantized."""


@dataclass(frozen=True, slots=True)
class SmoothingResult:
    """The best scale of one smoothing edge.

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
    weights: list[Tensor],
    candidates: Iterable[Candidate],
    quantize: Callable[[Tensor], Tensor],
    loss: Loss,
    *,
    insist: bool = False,
    refine: Callable[[SmoothingResult], Iterable[Candidate]] = lambda _best: (),
) -> SmoothingResult:
    """Judges every candidate and the identity by the loss of quantized weights.

    Args:
        weights: the linears `[O_k, I]` that read the smoothed input.
        quantize: fake quantization of one weight, same shape out.
        insist: take the best candidate even where the identity is better.
        refine: further candidates, from the best so far.

    Raises:
        NumericsError: NaN or infinity in the unsmoothed loss.
    """
    identity = torch.ones(weights[0].shape[1], device=weights[0].device)
    loss_before = loss([quantize(weight) for weight in weights], identity)
    if not loss_before < float("inf"):
        raise NumericsError(f"the output error before smoothing is {loss_before}", "Check the source checkpoint")

    def better(best: SmoothingResult, limit: float, tried: Iterable[Candidate]) -> SmoothingResult:
        for each in tried:
            current = loss([quantize(weight * each.scale).float() / each.scale for weight in weights], each.scale)
            if current < limit:
                limit = current
                best = SmoothingResult(each.scale, each.ratio, each.duo, loss_before, current)
        return best

    unsmoothed = SmoothingResult(identity, 0.0, False, loss_before, loss_before)
    best = better(unsmoothed, float("inf") if insist else loss_before, candidates)
    return better(best, best.loss_after, refine(best))
