"""From logits to tokens, for all rows of a step at once.

Everything is decided where the logits are. What is read back is one number per row: a GPU waits once, and what the host
sends there goes in one transfer for each way of drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.draws import Draw
from runtime.sampler.adjust import adjust_logits
from runtime.sampler.logprobs import token_logprobs
from runtime.sampler.native import find_peaks, find_winners, is_native
from runtime.sampler.noise import gumbel_noise
from runtime.sampler.truncation import candidates, likely_candidates
from runtime.step import SampledToken
from runtime.types import TokenLogprobs
from runtime.upload import upload, upload_columns

MIN_TEMPERATURE = 1e-20
"""Lower ones are as good as this: logits over it are further apart than noise reaches, and still finite."""
INFINITE, FORBIDDEN, UNDECIDED = -1, -2, -3
"""Instead of a token: nothing can be drawn, or the likely tokens alone do not say which one it is."""
ERRORS = {
    INFINITE: "the model's logits are not finite (NaN or infinity)",
    FORBIDDEN: "the grammar allows no token here",
}


def sample_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per row of logits `[R, V]` (float32 or float64), a pure function of each row and its draw.

    Logit bias, grammar mask, penalties, temperature, top-k, top-p and min-p apply in this order, then noise decides;
    at temperature 0 the highest logit wins (of equal ones the lowest id). A row that is not finite, or whose mask
    allows nothing, gives an error and leaves the others alone.
    """
    scores = adjust_logits(logits, draws)
    chosen = _choose(logits, scores, draws).tolist()
    undecided = [row for row, token_id in enumerate(chosen) if token_id == UNDECIDED]
    if undecided:
        drawn = draw_tokens(_rows(scores, undecided), [draws[row] for row in undecided], truncated=True).tolist()
        for row, token_id in zip(undecided, drawn, strict=True):
            chosen[row] = token_id
    wanted = {row: draws[row].sampling.logprobs for row, token_id in enumerate(chosen) if token_id >= 0}
    logprobs = _logprobs(logits, chosen, wanted)
    return [
        SampledToken(token_id, logprobs.get(row)) if token_id >= 0 else SampledToken(-1, error=ERRORS[token_id])
        for row, token_id in enumerate(chosen)
    ]


def draw_tokens(logits: Tensor, draws: Sequence[Draw], *, truncated: bool) -> Tensor:
    """Tokens `[R]` drawn from finite logits `[R, V]` at temperatures above 0, by the Gumbel-max rule.

    Args:
        truncated: apply top-k, top-p and min-p.
    """
    wishes = _upload_wishes(draws, logits.device)
    return _loudest(*_scores(logits, wishes, truncated=truncated), wishes)


def probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The distributions `[R, V]` that `sample_tokens` draws from, float64; all on one token at temperature 0."""
    adjusted = adjust_logits(logits, draws)
    found = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    found.scatter_(-1, adjusted.argmax(-1, keepdim=True), 1.0)
    for truncated in (False, True):
        rows = _random_rows(draws, truncated=truncated)
        if rows:
            wishes = _upload_wishes([draws[row] for row in rows], logits.device)
            scores, ids = _scores(_rows(adjusted, rows), wishes, truncated=truncated)
            shares = scores.double().softmax(-1)
            found[rows] = torch.zeros_like(found[rows]).scatter_(-1, ids.expand(len(rows), -1), shares)
    return found


@dataclass(frozen=True, slots=True)
class _Wishes:
    """How rows want to be drawn, on the device, `[R]` each: int64, then float64."""

    seeds: Tensor
    positions: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor


def _upload_wishes(draws: Sequence[Draw], device: torch.device) -> _Wishes:
    params = [draw.sampling for draw in draws]
    integers = [draw.seed for draw in draws], [draw.position for draw in draws], [each.top_k for each in params]
    temperature = [max(each.temperature, MIN_TEMPERATURE) for each in params]
    floats = temperature, [each.top_p for each in params], [each.min_p for each in params]
    return _Wishes(*upload_columns(integers, floats, device))


def _choose(logits: Tensor, scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 `[R]`: the token of each row, or what stands in place of one.

    Args:
        scores: the logits as requests want them.
    """
    chosen, finite = _peaks(scores)
    for truncated in (False, True):
        rows = _random_rows(draws, truncated=truncated)
        if len(rows) == len(draws):
            chosen = _draw_likely(scores, draws, truncated=truncated)
        elif rows:
            index = upload(rows, logits.device)
            mine = [draws[row] for row in rows]
            chosen.index_copy_(0, index, _draw_likely(scores.index_select(0, index), mine, truncated=truncated))
    if scores is not logits:
        chosen.masked_fill_(scores.amax(-1) == float("-inf"), FORBIDDEN)
        finite = _peaks(logits)[1]
    return chosen.masked_fill_(~finite, INFINITE)


