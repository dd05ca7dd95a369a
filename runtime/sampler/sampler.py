"""From logits to tokens, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.draws import Draw
from runtime.sampler.adjust import adjust_logits
from runtime.sampler.logprobs import token_logprobs
from runtime.sampler.noise import gumbel_noise
from runtime.sampler.truncation import candidates
from runtime.step import SampledToken
from runtime.types import TokenLogprobs

MIN_TEMPERATURE = 1e-20
"""Lower ones are as good as this: logits over it are further apart than noise reaches, and still finite."""
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
NOTHING_ALLOWED = "the grammar allows no token here"


def sample_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per row of logits `[R, V]` (float32 or float64), a pure function of each row and its draw.

    Logit bias, grammar mask, penalties, temperature, top-k, top-p and min-p apply in this order, then noise decides;
    at temperature 0 the highest logit wins (of equal ones the lowest id). A row that is not finite, or whose mask
    allows nothing, gives an error and leaves the others alone.
    """
    scores = adjust_logits(logits, draws)
    errors = _errors(logits, scores)
    good = [row for row, error in enumerate(errors) if not error]
    token_ids = scores.argmax(-1).tolist()
    for truncated in (False, True):
        rows = [row for row in good if _is_random(draws[row], truncated=truncated)]
        if rows:
            drawn = draw_tokens(_rows(scores, rows), [draws[row] for row in rows], truncated=truncated).tolist()
            for row, token_id in zip(rows, drawn, strict=True):
                token_ids[row] = token_id
    logprobs = _logprobs(logits, token_ids, {row: draws[row].sampling.logprobs for row in good})
    return [
        SampledToken(-1, error=error) if error else SampledToken(token_ids[row], logprobs.get(row))
        for row, error in enumerate(errors)
    ]


def draw_tokens(logits: Tensor, draws: Sequence[Draw], *, truncated: bool) -> Tensor:
    """Tokens `[R]` drawn from finite logits `[R, V]` at temperatures above 0, by the Gumbel-max rule.

    Args:
        truncated: apply top-k, top-p and min-p.
    """
    scores, ids = _scores(logits, draws, truncated=truncated)
    seeds, positions = ([draw.seed for draw in draws], [draw.position for draw in draws])
    noise = gumbel_noise(_integers(seeds, logits), _integers(positions, logits), ids)
    winner = noise.add_(scores).argmax(-1, keepdim=True)
    return ids.expand(len(draws), -1).gather(-1, winner).squeeze(-1)


def probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The distributions `[R, V]` that `sample_tokens` draws from, float64; all on one token at temperature 0."""
    adjusted = adjust_logits(logits, draws)
    found = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    found.scatter_(-1, adjusted.argmax(-1, keepdim=True), 1.0)
    for truncated in (False, True):
        rows = [row for row, draw in enumerate(draws) if _is_random(draw, truncated=truncated)]
        if rows:
            scores, ids = _scores(_rows(adjusted, rows), [draws[row] for row in rows], truncated=truncated)
            shares = scores.double().softmax(-1)
            found[rows] = torch.zeros_like(found[rows]).scatter_(-1, ids.expand(len(rows), -1), shares)
    return found


def _scores(logits: Tensor, draws: Sequence[Draw], *, truncated: bool) -> tuple[Tensor, Tensor]:
    """What noise is added to `[R, K]`, minus infinity where a token cannot be drawn, and the ids `[R or 1, K]`."""
    params = [draw.sampling for draw in draws]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)

    scores = logits / column([max(p.temperature, MIN_TEMPERATURE) for p in params]).unsqueeze(-1)
    if truncated:
        top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
        return candidates(scores, _integers([p.top_k for p in params], logits), top_p, min_p)
    return scores, torch.arange(logits.shape[-1], device=logits.device).unsqueeze(0)


def _integers(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _errors(logits: Tensor, scores: Tensor) -> list[str]:
    """Why nothing can be drawn from a row; empty where something can."""
    finite = logits.sum(-1).isfinite().tolist()  # a sum is finite only if all of its terms are
    possible = finite if scores is logits else (scores.amax(-1) > float("-inf")).tolist()
    reasons = zip(finite, possible, strict=True)
    return ["" if good and some else NOTHING_ALLOWED if good else NOT_FINITE for good, some in reasons]


def _logprobs(logits: Tensor, token_ids: list[int], num_top: dict[int, int | None]) -> dict[int, TokenLogprobs]:
    """Of the rows that want them. Rows with equally many alternatives go together: a mate that wants more of them must
    not change how ties are ordered."""
    found: dict[int, TokenLogprobs] = {}
    for number in sorted({number for number in num_top.values() if number is not None}):
        rows = [row for row, wanted in num_top.items() if wanted == number]
        chosen = [token_ids[row] for row in rows]
        found |= zip(rows, token_logprobs(_rows(logits, rows), chosen, number), strict=True)
    return found


def _is_random(draw: Draw, *, truncated: bool) -> bool:
    params = draw.sampling
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0) == truncated


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
