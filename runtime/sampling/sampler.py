"""Sampler: converts logits to tokens, for all rows of a step at once.

Tokens are sampled on the device of the logits, and one number per row is read back: a GPU is synchronized once, and
inputs are uploaded in one transfer, or one per kind of sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.backends.backend import FORBIDDEN, INFINITE, UNDECIDED, FusedSampling, SamplingKernel
from runtime.backends.registry import choose_sampling
from runtime.backends.torch.ops import argmax, gumbel_argmax
from runtime.core.batch import SamplingMetadata, SamplingTensors, upload, upload_sampling_tensors
from runtime.core.request import LogprobColumns, TokenLogprobs
from runtime.core.step import SampledToken
from runtime.core.token_rules import NOTHING_ALLOWED
from runtime.sampling.filters import filter_rows
from runtime.sampling.logits_processors import adjust_logits, candidates, draw_likely, likely_candidates

ERRORS = {
    INFINITE: "the model's logits are not finite (NaN or infinity)",
    FORBIDDEN: NOTHING_ALLOWED,
}


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of some rows, each with K alternatives; iterating yields pairs of a row and its numbers.

    Attributes:
        chosen: those of the rows' tokens, `[n]`.
        top_ids, top: most likely tokens `[n, K]` and theirs.
    """

    rows: Sequence[int]
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def __iter__(self) -> Iterator[tuple[int, TokenLogprobs]]:
        columns = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        for row, value, ids, values in zip(self.rows, *columns, strict=True):
            yield row, TokenLogprobs(value, tuple(zip(ids, values, strict=True)))


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampler with kernels that are selected once, or plain torch.

    Attributes:
        kernel: kernel for rows in host memory; None without a backend for it.
        fused: kernel for all rows that does not synchronize the device; None without a backend for it.
    """

    kernel: SamplingKernel | None = None
    fused: FusedSampling | None = None

    def __call__(
        self, logits: Tensor, draws: Sequence[SamplingMetadata], drawn: Tensor | None = None
    ) -> list[SampledToken]:
        """Returns one token per row of logits `[R, V]` (float32 or float64), a pure function of each row and its
        metadata.

        Logit bias, grammar mask, penalties, top-n-sigma, temperature, typical-p, top-k, top-p and min-p, and XTC apply
        in this order, then Gumbel noise is added; temperature 0 takes the highest logit (of equal ones the lowest id).
        A row that is not finite, or whose mask allows no token, gives an error and does not affect other rows.

        Args:
            drawn: tokens that the step that computed the logits has already sampled from them, int64 `[R]`.
        """
        if drawn is None:
            draws = filter_rows(logits, draws)
            drawn = self.choose(logits, draws)
        chosen = drawn.tolist()
        _decide(chosen, logits, draws)
        logprobs = dict(chain.from_iterable(self.drawn_logprobs(logits, upload(chosen, logits.device), draws)))
        return [
            SampledToken(token_id, logprobs.get(row)) if token_id >= 0 else SampledToken(-1, error=ERRORS[token_id])
            for row, token_id in enumerate(chosen)
        ]

    def choose(self, logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
        """Returns the token of each row, or an outcome code, int64 `[R]`, without filters. Does not synchronize the
        device."""
        if self.fused is None and self.kernel is not None:
            return self.kernel.sample(logits, draws)
        scores = _processed(logits, draws)
        rows = _random_rows(draws, truncated=True)
        if self.fused is not None:
            chosen = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
            tensors = upload_sampling_tensors(draws, range(len(draws)), logits.device)[1]
            sample_step(self.fused, logits, scores, tensors, bool(rows), chosen)
            return chosen
        chosen = _choose_untruncated(logits, scores, draws)
        if not rows:
            return chosen
        index, tensors = upload_sampling_tensors(draws, rows, logits.device)
        mine = chosen.index_select(0, index)
        return chosen.index_copy_(0, index, torch.where(mine < 0, mine, draw_likely(_rows(scores, index), tensors)))

    def token_logprobs(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Returns log-probabilities of one token per row of raw logits `[R, V]`, and of the `num_top` most likely
        tokens, best first.

        The chosen token has the same value in both results.
        """
        found = self._top_logprobs(logits, upload(token_ids, logits.device), num_top)
        return [logprobs for _, logprobs in RowLogprobs(range(len(token_ids)), *found)]

    def logprob_columns(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> LogprobColumns:
        """Computes `token_logprobs` for many rows."""
        chosen, ids, values = self._top_logprobs(logits, upload(token_ids, logits.device), num_top)
        columns = (array("q", ids.flatten().tolist()), array("d", values.flatten().tolist()))
        return LogprobColumns(ids.shape[-1], array("d", chosen.tolist()), *columns)

    def _top_logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Implements `SamplingKernel.logprobs` for tokens on the device of the logits, without synchronizing it."""
        if self.kernel is not None:
            return self.kernel.logprobs(logits, tokens.tolist(), num_top)
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
        values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
        return chosen.squeeze(-1), ids, values

    def drawn_logprobs(self, logits: Tensor, tokens: Tensor, draws: Sequence[SamplingMetadata]) -> list[RowLogprobs]:
        """Returns the wanted log-probabilities of sampled tokens, int64 `[R]`; anything for outcome codes. Does not
        synchronize the device.

        Rows with the same number of alternatives are computed together: other rows must not change the order of ties.
        """
        found, wanted = [], [draw.sampling.logprobs for draw in draws]
        for number in sorted({number for number in wanted if number is not None}):
            rows = [row for row, each in enumerate(wanted) if each == number]
            index = upload(rows, logits.device)
            chosen = tokens.index_select(0, index).clamp_(min=0)
            found.append(RowLogprobs(rows, *self._top_logprobs(_rows(logits, index), chosen, number)))
        return found


def _choose_untruncated(logits: Tensor, scores: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
    """Implements `Sampler.choose` without truncation.

    Args:
        scores: processed logits, or `logits` itself.
    """
    tokens, finite = argmax(scores)
    if rows := _random_rows(draws, truncated=False):
        index, tensors = upload_sampling_tensors(draws, rows, scores.device)
        ids = torch.arange(scores.shape[-1], device=scores.device).unsqueeze(0)
        tokens.index_copy_(0, index, gumbel_argmax(tensors.temper(_rows(scores, index)), ids, tensors))
    if scores is not logits:
        tokens.masked_fill_(scores.amax(-1) == float("-inf"), FORBIDDEN)
        finite = argmax(logits)[1]
    return tokens.masked_fill_(~finite, INFINITE)


def choose_sampler(device: torch.device, dtype: torch.dtype) -> Sampler:
    """Creates the sampler for logits of a dtype on a device."""
    return Sampler(*choose_sampling(device, dtype))


def sample_tokens(logits: Tensor, draws: Sequence[SamplingMetadata], drawn: Tensor | None = None) -> list[SampledToken]:
    """Samples tokens with a `Sampler` created for these logits."""
    return choose_sampler(logits.device, logits.dtype)(logits, draws, drawn)


class Drawn(NamedTuple):
    """Tokens sampled by a captured step, or outcome codes, int64 `[R]`, and the sampling method."""

    tokens: Tensor
    draws: list[list[SamplingMetadata]]


SampleStep = Callable[[Tensor, Tensor, SamplingTensors, bool, Tensor], None]
"""Implementation of `sample_step` by one kernel."""


def sample_step(
    kernel: FusedSampling, logits: Tensor, scores: Tensor, tensors: SamplingTensors, truncates: bool, tokens: Tensor
) -> None:
    """Writes the token of each row, or an outcome code, to int64 `tokens [R]`.

    Args:
        logits: `[R, V]`.
        scores: processed logits, or `logits` itself.
        truncates: whether some rows have top-k, top-p or min-p.
    """
    if not truncates:
        kernel.sample(logits, scores, tensors, tokens)
        return
    is_truncated = tensors.is_truncated
    greedy = replace(tensors, temperature=tensors.temperature.masked_fill(is_truncated, 0))
    kernel.sample(logits, scores, greedy, tokens)
    likely = likely_candidates(tensors.temper(scores), *tensors.limits(scores.dtype))
    kernel.sample_listed(likely, is_truncated, tensors, tokens)


def draw_tokens(logits: Tensor, draws: Sequence[SamplingMetadata], *, truncated: bool) -> Tensor:
    """Samples tokens `[R]` from finite logits `[R, V]` at temperatures above 0 by the Gumbel-max trick.

    Args:
        truncated: whether to apply top-k, top-p and min-p.
    """
    _, tensors = upload_sampling_tensors(draws, range(len(draws)), logits.device)
    return gumbel_argmax(*_scores(logits, tensors, truncated=truncated), tensors)


def probabilities(logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
    """Returns the distributions `[R, V]` of `sample_tokens` in float64; one-hot at temperature 0."""
    draws = filter_rows(logits, draws)
    adjusted = _processed(logits, draws)
    found = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    found.scatter_(-1, adjusted.argmax(-1, keepdim=True), 1.0)
    for truncated in (False, True):
        rows = _random_rows(draws, truncated=truncated)
        if rows:
            index, tensors = upload_sampling_tensors(draws, rows, logits.device)
            scores, ids = _scores(_rows(adjusted, index), tensors, truncated=truncated)
            shares = scores.double().softmax(-1)
            found[index] = torch.zeros_like(found[index]).scatter_(-1, ids.expand(len(rows), -1), shares)
    return found


def _processed(logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
    """Returns processed logits; `logits` itself if no request changes them."""
    return adjust_logits(logits, draws) if any(draw.changes_logits for draw in draws) else logits


def _decide(chosen: list[int], logits: Tensor, draws: Sequence[SamplingMetadata]) -> None:
    """Samples the undecided rows, which are few."""
    undecided = {row for row, token_id in enumerate(chosen) if token_id == UNDECIDED}
    for truncated in (False, True) if undecided else ():
        rows = [row for row in _random_rows(draws, truncated=truncated) if row in undecided]
        if rows:
            mine = [draws[row] for row in rows]
            scores = _processed(_rows(logits, upload(rows, logits.device)), mine)
            tokens = draw_tokens(scores, mine, truncated=truncated)
            for row, token_id in zip(rows, tokens.tolist(), strict=True):
                chosen[row] = token_id


def _scores(logits: Tensor, tensors: SamplingTensors, *, truncated: bool) -> tuple[Tensor, Tensor]:
    """Returns scores `[R, K]`, minus infinity for excluded tokens, and token ids `[R or 1, K]`."""
    scores = tensors.temper(logits)
    if truncated:
        return candidates(scores, *tensors.limits(scores.dtype))
    return scores, torch.arange(logits.shape[-1], device=logits.device).unsqueeze(0)


def _random_rows(draws: Sequence[SamplingMetadata], *, truncated: bool) -> list[int]:
    """Returns rows with temperature above 0, with or without top-k, top-p or min-p."""
    params = [draw.sampling for draw in draws]
    return [row for row, each in enumerate(params) if each.temperature > 0 and each.is_truncated == truncated]


def _rows(logits: Tensor, index: Tensor) -> Tensor:
    """Selects rows in order; selecting all rows makes no copy."""
    return logits if len(index) == len(logits) else logits.index_select(0, index)
