"""Mixtures of experts in plain torch: the choice of experts, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.router import Router
from runtime.backends.base import ComputeMixture, Linear
from runtime.backends.expert_slots import ExpertSlots


def route(scores: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Chooses experts by `scores [T, E]`, in at least float32.

    Args:
        bias: `[E]`, added where experts are chosen, not to their weights.

    Returns:
        Weights `[T, k]`, and int64 experts `[T, k]`.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if router.activation == "sparsemixer":
        return _mix_sparsely(scores, router)
    weights = scores.softmax(-1) if router.activation == "softmax" else scores.sigmoid()
    ranks = weights if bias is None else weights + bias
    if router.num_groups > 1:
        ranks = _in_best_groups(ranks, router)
    chosen = ranks.topk(router.num_chosen, -1).indices
    weights = weights.gather(-1, chosen)
    if router.normalizes:
        total = weights.sum(-1, keepdim=True) + router.added_sum
        weights = weights / total.clamp(min=router.least_sum)
    return weights * router.scale, chosen


def _mix_sparsely(scores: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Chooses one expert after the other; its weight is its share among those left whose scores come near its own."""
    left, weights, chosen = scores, [], []
    for _ in range(router.num_chosen):
        best, index = left.max(-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > router.margin
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


def _in_best_groups(ranks: Tensor, router: Router) -> Tensor:
    """Puts experts outside of the best groups behind all others."""
    groups = ranks.unflatten(-1, (router.num_groups, -1))
    best = groups.topk(router.num_ranked, -1).values.sum(-1).topk(router.num_chosen_groups, -1).indices
    hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass(frozen=True, slots=True)
class Expert:
    """Weights of one MLP."""

    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


Apply = Callable[[Expert, Tensor], Tensor]
"""Computes an MLP: `[T, H] -> [T, H]`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of a mixture.

    Attributes:
        scores: router `[E, H]`.
        bias: `[E]`, see `route`, in at least float32.
        scores_bias: `[E]`, added to scores.
        around: linears before and behind the experts.
        shared_gate: `[1, H]`.
        expert_scales: `[E]`, factors on their weights.
        kernel: computes the mixture at once; None goes from expert to expert.
        slots: those on the device of experts in host memory; None where `experts` are on the device.
    """

    router: Router
    scores: Tensor
    experts: tuple[Expert, ...]
    bias: Tensor | None = None
    shared: Expert | None = None
    shared_gate: Tensor | None = None
    expert_scales: Tensor | None = None
    kernel: ComputeMixture | None = None
    scores_bias: Tensor | None = None
    slots: ExpertSlots | None = None
    around: tuple[Linear, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        shared = 0 if self.shared is None else self.shared.nbytes
        experts = sum(expert.nbytes for expert in self.experts) if self.slots is None else self.slots.nbytes
        return self.scores.nbytes + shared + experts + sum(linear.nbytes for linear in self.around)

    def __call__(self, x: Tensor, apply: Apply, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`; an expert reads the rows that chose it, all at once.

        Args:
            routed: `[T, H]`, what the router reads instead of `x`.
        """
        if self.kernel is not None:
            return self.kernel(x, routed)
        return self.weighted(x, *self.route(x if routed is None else routed), apply)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts for `x [T, H]`: their weights `[T, k]`, and int64 experts `[T, k]`."""
        scores = functional.linear(x.to(self.scores.dtype), self.scores, self.scores_bias)
        scores = scores if self.router.score_scale == 1.0 else scores * self.router.score_scale
        weights, chosen = route(scores, self.router, self.bias)
        return weights if self.expert_scales is None else weights * self.expert_scales[chosen], chosen

    def weighted(self, x: Tensor, weights: Tensor, chosen: Tensor, apply: Apply) -> Tensor:
        """Sums up experts `[T, k]` by their weights, and what all tokens share."""
        if self.around:
            narrow, widen = self.around
            out = widen(self._weighted(narrow(x), weights, chosen, apply))
        else:
            out = self._weighted(x, weights, chosen, apply)
        return out if self.shared is None else out.add_(self._shared(self.shared, x, apply))

    def _weighted(self, x: Tensor, weights: Tensor, chosen: Tensor, apply: Apply) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in self._on_device(chosen.unique().tolist()):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            weight = weights[rows, places].unsqueeze(-1)
            if self.router.weighs_inputs:
                found = apply(expert, x[rows] * weight.to(x.dtype))
            else:
                found = apply(expert, x[rows]) * weight
            out.index_add_(0, rows, found.to(x.dtype))
        return out

    def _on_device(self, chosen: list[int]) -> Iterator[tuple[int, Expert]]:
        if self.slots is not None:
            return self.slots.one_by_one(chosen)
        return ((index, self.experts[index]) for index in chosen)

    def _shared(self, expert: Expert, x: Tensor, apply: Apply) -> Tensor:
        found = apply(expert, x)
        return found if self.shared_gate is None else found * (x @ self.shared_gate.T).sigmoid()
