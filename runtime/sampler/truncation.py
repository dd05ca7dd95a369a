"""Top-k, top-p and min-p as one threshold per row: tokens whose score lies below it cannot be drawn.

A threshold keeps or drops equal scores together, so the result never depends on how a sort orders ties (16-bit
logits tie often). Each filter sees what the ones before it left: top-k, then top-p, then min-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.sampler.outcomes import UNDECIDED
from runtime.sampler.wishes import Wishes

NUM_LIKELY = 128
"""Tokens that are sorted first. Only when a row's threshold lies below them is the whole vocabulary sorted."""
NEGLIGIBLE = 80.0
"""Below the highest score: a million such tokens add nothing to a sum, and their exponentials are no denormals."""


def draw_likely(logits: Tensor, wishes: Wishes) -> Tensor:
    """Tokens `[R]` drawn from logits `[R, V]`, without a look at what the device found: rows whose threshold lies below
    the likely tokens stay undecided."""
    likely, ids, unknown = likely_candidates(wishes.noise.temper(logits), *wishes.limits(logits.dtype))
    return wishes.noise.loudest(likely, ids).masked_fill_(unknown, UNDECIDED)


def candidates(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """The likely tokens of every row, best first: scores `[R, K]`, minus infinity where a token cannot be drawn, and
    their ids `[R, K]`.

    Args:
        scores: logits over temperature `[R, V]`.
        top_k: int64 `[R]`; keeps the k highest; 0 is off.
        top_p: `[R]`; keeps the highest tokens until their mass reaches p; 1 is off.
        min_p: `[R]`; keeps tokens at least p times as likely as the most likely; 0 is off.
    """
    likely, ids, unknown = likely_candidates(scores, top_k, top_p, min_p)
    if not bool(unknown.any()):
        return likely, ids
    ordered, ids = scores.sort(-1, descending=True)
    return ordered.masked_fill(ordered < _threshold(ordered, scores, top_k, top_p, min_p), float("-inf")), ids


def likely_candidates(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `candidates`, among the most likely tokens only; and for which rows `[R]` there are others beside them."""
    likely, ids = scores.topk(min(NUM_LIKELY, scores.shape[-1]))
    threshold = _threshold(likely, scores, top_k, top_p, min_p)
    # A k-th score beyond the likely tokens is unknown here, and with it the mass that top-p is a share of. But when a
    # grammar forbids the last of them, there is nothing beyond.
    unknown = (threshold <= likely[:, -1:]) | (top_k > likely.shape[-1]).unsqueeze(-1)
    unknown &= likely[:, -1:] > float("-inf")
    if likely.shape[-1] == scores.shape[-1]:
        unknown = torch.zeros_like(unknown)
    return likely.masked_fill(likely < threshold, float("-inf")), ids, unknown.squeeze(-1)


def _threshold(likely: Tensor, scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Lowest score that may be drawn `[R, 1]`; minus infinity when it lies below all of `likely`."""
    kth = _top_k_threshold(likely, top_k.unsqueeze(-1))
    nucleus = _top_p_threshold(likely, scores, kth, top_p.unsqueeze(-1))
    return torch.maximum(torch.maximum(kth, nucleus), likely[:, :1] + min_p.unsqueeze(-1).log())


def _top_k_threshold(likely: Tensor, top_k: Tensor) -> Tensor:
    num_likely = likely.shape[-1]
    kth = likely.gather(-1, top_k.clamp(1, num_likely) - 1)
    return kth.masked_fill((top_k == 0) | (top_k > num_likely), float("-inf"))


def _top_p_threshold(likely: Tensor, scores: Tensor, kth: Tensor, top_p: Tensor) -> Tensor:
    # Instead of minus infinity, whose exponential is many times slower on CPUs: too little to change a sum.
    floor = likely[:, :1] - NEGLIGIBLE
    total = torch.where(scores < torch.maximum(kth, floor), floor, scores).logsumexp(-1, keepdim=True)
    probabilities = (likely - total).exp().masked_fill_(likely < kth, 0.0)
    mass = probabilities.cumsum(-1)
    outside = mass - probabilities >= top_p
    outside[:, 0] = False
    lowest = likely.masked_fill(outside, float("inf")).amin(-1, keepdim=True)
    reached = (mass[:, -1:] >= top_p) & (top_p < 1)
    return lowest.masked_fill(~reached, float("-inf"))
