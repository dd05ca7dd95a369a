"""OWL: the sparsity of each transformer block. Free of torch.

OWL (Yin et al. 2023, https://arxiv.org/abs/2310.05175, section 3): a block with more outliers among its weights' scores
`|w| * ||x||` keeps more of them. Shares stay within `spread` (the paper's lambda) of the mean, and the mean stays.
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
    """Options that decide a block's sparsity.

    Attributes:
        factor: a score is an outlier above this many times the mean score of its block (the paper's M).
        spread: most that a block's share may differ from the mean (the paper's lambda).
    """

    factor: float
    spread: float

    def block_ratio(self, layers: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return the share of outliers among Wanda's scores of a block's layers.

        Args:
            layers: weight `[O, I]` and mean square `[I]` of the inputs of each.
        """
        return outlier_ratio([wanda_score(weight, squares) for weight, squares in layers], self.factor)

    def __str__(self) -> str:
        return f"owl M={self.factor:g} ±{self.spread:.1%}"


@dataclass(frozen=True, slots=True)
class BlockShare:
    """The outliers of a block, and the resulting sparsity; with a pattern, also the N:M of the block."""

    block: str
    outlier_ratio: float
    share: float
    pattern: NMSparsity | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the report."""
        return asdict(self) | {"pattern": str(self.pattern) if self.pattern else None}


def block_shares(ratios: Sequence[float], weights: Sequence[int], share: float, spread: float) -> list[float]:
    """Return the sparsity of each block: the fewer outliers, the higher.

    Args:
        ratios: outliers in each block, as a share of its weights.
        weights: number of weights in each block.
        share: mean over all weights; it is kept exactly.
        spread: largest difference of a block from it; the most extreme block reaches it.
    """
    mean = sum(ratio * count for ratio, count in zip(ratios, weights, strict=True)) / sum(weights)
    above = [ratio - mean for ratio in ratios]
    most = max(map(abs, above))
    # Ratios of blocks that are alike differ by rounding alone, which must not become a spread.
    if most <= 1e-9 * abs(mean):
        return [share] * len(ratios)
    return [share - spread * each / most for each in above]


def block_patterns(shares: Sequence[float], pattern: NMSparsity) -> list[NMSparsity]:
    """`kept:of` for each block, nearest to its share, so that together as many are kept as by `pattern` (mixed N:M)."""
    wanted = [(1 - share) * pattern.m for share in shares]
    kept = [math.floor(each) for each in wanted]
    # The largest remainders are rounded up, the earliest first where they are equal.
    order = sorted(range(len(wanted)), key=lambda index: kept[index] - wanted[index])
    for index in order[: max(0, pattern.n * len(wanted) - sum(kept))]:
        kept[index] += 1
    return [NMSparsity(min(max(each, 1), pattern.m - 1), pattern.m) for each in kept]


def outlier_ratio(scores: Sequence[Tensor], factor: float) -> float:
    """Return share of all scores that exceed `factor` times their mean.

    Args:
        scores: of the linears of one block, `[O, I]` each, not negative.
    """
    count = sum(score.numel() for score in scores)
    if not count:
        return 0.0
    mean = sum(float(score.double().sum()) for score in scores) / count
    return sum(int((score > factor * mean).sum()) for score in scores) / count
