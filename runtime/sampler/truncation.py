"""Top-k, top-p and min-p as one threshold per row: tokens whose score lies below it cannot be drawn.

A threshold keeps or drops equal scores together, so the result never depends on how a sort orders ties (16-bit
logits tie often). Each filter sees what the ones before it left: top-k, then top-p, then min-p.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncation_threshold(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Lowest score that may be drawn, `[R, 1]`.

    Args:
        scores: logits over temperature `[R, V]`.
        top_k: int64 `[R]`; keeps the k highest; 0 is off.
        top_p: `[R]`; keeps the highest tokens until their mass reaches p; 1 is off.
        min_p: `[R]`; keeps tokens at least p times as likely as the most likely; 0 is off.
    """
    threshold = scores.amax(-1, keepdim=True) + min_p.unsqueeze(-1).log()
    if bool(((top_k > 0) | (top_p < 1)).any()):
        descending = scores.sort(-1, descending=True).values
        kth = _top_k_threshold(descending, top_k)
        nucleus = _top_p_threshold(descending.masked_fill(descending < kth, float("-inf")), top_p)
        threshold = torch.maximum(threshold, torch.maximum(kth, nucleus))
    return threshold


def _top_k_threshold(descending: Tensor, top_k: Tensor) -> Tensor:
    size = descending.shape[-1]
    last = torch.where(top_k > 0, top_k.clamp(max=size), size) - 1
    return descending.gather(-1, last.unsqueeze(-1))


def _top_p_threshold(descending: Tensor, top_p: Tensor) -> Tensor:
    probabilities = descending.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    outside = mass_before >= top_p.unsqueeze(-1)
    outside[:, 0] = False
    lowest = descending.masked_fill(outside, float("inf")).amin(-1, keepdim=True)
    return torch.where(top_p.unsqueeze(-1) < 1, lowest, float("-inf"))
