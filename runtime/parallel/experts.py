"""Experts of several ranks, to which tokens go that other ranks have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from compress.models.cuts import Rank
from runtime.parallel.group import Group


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """Implements `runtime.backends.mlp.Exchange` by all-to-all (DeepSpeed-MoE, arXiv:2201.05596, section 5).

    A row goes once to each rank with experts that its token has chosen, and comes back as their weighted sum.

    Attributes:
        owners: rank of each expert, int64 `[E]`.
    """

    group: Group
    owners: Tensor

    @classmethod
    def of(cls, group: Group, num_experts: int) -> Self:
        """Returns that of ranks which share the experts of a mixture."""
        shares = [Rank(index, group.rank.count).share(num_experts) for index in range(group.rank.count)]
        starts = torch.tensor([share.start for share in shares], device=group.device)
        experts = torch.arange(num_experts, device=group.device)
        return cls(group, torch.searchsorted(starts, experts, right=True) - 1)

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        count = self.group.rank.count
        is_sent = torch.zeros(count, len(x), dtype=torch.bool, device=x.device)
        is_sent = is_sent.scatter_(0, self.owners[chosen].T, True)
        _, rows = is_sent.nonzero(as_tuple=True)
        numbers = is_sent.sum(1)
        sent, received = numbers.tolist(), self.group.exchange(numbers, [1] * count, [1] * count).tolist()
        arrived = (self.group.exchange(each[rows], sent, received) for each in (x, weights, chosen))
        computed = self.group.exchange(compute(*arrived), received, sent)
        return torch.zeros_like(x).index_add_(0, rows, computed)
