"""Perplexity of a model and its divergence from another, window by window."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from compress.checkpoint.errors import NumericsError
from compress.evaluate.scorers import Scorer
from compress.evaluate.windows import Windows

BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one pass over the windows gave.

    Attributes:
        perplexity: exp of the mean negative log-likelihood (natural log) of the predicted tokens.
        tokens: number of predicted tokens.
        baseline_perplexity: the same of the baseline, if there is one.
        kl_mean, kl_p999: mean and 99.9 % quantile over positions of KL(baseline || model), in nats.
        kl_standard_error: standard error of `kl_mean` over windows.
        top1_agreement: share of positions where both put the same token first.
    """

    perplexity: float
    tokens: int
    baseline_perplexity: float | None = None
    kl_mean: float | None = None
    kl_p999: float | None = None
    kl_standard_error: float | None = None
    top1_agreement: float | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


@torch.inference_mode()
def evaluate(
    model: Scorer,
    windows: Windows,
    baseline: Scorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Scores every window with the model and, side by side, with the baseline.

    Both models are resident, but never more logits than one batch of windows of each.

    Args:
        on_progress: called with (windows done, windows in all).

    Raises:
        NumericsError: a model gave NaN or infinite logits.
    """
    losses, baseline_losses, divergences, agreements = [], [], [], []
    batch = max(1, BATCH_TOKENS // windows.tokens.shape[1])
    for start in range(0, len(windows.tokens), batch):
        tokens = windows.tokens[start : start + batch]
        logp = _log_probabilities(model, tokens, "the model")
        losses.append(_losses(logp, tokens))
        if baseline is not None:
            reference = _log_probabilities(baseline, tokens, "the baseline")
            baseline_losses.append(_losses(reference, tokens))
            divergences.append((reference.exp() * (reference - logp)).sum(-1))
            agreements.append((reference.argmax(-1) == logp.argmax(-1)).double().mean(-1))
        if on_progress:
            on_progress(min(start + batch, len(windows.tokens)), len(windows.tokens))
    loss = torch.cat(losses)
    if baseline is None:
        return Evaluation(_perplexity(loss), loss.numel())
    divergence = torch.cat(divergences)
    return Evaluation(
        perplexity=_perplexity(loss),
        tokens=loss.numel(),
        baseline_perplexity=_perplexity(torch.cat(baseline_losses)),
        kl_mean=divergence.mean().item(),
        kl_p999=_quantile(divergence.flatten(), 0.999),
        kl_standard_error=_standard_error(divergence.mean(-1)),
        top1_agreement=torch.cat(agreements).mean().item(),
    )


def _log_probabilities(model: Scorer, tokens: Tensor, who: str) -> Tensor:
    """Log-probabilities `[B, T-1, V]` of the predicted positions, in the dtype of the logits."""
    logits = model.logits(tokens)[:, :-1]
    if not torch.isfinite(logits).all():
        raise NumericsError(f"{who} gave NaN or infinite logits", "Run compress verify on the checkpoint")
    return torch.log_softmax(logits, dim=-1)


def _losses(logp: Tensor, tokens: Tensor) -> Tensor:
    target = tokens[:, 1:].to(logp.device)
    return -logp.gather(-1, target.unsqueeze(-1)).squeeze(-1).double()


def _perplexity(losses: Tensor) -> float:
    return math.exp(losses.mean().item())


def _quantile(values: Tensor, share: float) -> float:
    """The smallest value that is at least as large as `share` of all values. torch.quantile stops at 16M values."""
    rank = max(1, math.ceil(share * values.numel()))
    return values.kthvalue(rank).values.item()


def _standard_error(per_window: Tensor) -> float:
    return (per_window.double().std() / math.sqrt(len(per_window))).item() if len(per_window) > 1 else float("nan")
