"""Logits processors before temperature: bias, grammar mask, penalties, in this order.

All are elementwise within a row and depend on that row's request and history only. Every function overwrites
`scores [R, V]` for the rows that need it; inputs are transferred to the device as a few flat tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from runtime.backends.backend import UNDECIDED, Candidates
from runtime.backends.torch.ops import gumbel_argmax
from runtime.core.batch import (
    SamplingMetadata,
    SamplingTensors,
    penalty_factors,
    to_device,
    upload,
    upload_columns,
)
from runtime.core.logit_bias import LogitBias
from runtime.core.request import NUM_LIKELY


def adjust_logits(logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
    """Returns processed logits `[R, V]` of the same dtype as a new tensor; minus infinity for tokens that a mask
    forbids.

    `logits` is not modified, because log-probabilities refer to the unmodified distribution.
    """
    biased = [row for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    masked = [row for row, draw in enumerate(draws) if draw.mask is not None]
    penalized = [row for row, draw in enumerate(draws) if draw.sampling.has_penalties]
    scores = logits.clone()
    if biased:
        _add_bias(scores, biased, draws)
    if masked:
        _forbid(scores, masked, draws)
    if penalized:
        _penalize(scores, penalized, draws)
    return scores


def _add_bias(scores: Tensor, rows: list[int], draws: Sequence[SamplingMetadata]) -> None:
    row_of, token_ids, values = array("q"), array("q"), array("d")
    for row in rows:
        bias = cast("LogitBias", draws[row].sampling.logit_bias)
        row_of += array("q", (row,)) * len(bias)
        token_ids += bias.token_ids
        values += bias.values
    row_index, column_index, added = upload_columns((row_of, token_ids), (values,), scores.device)
    scores.view(-1).index_add_(0, row_index * scores.shape[-1] + column_index, added.to(scores.dtype))


def _forbid(scores: Tensor, rows: list[int], draws: Sequence[SamplingMetadata]) -> None:
    vocab_size = scores.shape[-1]
    num_bytes = (vocab_size + 7) // 8
    packed = packed_masks([draws[row].mask or b"" for row in rows], num_bytes)
    octets = to_device(torch.frombuffer(packed, dtype=torch.uint8), scores.device)
    octets = octets.view(len(rows), num_bytes, 1)
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=scores.device)).bitwise_and_(1)
    forbidden = bits.view(len(rows), -1)[:, :vocab_size] == 0
    if len(rows) == len(scores):
        scores.masked_fill_(forbidden, float("-inf"))
    else:
        index = upload(rows, scores.device)
        scores.index_copy_(0, index, scores.index_select(0, index).masked_fill_(forbidden, float("-inf")))


def packed_masks(masks: Sequence[bytes], num_bytes: int) -> bytearray:
    """Returns concatenated masks of `num_bytes` each. The model's vocabulary may be padded beyond the ids of a mask:
    padding ids cannot be sampled."""
    return bytearray(b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks))


def _penalize(scores: Tensor, rows: list[int], draws: Sequence[SamplingMetadata]) -> None:
    """Penalizes the logits of tokens in the history; the rest of the vocabulary is unchanged."""
    seen, counts = _count_tokens(scores, rows, draws)
    factors = zip(*(penalty_factors(draws[row].sampling) for row in rows), strict=True)
    columns = [column.to(scores.dtype).unsqueeze(-1) for column in upload_columns((), tuple(factors), scores.device)]
    index = upload(rows, scores.device)
    mine = scores.index_select(0, index)
    scores.index_copy_(0, index, torch.where(seen, penalize(mine, counts, *columns), mine))


def penalize(values: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Returns penalized scores of tokens in the history.

    Args:
        counts: number of occurrences of each token in the output, in the dtype of scores.
    """
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * frequency
    values -= (counts > 0) * presence
    return values


def _count_tokens(scores: Tensor, rows: list[int], draws: Sequence[SamplingMetadata]) -> tuple[Tensor, Tensor]:
    """Returns whether tokens are in the histories of n rows, bool `[n, V]`, and their counts in the outputs. Does not
    synchronize the device."""
    mine, vocab_size = [draws[row] for row in rows], scores.shape[-1]
    histories = [history for draw in mine for history in (draw.prompt_token_ids, draw.output_token_ids)]
    lengths = upload(map(len, histories), scores.device)
    starts = upload(range(0, len(rows) * vocab_size, vocab_size), scores.device)
    is_output = upload([0, 1] * len(rows), scores.device)
    places = upload(chain.from_iterable(histories), scores.device)
    places += starts.repeat_interleave(2).repeat_interleave(lengths, output_size=len(places))
    added = is_output.repeat_interleave(lengths, output_size=len(places))
    if unread := [(number, draw.unread) for number, draw in enumerate(mine) if draw.unread is not None]:
        numbers, tokens = zip(*unread, strict=True)
        last = torch.stack(tokens).clamp_(min=0) + starts.index_select(0, upload(numbers, scores.device))
        places, added = torch.cat((places, last)), torch.cat((added, torch.ones_like(last)))
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=scores.device)
    counts = torch.zeros(len(rows), vocab_size, dtype=torch.int64, device=scores.device)
    seen.view(-1).index_fill_(0, places, True)
    counts.view(-1).index_add_(0, places, added)
    return seen, counts.to(scores.dtype)


NEGLIGIBLE = 80.0
"""Below the highest score: a million such tokens add nothing to a sum, and their exponentials are not denormal."""


def draw_likely(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Tokens `[R]` drawn from logits `[R, V]`, without a look at what the device found: rows whose threshold lies below
    the likely tokens stay undecided."""
    likely, ids, unknown = likely_candidates(tensors.temper(logits), *tensors.limits(logits.dtype))
    return gumbel_argmax(likely, ids, tensors).masked_fill_(unknown, UNDECIDED)


def candidates(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens of every row that may be sampled, best first: scores `[R, K]`, minus infinity for excluded
    tokens, and ids `[R, K]`.

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


def likely_candidates(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Candidates:
    """As `candidates`, among the most likely tokens only; and which rows `[R]` may have candidates other than these."""
    likely, ids = scores.topk(min(NUM_LIKELY, scores.shape[-1]))
    threshold = _threshold(likely, scores, top_k, top_p, min_p)
    # A k-th score beyond the likely tokens is unknown here, and with it the mass that top-p is a share of. But when a
    # grammar forbids the last of them, there is nothing beyond.
    unknown = (threshold <= likely[:, -1:]) | (top_k > likely.shape[-1]).unsqueeze(-1)
    unknown &= likely[:, -1:] > float("-inf")
    if likely.shape[-1] == scores.shape[-1]:
        unknown = torch.zeros_like(unknown)
    return Candidates(likely.masked_fill(likely < threshold, float("-inf")), ids, unknown.squeeze(-1))


def _threshold(likely: Tensor, scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns the lowest score to keep, `[R, 1]`; minus infinity if it is below all of `likely`."""
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
