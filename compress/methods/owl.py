"""OWL: sparsity per transformer block. Does not import torch.

OWL (Yin et al. 2023, https://arxiv.org/abs/2310.05175, section 3): a block with more outliers among its scores `|w| *
||x||` keeps more weights. Sparsities stay within `spread` (the paper's lambda) of the mean, which is preserved.
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


@dataclass(frozen=True, slots=True)
class OutlierShares:
    """Options of the allocation of sparsity to blocks.

    Attributes:
        factor: ratio to the block's mean score above which a score is an outlier (the paper's M).
        spread: maximum difference of a block's sparsity from the mean (the paper's lambda).
    """

    factor: float
    spread: float

    def block_ratio(self, layers: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Returns the share of outliers among Wanda's scores of a block's layers.

        Args:
            layers: weight `[O, I]` and mean square `[I]` of the inputs of each layer.
        """
        return outlier_ratio([wanda_score(weight, squares) for weight, squares in layers], self.factor)

    def __str__(self) -> str:
        return f"owl M={self.factor:g} ±{self.spread:.1%}"


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


def block_shares(ratios: Sequence[float], weights: Sequence[int], share: float, spread: float) -> list[float]:
    """Returns the sparsity of each block, which decreases with its outlier ratio.

    Args:
        ratios: outliers in each block, as a share of its weights.
        weights: number of weights in each block.
        share: mean sparsity over all weights, preserved exactly.
        spread: maximum difference of a block from the mean, reached by the most extreme block.
    """
    mean = sum(ratio * count for ratio, count in zip(ratios, weights, strict=True)) / sum(weights)
    above = [ratio - mean for ratio in ratios]
    most = max(map(abs, above))
    # Ratios of equal blocks differ by rounding only, which must not be amplified to the spread.
    if most <= 1e-9 * abs(mean):
        return [share] * len(ratios)
    return [share - spread * each / most for each in above]


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


def outlier_ratio(scores: Sequence[Tensor], factor: float) -> float:
    """Returns the share of scores above `factor` times their mean.

    Args:
        scores: nonnegative scores of the linears of one block, `[O, I]` each.
    """
    count = sum(score.numel() for score in scores)
    if not count:
        return 0.0
    mean = sum(float(score.double().sum()) for score in scores) / count
    return sum(int((score > factor * mean).sum()) for score in scores) / count
