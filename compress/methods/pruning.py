"""Pruning criteria: scores from weights and inputs, and the resulting masks.

* magnitude: `|w|`, over the whole layer.
* Wanda (Sun et al. 2023, https://arxiv.org/abs/2306.11695, section 3): `|w| * ||x||`, compared within each output.
* RIA (Zhang et al. 2024, https://openreview.net/forum?id=Tr0lPx9woF, section 3): `|w|` relative to the sums of its row
  and of its column, times `||x|| ** 0.5`, over the whole layer.

SparseGPT selects weights inside its column loop: see `sparsegpt`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import NMSparsity, Scheme
from compress.methods.base import Layer, Needs, Pruned, PruningMethod, register

if TYPE_CHECKING:
    from torch import Tensor


class MaskingMethod(PruningMethod):
    """Method that removes the weights with the lowest scores and keeps all others unchanged."""

    per_output: ClassVar[bool] = False

    @abstractmethod
    def score(self, weight: Tensor, mean_square: Tensor | None) -> Tensor:
        """Returns the score of each weight, float32 `[O, I]`; only their order matters. Raises NumericsError: weight or
        inputs contain NaN or infinity; ValueError: inputs are required but missing. `mean_square`: `[I]`, mean square
        of each input; None without calibration."""

    def prune(self, layer: Layer, pattern: NMSparsity | None, sparsity: float, joint: Scheme | None) -> Pruned:
        score = self.score(layer.weight, layer.importance)
        kept = keep(score, pattern, sparsity, per_output=self.per_output)
        return Pruned(layer.weight.masked_fill(~kept, 0.0), kept)


@register
class Magnitude(MaskingMethod):
    """Pruning by magnitude."""

    name: ClassVar[str] = "magnitude"
    help: ClassVar[str] = "smallest weights, without calibration"
    is_fallback: ClassVar[bool] = True

    def score(self, weight: Tensor, mean_square: Tensor | None) -> Tensor:
        return _sizes(weight)


@register
class Wanda(MaskingMethod):
    """Wanda."""

    name: ClassVar[str] = "wanda"
    order: ClassVar[int] = 1
    help: ClassVar[str] = "smallest weights times input norms, within each output"
    per_output: ClassVar[bool] = True
    data: ClassVar[Needs] = Needs(inputs=True)

    def score(self, weight: Tensor, mean_square: Tensor | None) -> Tensor:
        return wanda_score(weight, mean_square)


@register
class RIA(MaskingMethod):
    """RIA."""

    name: ClassVar[str] = "ria"
    order: ClassVar[int] = 2
    help: ClassVar[str] = "weights relative to their row and column, times input norms"
    data: ClassVar[Needs] = Needs(inputs=True)

    def score(self, weight: Tensor, mean_square: Tensor | None) -> Tensor:
        import torch

        size = _sizes(weight)
        tiny = torch.finfo(torch.float32).tiny
        rows, columns = (size.sum(dim, keepdim=True).clamp(min=tiny) for dim in (1, 0))
        return (size / rows + size / columns) * _norms(mean_square, size).sqrt()


def wanda_score(weight: Tensor, mean_square: Tensor | None) -> Tensor:
    """Returns `|w| * ||x||`, float32 `[O, I]`; see `MaskingMethod.score`."""
    size = _sizes(weight)
    return size * _norms(mean_square, size)


def _sizes(weight: Tensor) -> Tensor:
    from compress.common.device import require_finite

    require_finite(weight, "the weight")
    return weight.float().abs()


def _norms(mean_square: Tensor | None, size: Tensor) -> Tensor:
    """Returns the root mean square of each input `[I]`, on the device of `size`."""
    from compress.common.device import require_finite

    if mean_square is None:
        raise ValueError("the inputs' mean squares are needed")
    require_finite(mean_square, "the mean square of the inputs")
    return mean_square.to(size.device).float().sqrt()


def keep(score: Tensor, pattern: NMSparsity | None, share: float, *, per_output: bool) -> Tensor:
    """Returns the mask of the weights that a pattern or, without one, a `share` to remove keeps, bool `[O, I]`."""
    return keep_pattern(score, pattern) if pattern else keep_share(score, share, per_output=per_output)


def keep_pattern(score: Tensor, sparsity: NMSparsity) -> Tensor:
    """Returns the mask of the `kept` highest scores of every `of` consecutive ones in a row, bool `[O, I]`; of equal
    scores the first."""
    import torch

    grouped = score.unflatten(1, (-1, sparsity.m))
    order = grouped.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(grouped, dtype=torch.bool)
    return kept.scatter_(-1, order[..., : sparsity.n], True).flatten(1)


def keep_share(score: Tensor, share: float, *, per_output: bool) -> Tensor:
    """Returns the mask that removes a `share` of the weights (rounded to whole weights) with the lowest scores, bool
    `[O, I]`."""
    import torch

    rows = score if per_output else score.reshape(1, -1)
    num_gone = round(rows.shape[1] * share)
    order = rows.argsort(dim=1, stable=True)
    kept = torch.ones_like(rows, dtype=torch.bool)
    return kept.scatter_(1, order[:, :num_gone], False).view(score.shape)
