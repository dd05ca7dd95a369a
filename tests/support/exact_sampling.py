"""Exact distributions of sampled tokens by their definitions, and the distance of samples from them."""

import math

import torch
from torch import Tensor

from runtime.core.batch import SamplingMetadata


def exact_distribution(row: Tensor, draw: SamplingMetadata) -> Tensor:
    """Probabilities float64 `[V]` of one draw from raw logits `[V]` without ties, token by token."""
    params, scores = draw.sampling, exact_scores(row, draw)
    p = (scores / params.temperature).softmax(0)
    order = p.argsort(descending=True)
    keep = order[: params.top_k] if params.top_k else order
    mass = (p[keep] / p[keep].sum()).cumsum(0)
    keep = keep[: int((mass < params.top_p).sum()) + 1]
    keep = keep[p[keep] >= params.min_p * p.max()]
    result = torch.zeros_like(p)
    result[keep] = p[keep] / p[keep].sum()
    return result


def exact_scores(row: Tensor, draw: SamplingMetadata) -> Tensor:
    """Logits float64 `[V]` with bias, mask and penalties."""
    params, scores = draw.sampling, row.double().tolist()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    if draw.mask is not None:
        allowed = [draw.mask[token // 8] >> token % 8 & 1 for token in range(len(scores))]
        scores = [score if allow else -math.inf for score, allow in zip(scores, allowed, strict=True)]
    output = list(draw.output_token_ids)
    for token_id in {*draw.prompt_token_ids, *output}:
        score = scores[token_id]
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        count = output.count(token_id)
        scores[token_id] = score - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    return torch.tensor(scores, dtype=torch.float64)


def pack_mask(allowed: list[int], vocab_size: int) -> bytes:
    """A mask that allows these token ids."""
    mask = bytearray((vocab_size + 7) // 8)
    for token_id in allowed:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def chi_square(tokens: list[int], probabilities: Tensor) -> float:
    """Distance from the expected counts in standard deviations of chi-square."""
    expected = probabilities * len(tokens)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)
