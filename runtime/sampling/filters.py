"""Filters over whole distributions, as masks: top-n-sigma, typical-p and XTC.

They need complete rows and few requests use them, so they run row by row before the kernels, which receive the
remaining tokens as a mask and do not truncate further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.core.token_filters import coin
from runtime.sampling.logits_processors import adjust_logits, candidates

NO_FILTERS: dict[str, Any] = {"typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0}
NO_TRUNCATION: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def filter_rows(logits: Tensor, draws: Sequence[SamplingMetadata]) -> Sequence[SamplingMetadata]:
    """Returns the sampling metadata of rows `logits [R, V]` with masks in place of filters and truncation; most are
    unchanged."""
    if not any(is_filtered(draw) for draw in draws):
        return draws
    return [filter_row(row, draw) if is_filtered(draw) else draw for row, draw in zip(logits, draws, strict=True)]


def is_filtered(draw: SamplingMetadata) -> bool:
    """Returns whether filters affect a row: greedy sampling takes the highest logit in any case."""
    return draw.sampling.is_filtered and draw.sampling.temperature > 0


def filter_row(logits: Tensor, draw: SamplingMetadata) -> SamplingMetadata:
    """Applies bias, mask and penalties, top-n-sigma, temperature, typical-p, truncation and XTC to logits `[V]`.

    Returns:
        Metadata with the remaining tokens as its mask; unchanged if the logits are not finite, which the sampler
        reports as an error.
    """
    if not bool(logits.isfinite().all()):
        return draw
    params = draw.sampling
    scores = adjust_logits(logits.unsqueeze(0), [draw])[0].double()
    if params.top_n_sigma > 0:
        scores = forbid(scores, below_sigmas(scores, params.top_n_sigma))
    scores = scores / params.temperature
    if params.typical_p < 1:
        scores = forbid(scores, untypical(scores, params.typical_p))
    if params.is_truncated:
        scores = truncate(scores, params)
    if params.has_xtc and coin(draw.seed, draw.position) < params.xtc_probability:
        scores = forbid(scores, top_choices(scores, params.xtc_threshold))
    allowed = (scores > float("-inf")).cpu().numpy()
    mask = np.packbits(allowed, bitorder="little").tobytes()
    return replace(draw, mask=mask, sampling=replace(params, **NO_FILTERS, **NO_TRUNCATION))


def forbid(scores: Tensor, excluded: Tensor) -> Tensor:
    return scores.masked_fill(excluded, float("-inf"))


def below_sigmas(scores: Tensor, number: float) -> Tensor:
    """Returns tokens more than `number` standard deviations below the highest score, bool `[V]` (arXiv:2411.07641)."""
    spread = scores[scores > float("-inf")].std(correction=0)
    return scores < scores.max() - number * spread


def untypical(scores: Tensor, share: float) -> Tensor:
    """Returns tokens outside the smallest set with this probability mass whose surprise is closest to the entropy, bool
    `[V]` (locally typical sampling, arXiv:2202.00666)."""
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum()
    order = (-logprobs - entropy).abs().argsort(stable=True)
    mass = probabilities[order].cumsum(-1)
    outside = mass - probabilities[order] >= share
    outside[0] = False
    return torch.zeros_like(outside).scatter_(0, order, outside)


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Applies top-k, top-p and min-p to scores `[V]`."""
    top_k = torch.tensor([params.top_k], device=scores.device)
    top_p, min_p = (scores.new_tensor([value]) for value in (params.top_p, params.min_p))
    values, ids = candidates(scores.unsqueeze(0), top_k, top_p, min_p)
    return torch.full_like(scores, float("-inf")).scatter_(0, ids[0], values[0])


def top_choices(scores: Tensor, threshold: float) -> Tensor:
    """Returns tokens at least as likely as the threshold, except the least likely of them, bool `[V]` (XTC)."""
    probabilities = scores.softmax(-1)
    above = (probabilities >= threshold) & (probabilities > 0)
    if int(above.sum()) < 2:
        return torch.zeros_like(above)
    above[probabilities.masked_fill(~above, float("inf")).argmin()] = False
    return above
