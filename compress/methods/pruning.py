"""Which weights of a layer may go: scores from weights and inputs, and the masks they lead to.

* magnitude: `|w|`, over the whole layer.
* Wanda (Sun et al. 2023, https://arxiv.org/abs/2306.11695, section 3): `|w| * ||x||`, compared within each output.
* RIA (Zhang et al. 2024, https://openreview.net/forum?id=Tr0lPx9woF, section 3): `|w|` relative to the sums of its row
  and of its column, times `||x|| ** 0.5`, over the whole layer.

SparseGPT chooses while it makes up for what is gone: see `gptq`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Sparsity
from compress.common.device import require_finite

PER_OUTPUT = frozenset({"wanda"})
"""Methods that compare weights within an output; the others compare those of the whole layer."""


def scores(method: str, weight: Tensor, mean_square: Tensor | None) -> Tensor:
    """How much each weight matters, float32 `[O, I]`; only the order counts.

    Args:
        method: magnitude, wanda or ria.
        weight: `[O, I]`.
        mean_square: `[I]`, mean square of each input; magnitude needs none.

    Raises:
        NumericsError: NaN or infinity in weight or inputs.
        ValueError: a method that needs inputs got none.
    """
    require_finite(weight, "the weight")
    size = weight.float().abs()
    if method == "magnitude":
        return size
    if mean_square is None:
        raise ValueError(f"{method} needs the inputs' mean squares")
    require_finite(mean_square, "the mean square of the inputs")
    norm = mean_square.to(size.device).float().sqrt()
    if method == "wanda":
        return size * norm
    tiny = torch.finfo(torch.float32).tiny
    relative = size / size.sum(1, keepdim=True).clamp(min=tiny) + size / size.sum(0, keepdim=True).clamp(min=tiny)
    return relative * norm.sqrt()


def keep_pattern(score: Tensor, sparsity: Sparsity) -> Tensor:
    """Bool `[O, I]`: the `kept` highest scores of every `of` neighbours in a row; of equal ones the first."""
    grouped = score.unflatten(1, (-1, sparsity.of))
    order = grouped.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(grouped, dtype=torch.bool)
    return kept.scatter_(-1, order[..., : sparsity.kept], True).flatten(1)


def keep_share(score: Tensor, share: float, *, per_output: bool) -> Tensor:
    """Bool `[O, I]`: all but the lowest scores, so that `share` of them (rounded to whole weights) are gone.

    Args:
        per_output: within each row rather than over the whole matrix.
    """
    rows = score if per_output else score.reshape(1, -1)
    num_gone = round(rows.shape[1] * share)
    order = rows.argsort(dim=1, stable=True)
    kept = torch.ones_like(rows, dtype=torch.bool)
    return kept.scatter_(1, order[:, :num_gone], False).view(score.shape)
