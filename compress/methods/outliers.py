"""How unevenly a block's scores are spread (OWL, Yin et al. 2023, https://arxiv.org/abs/2310.05175, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def outlier_ratio(scores: Sequence[Tensor], factor: float) -> float:
    """Share of all scores that exceed `factor` times their mean.

    Args:
        scores: of the linears of one block, `[O, I]` each, not negative.
    """
    count = sum(score.numel() for score in scores)
    if not count:
        return 0.0
    mean = sum(float(score.double().sum()) for score in scores) / count
    return sum(int((score > factor * mean).sum()) for score in scores) / count