def _peaks(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the highest scores of each row, int64 `[R]`, and whether all of the row are finite, bool `[R]`."""
    if is_native(scores):
        return find_peaks(scores)
    return scores.argmax(-1), scores.sum(-1).isfinite()  # a sum is finite only if all of its terms are


def _draw_likely(scores: Tensor, draws: Sequence[Draw], *, truncated: bool) -> Tensor:
    """As `draw_tokens`, but without a look at what the device found: rows whose threshold lies below the likely tokens
    stay undecided."""
    wishes = _upload_wishes(draws, scores.device)
    tempered, limits = _tempered(scores, wishes)
    if not truncated:
        return _winners(tempered, wishes)
    likely, ids, unknown = likely_candidates(tempered, *limits)
    return _loudest(likely, ids, wishes).masked_fill_(unknown, UNDECIDED)


def _winners(scores: Tensor, wishes: _Wishes) -> Tensor:
    """The id `[R]` with the highest sum of score `[R, V]` and noise, of all tokens."""
    ids = torch.arange(scores.shape[-1], device=scores.device).unsqueeze(0)
    if not is_native(scores):
        return _loudest(scores, ids, wishes)
    winners = find_winners(scores, wishes.seeds, wishes.positions)
    for row in (winners < 0).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        noise = gumbel_noise(wishes.seeds[one], wishes.positions[one], ids)
        winners[one] = noise.add_(scores[one]).argmax(-1)
    return winners


def _loudest(scores: Tensor, ids: Tensor, wishes: _Wishes) -> Tensor:
    """The id `[R]` with the highest sum of score `[R, K]` and noise; `ids [R or 1, K]`."""
    winner = gumbel_noise(wishes.seeds, wishes.positions, ids).add_(scores).argmax(-1, keepdim=True)
    return ids.expand(len(scores), -1).gather(-1, winner).squeeze(-1)


def _scores(logits: Tensor, wishes: _Wishes, *, truncated: bool) -> tuple[Tensor, Tensor]:
    """What noise is added to `[R, K]`, minus infinity where a token cannot be drawn, and the ids `[R or 1, K]`."""
    scores, limits = _tempered(logits, wishes)
    if truncated:
        return candidates(scores, *limits)
    return scores, torch.arange(logits.shape[-1], device=logits.device).unsqueeze(0)


def _tempered(logits: Tensor, wishes: _Wishes) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Logits over temperature, and the limits that top-k, top-p and min-p set."""
    temperature, top_p, min_p = (each.to(logits.dtype) for each in (wishes.temperature, wishes.top_p, wishes.min_p))
    return logits / temperature.unsqueeze(-1), (wishes.top_k, top_p, min_p)


def _logprobs(logits: Tensor, token_ids: list[int], num_top: dict[int, int | None]) -> dict[int, TokenLogprobs]:
    """Of the rows that want them. Rows with equally many alternatives go together: a mate that wants more of them must
    not change how ties are ordered."""
    found: dict[int, TokenLogprobs] = {}
    for number in sorted({number for number in num_top.values() if number is not None}):
        rows = [row for row, wanted in num_top.items() if wanted == number]
        chosen = [token_ids[row] for row in rows]
        found |= zip(rows, token_logprobs(_rows(logits, rows), chosen, number), strict=True)
    return found


def _random_rows(draws: Sequence[Draw], *, truncated: bool) -> list[int]:
    """Rows whose draws are random, with or without top-k, top-p or min-p."""
    return [
        row
        for row, params in enumerate(draw.sampling for draw in draws)
        if params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0) == truncated
    ]


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits.index_select(0, upload(rows, logits.device))
