"""Which guesses hold, by rejection: the other exact way, for drafters that draw with noise of their own.

A guess `x ~ q` is accepted with probability `min(1, p(x) / q(x))`; where it is not, the token is drawn from what `p`
has more than `q`, `(p - q)+`. Both together draw exactly from the target's distribution `p` (Leviathan, Kalman,
Matias: Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, section 2.3 and appendix A.1).
`p` and `q` are what the sampler draws from: after bias, mask, penalties, temperature and truncation. Guesses without
a known `q` (n-grams, greedy ones) are certain: `q(x) = 1`.

A seed gives the same tokens again only when the same tokens are guessed; verification by match knows no such limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.draws import Draw, build_draws
from runtime.sampler.logprobs import token_logprobs
from runtime.sampler.noise import gumbel_noise
from runtime.sampler.sampler import probabilities, sample_tokens
from runtime.types import SampledToken, ScheduledSequence

ACCEPTANCE_NOISE = 0x2545F4914F6CDD1D
"""Changes a seed into the one whose noise decides about acceptance."""

Proposals = dict[tuple[str, int], Tensor]
"""Distributions `q [V]` that guesses were drawn from, by sequence id and position, for one step."""


class ProposalSampler:
    """Draws a draft model's guesses and keeps the distributions they come from."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def __call__(self, entries: Sequence[ScheduledSequence], logits: Tensor) -> dict[str, list[SampledToken]]:
        draws = [build_draws(entry)[0] for entry in entries]
        for entry, draw, row in zip(entries, draws, probabilities(logits, draws), strict=True):
            self._proposals[entry.sequence.id, draw.position] = row
        drawn = sample_tokens(logits, draws)
        return {entry.sequence.id: [token] for entry, token in zip(entries, drawn, strict=True)}


class RejectionSampler:
    """Draws what follows each sequence and verifies its draft by rejection.

    Args:
        proposals: of the guesses to verify; emptied by each call.
    """

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def __call__(self, entries: Sequence[ScheduledSequence], logits: Tensor) -> dict[str, list[SampledToken]]:
        """Tokens by sequence id, of `1 + num_draft_tokens` rows of logits `[R, V]` per entry, in order."""
        draws = [build_draws(entry) for entry in entries]
        flat = [draw for group in draws for draw in group]
        sizes = [len(group) for group in draws]
        rows = zip(logits.split(sizes), probabilities(logits, flat).split(sizes), strict=True)
        drawn = iter(sample_tokens(logits, flat))
        tokens = {
            entry.sequence.id: self._verify(entry, group, [next(drawn) for _ in group], *parts)
            for entry, group, parts in zip(entries, draws, rows, strict=True)
        }
        self._proposals.clear()
        return tokens

    def _verify(
        self, entry: ScheduledSequence, draws: list[Draw], drawn: list[SampledToken], logits: Tensor, target: Tensor
    ) -> list[SampledToken]:
        tokens: list[SampledToken] = []
        for index, guess in enumerate(entry.sequence.draft_token_ids[: entry.num_draft_tokens]):
            if drawn[index].error:
                return [*tokens, drawn[index]]
            draw, p = draws[index], target[index]
            q = self._proposals.get((entry.sequence.id, draw.position))
            if q is None:
                q = torch.zeros_like(p).index_fill_(0, torch.tensor(guess, device=p.device), 1.0)
            accepted = _uniform(draw) * float(q[guess]) < float(p[guess])
            token_id = guess if accepted else _draw_rest(p, q, draw)
            tokens.append(_token(logits[index], token_id, draw))
            if not accepted:
                return tokens
        return [*tokens, drawn[-1]]


def _uniform(draw: Draw) -> float:
    """Between 0 and 1, independent of the noise that tokens are drawn with."""
    return math.exp(-math.exp(-float(_noise(draw.seed ^ ACCEPTANCE_NOISE, draw.position, 1))))


def _draw_rest(p: Tensor, q: Tensor, draw: Draw) -> int:
    """A token from `(p - q)+`, normalized. Nothing is left only when rounding made a sure guess fail; then from `p`."""
    rest = (p - q).clamp_(min=0)
    weights = rest if bool(rest.any()) else p
    return int((weights.log() + _noise(draw.seed, draw.position, len(p)).to(p.device)).argmax())


def _noise(seed: int, position: int, count: int) -> Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.arange(count))[0]


def _token(logits: Tensor, token_id: int, draw: Draw) -> SampledToken:
    wanted = draw.sampling.logprobs
    if wanted is None:
        return SampledToken(token_id)
    return SampledToken(token_id, token_logprobs(logits.unsqueeze(0), [token_id], wanted)[0])
