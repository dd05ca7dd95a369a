"""OWL: sparsity per transformer block. Does not import torch.

OWL (Yin et al. 2023, https://arxiv.org/abs/2310.05175, section 3): a block with more outliers among its scores `|w| *
||x||` keeps more weights. Sparsities stay within `owl_lambda` of the mean, which is preserved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from compress.checkpoint.weights import NMSparsity
from compress.methods.pruning import wanda_score

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_LAMBDA, DEFAULT_M = 0.08, 5.0
"""Lambda is the one that the paper uses throughout."""


@dataclass(frozen=True, slots=True)
class OutlierShares:
    """Options of the allocation of sparsity to blocks."""

    owl_lambda: float
    owl_m: float

    def block_ratio(self, layers: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Returns the share of outliers among Wanda's scores of a block's layers. `layers`: weight `[O, I]` and mean
        square `[I]` of the inputs of each layer."""
        return outlier_ratio([wanda_score(weight, squares) for weight, squares in layers], self.owl_m)

    def __str__(self) -> str:
        return f"owl M={self.owl_m:g} ±{self.owl_lambda:.1%}"


@dataclass(frozen=True, slots=True)
class BlockShare:
    """Outlier ratio and resulting sparsity of a block; with a pattern, also its N:M pattern."""

    block: str
    outlier_ratio: float
    share: float
    pattern: NMSparsity | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for the report."""
        return asdict(self) | {"pattern": str(self.pattern) if self.pattern else None}


def block_shares(ratios: Sequence[float], weights: Sequence[int], share: float, owl_lambda: float) -> list[float]:
    """Returns the sparsity of each block, which decreases with its outlier ratio.

    Args:
        ratios: outliers in each block, as a share of its weights.
        weights: number of weights in each block.
        share: mean sparsity over all weights, preserved exactly.
        owl_lambda: maximum difference of a block from the mean, reached by the most extreme block.
    """
    mean = sum(ratio * count for ratio, count in zip(ratios, weights, strict=True)) / sum(weights)
    above = [ratio - mean for ratio in ratios]
    most = max(map(abs, above))
    # Ratios of equal blocks differ by rounding only, which must not be amplified to `owl_lambda`.
    if most <= 1e-9 * abs(mean):
        return [share] * len(ratios)
    return [share - owl_lambda * each / most for each in above]


def block_patterns(shares: Sequence[float], pattern: NMSparsity) -> list[NMSparsity]:
    """Returns `kept:of` for each block nearest to its sparsity, with the same total of kept weights as `pattern` (mixed
    N:M)."""
    wanted = [(1 - share) * pattern.m for share in shares]
    kept = [math.floor(each) for each in wanted]
    # The largest remainders are rounded up, the earliest first among equal ones.
    order = sorted(range(len(wanted)), key=lambda index: kept[index] - wanted[index])
    for index in order[: max(0, pattern.n * len(wanted) - sum(kept))]:
        kept[index] += 1
    return [NMSparsity(min(max(each, 1), pattern.m - 1), pattern.m) for each in kept]


def outlier_ratio(scores: Sequence[Tensor], owl_m: float) -> float:
    """Returns the share of scores above `owl_m` times their mean."""
    count = sum(score.numel() for score in scores)
    if not count:
        return 0.0
    mean = sum(float(score.double().sum()) for score in scores) / count
    return sum(int((score > owl_m * mean).sum()) for score in scores) / count
