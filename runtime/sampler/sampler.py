"""From logits to tokens, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.draws import Draw
from runtime.sampler.noise import gumbel_noise
from runtime.sampler.truncation import candidates
from runtime.types import SampledToken, SamplingParams, TokenLogprobs

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


def sample_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per row of logits `[R, V]` (float32 or float64), a pure function of each row and its draw.

    Temperature 0 takes the most likely token (of equal ones the lowest id); otherwise temperature, top-k, top-p and
    min-p apply in this order. A row that is not finite gives an error and leaves the others alone.
    """
    finite = logits.sum(-1).isfinite().tolist()  # a sum is finite only if all of its terms are
    token_ids = logits.argmax(-1).tolist()
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and finite[row]]
    for truncated in (False, True):
        rows = [row for row in random if _truncates(draws[row].sampling) == truncated]
        if rows:
            drawn = draw_tokens(_rows(logits, rows), [draws[row] for row in rows], truncated=truncated).tolist()
            for row, token_id in zip(rows, drawn, strict=True):
                token_ids[row] = token_id
    logprobs = {
        row: token_logprobs(logits[row], token_ids[row], draw.sampling.logprobs)
        for row, draw in enumerate(draws)
        if draw.sampling.logprobs is not None and finite[row]
    }
    return [
        SampledToken(token_id, logprobs.get(row)) if finite[row] else SampledToken(-1, error=NOT_FINITE)
        for row, token_id in enumerate(token_ids)
    ]


def draw_tokens(logits: Tensor, draws: Sequence[Draw], *, truncated: bool) -> Tensor:
    """Tokens `[R]` drawn from finite logits `[R, V]` at temperatures above 0, by the Gumbel-max rule.

    Args:
        truncated: apply top-k, top-p and min-p.
    """
    params = [draw.sampling for draw in draws]
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=device)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    scores = logits / column([p.temperature for p in params]).unsqueeze(-1)
    ids = torch.arange(logits.shape[-1], device=device).unsqueeze(0)
    if truncated:
        top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
        scores, ids = candidates(scores, integers([p.top_k for p in params]), top_p, min_p)
    noise = gumbel_noise(integers([d.seed for d in draws]), integers([d.position for d in draws]), ids)
    winner = noise.add_(scores).argmax(-1, keepdim=True)
    return ids.expand(len(draws), -1).gather(-1, winner).squeeze(-1)


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability of a token and of the `num_top` most likely ones, from one row of raw logits `[V]`."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
