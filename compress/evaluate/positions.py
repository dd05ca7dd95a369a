"""Two distributions of the next token compared position by position, and the figures that sum them up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.common.errors import CheckpointError
from compress.common.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Log-probabilities of the most likely tokens and of the actual one, which are all that a server reports.

    Attributes:
        tokens: int64 `[B, T, K]`, none of them twice; -1 where fewer are known.
        logp: float64 `[B, T, K]`; -inf there.
    """

    tokens: Tensor
    logp: Tensor

    def __getitem__(self, places: tuple[slice, slice]) -> TopTokens:
        return TopTokens(self.tokens[places], self.logp[places])

    def gather(self, tokens: Tensor) -> Tensor:
        """Returns log-probabilities of `tokens` `[B, T, N]`; -inf for those that are not known."""
        found = (tokens.unsqueeze(-1) == self.tokens.unsqueeze(-2)) & (tokens.unsqueeze(-1) >= 0)
        return self.logp.unsqueeze(-2).where(found, -math.inf).amax(-1)

    def argmax(self) -> Tensor:
        """Returns the most likely token `[B, T]`."""
        return self.tokens.gather(-1, self.logp.argmax(-1, keepdim=True)).squeeze(-1)


Distribution = Tensor | TopTokens
"""Log-probabilities of all tokens `[B, T, V]`, or of some."""

_ABSENT = -1e4
"""Logarithm of a probability that is 0 in float64, and whose difference from itself is 0."""
_LEAST_REST = 1e-7
"""Probability of all other tokens at least: rounded log-probabilities say no less."""


