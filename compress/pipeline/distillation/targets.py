"""Targets of training: the most likely tokens of the dense model at every position, and the divergence from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class Teacher(Protocol):
    """Model whose logits another one is trained on."""

    def targets(self, tokens: Tensor, micro_batch: int, count: int) -> Iterator[dict[str, Tensor]]:
        """Yields the targets of `tokens [N, L]`, a micro-batch at a time, with `count` tokens of a position at most."""


def top_targets(logits: Tensor, count: int) -> dict[str, Tensor]:
    """Returns the `count` most likely tokens of logits `[B, L, V]`: float32 log-probabilities and int32 indices
    `[B, L, count]`, most likely first."""
    found = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
    return {"log_probabilities": found.values, "indices": found.indices.to(torch.int32)}


def top_divergence(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Returns the sum over positions of KL(targets || logits) in nats, where all tokens that have no target count as
    one: a lower bound of the divergence over the vocabulary. Targets may lack the last positions."""
    indices = targets["indices"].to(logits.device, torch.int64)
    logits, expected = logits[:, : indices.shape[1]].float(), targets["log_probabilities"].to(logits.device)
    chosen = logits.gather(-1, indices)
    total = logits.logsumexp(-1, keepdim=True)
    divergence = (expected.exp() * (expected - (chosen - total))).sum()
    if indices.shape[-1] == logits.shape[-1]:
        return divergence
    rest = logits.scatter(-1, indices, -torch.inf).logsumexp(-1) - total.squeeze(-1)
    share = (1 - expected.exp().sum(-1)).clamp(min=torch.finfo(torch.float32).tiny)
    return divergence + (share * (share.log() - rest)).sum()