def on_common_events(reference: Distribution, model: Distribution) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of the same events under both: of every token, or of those that both know and of all
    others as one event. KL over such events is a lower bound, and the sum of min(p, q) an upper one."""
    if isinstance(reference, Tensor) and isinstance(model, Tensor):
        return reference, model
    tokens = next(side.tokens for side in (reference, model) if isinstance(side, TopTokens))
    sides = [_of_tokens(side, tokens) for side in (reference, model)]
    known = torch.isfinite(sides[0]) & torch.isfinite(sides[1])
    first, second = (_with_rest(side.where(known, _ABSENT)) for side in sides)
    return first, second


def _of_tokens(distribution: Distribution, tokens: Tensor) -> Tensor:
    if isinstance(distribution, TopTokens):
        return distribution.gather(tokens)
    if (largest := int(tokens.max())) >= distribution.shape[-1]:
        problem = f"the server knows token {largest}, and the model has {distribution.shape[-1]} tokens"
        raise CheckpointError(problem, "Compare it with a model that has the same tokenizer")
    found = distribution.gather(-1, tokens.clamp(min=0).to(distribution.device))
    return found.double().cpu().where(tokens >= 0, -math.inf)


def _with_rest(logp: Tensor) -> Tensor:
    rest = (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat((logp, rest.log()), -1)


class Positions(NamedTuple):
    """Figures of every predicted position of some windows, each `[N, T-1]` float64 on the CPU.

    Attributes:
        losses, baseline_losses: negative log-likelihood of the actual token, in nats.
        divergence: KL(baseline || model), in nats.
        agreement: 1 where both rank the same token first, else 0.
        acceptance: sum over tokens of min(p, q).
    """

    losses: Tensor
    baseline_losses: Tensor
    divergence: Tensor
    agreement: Tensor
    acceptance: Tensor


def compare_positions(
    model: Distribution, reference: Distribution | None, following: Tensor, known: int | None = None
) -> Positions:
    """Compares T positions of a model with those of its baseline; None compares it with itself. Raises
    CheckpointError when vocabularies differ.

    Args:
        following: int64 `[B, T]`, the actual tokens.
        known: number of tokens that the tokenizer has; more than these only pad a vocabulary.
    """
    if reference is None:
        losses, zero = _losses(model, following), torch.zeros(following.shape, dtype=torch.float64)
        return Positions(losses, losses, zero, zero + 1, zero + 1)
    model, reference = _without_padding(model, reference, known)
    p, q = on_common_events(reference, model)
    probability = p.exp()
    return Positions(
        losses=_losses(model, following),
        baseline_losses=_losses(reference, following),
        divergence=(probability * (p - q)).sum(-1, dtype=torch.float64).cpu(),
        agreement=(_first(reference) == _first(model)).double(),
        acceptance=torch.minimum(probability, q.exp()).sum(-1, dtype=torch.float64).cpu(),
    )


def _without_padding(
    model: Distribution, reference: Distribution, known: int | None
) -> tuple[Distribution, Distribution]:
    """Returns both on the tokens that both have, on one device. Raises CheckpointError: they differ by others than
    those that pad a vocabulary."""
    if isinstance(model, TopTokens) or isinstance(reference, TopTokens):
        return model, reference
    reference, sizes = reference.to(model.device), (model.shape[-1], reference.shape[-1])
    if sizes[0] == sizes[1]:
        return model, reference
    if known is None or known > min(sizes):
        raise CheckpointError(
            f"the model has {sizes[0]} tokens in its vocabulary and the baseline {sizes[1]}",
            "Name the dense model it was made from with --baseline",
        )
    first, second = (side[..., : min(sizes)].log_softmax(-1) for side in (model, reference))
    return first, second


def _first(distribution: Distribution) -> Tensor:
    return distribution.argmax(-1).cpu() if isinstance(distribution, Tensor) else distribution.argmax()


def _losses(distribution: Distribution, following: Tensor) -> Tensor:
    return -_of_tokens(distribution, following.unsqueeze(-1)).squeeze(-1)


def summarize(positions: Positions, compared: bool) -> Evaluation:
    """Sums up positions; `compared` says whether there was a baseline."""
    perplexity, tokens = _perplexity(positions.losses), positions.losses.numel()
    if not compared:
        return Evaluation(perplexity, tokens)
    return Evaluation(
        perplexity,
        tokens,
        baseline_perplexity=_perplexity(positions.baseline_losses),
        kl_mean=positions.divergence.mean().item(),
        kl_p999=_quantile(positions.divergence.flatten(), _TAIL),
        kl_standard_error=standard_error(positions.divergence.mean(-1)),
        top1_agreement=positions.agreement.mean().item(),
        kl_p999_standard_error=_quantile_error(positions.divergence, _TAIL),
        acceptance=positions.acceptance.mean().item(),
        acceptance_standard_error=standard_error(positions.acceptance.mean(-1)),
        flips_standard_error=standard_error(positions.agreement.mean(-1)),
    )


def _perplexity(losses: Tensor) -> float:
    return losses.mean().exp().item()


_TAIL = 0.999


def _quantile(values: Tensor, share: float) -> float:
    """Returns the smallest value not below `share` of all values. torch.quantile takes at most 16M values."""
    rank = max(1, math.ceil(share * values.numel()))
    return values.kthvalue(rank).values.item()


def standard_error(per_window: Tensor) -> float | None:
    """Returns the standard error of a mean of independent values `[N]`; None for a single one."""
    return (per_window.std() / math.sqrt(len(per_window))).item() if len(per_window) > 1 else None


_RESAMPLES = 200


def _quantile_error(values: Tensor, share: float) -> float | None:
    """Returns the standard error of the quantile of values `[N, T]` by the bootstrap over windows (Efron, 1979); None
    for a single window."""
    count, length = values.shape
    if count < 2:
        return None
    ordered, order = values.flatten().sort()
    window, rank = order // length, math.ceil(share * values.numel())
    found = []
    for chosen in torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0)):
        below = chosen.bincount(minlength=count)[window].cumsum(0)
        found.append(ordered[torch.searchsorted(below, rank)])
    return torch.stack(found).std().item()
