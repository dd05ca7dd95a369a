"""MLPs and mixtures of them in plain torch: activations, the choice of experts, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.mlp import MLP, Mixture
from compress.models.router import Router
from runtime.backends.base import Gather, Linear, NormWeights, Ops, Sum, add_and_normalize
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
    """Ranks experts outside of the best groups after all others."""
    groups: Tensor = ranks.unflatten(-1, (router.num_groups, -1))
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


def apply_mlp(mlp: MLP, weights: Expert, x: Tensor, ops: Ops) -> Tensor:
    """Computes an MLP, `[T, H] -> [T, H]`."""
    added, (_, factor) = weights.down(_activate(mlp, weights.gate_up(x), ops)), mlp.factors
    return added if factor == 1.0 else added * factor


def _activate(mlp: MLP, gate_up: Tensor, ops: Ops) -> Tensor:
    if mlp.factors[0] != 1.0:
        gate, up = gate_up.chunk(2, -1)
        gate_up = torch.cat((gate * mlp.factors[0], up), -1)
    if mlp.clamped is not None:
        return ops.clamp_and_mul(gate_up, mlp.clamped)
    return (ops.activate_and_mul if mlp.gated else ops.activate)(gate_up, mlp.activation)


class ComputeMixture(Protocol):
    """A whole mixture."""

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`; the router reads `routed [T, H]` if that is given."""


Exchange = Callable[[Tensor, Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], Tensor]], Tensor]
"""Computes `[T, H]` of rows `[T, H]`, weights and experts `[T, k]`: ranks send rows to those with the experts, which
compute the weighted sums of theirs by the function that is given last."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of a mixture.

    Attributes:
        scores: of the router, `[E, H]`.
        bias: `[E]`, see `route`, in at least float32.
        scores_bias: `[E]`, added to scores.
        around: linears before and after the experts.
        exchange: sends tokens of this rank to the ranks that hold their experts; None where every rank has all tokens.
        shared_gate: `[1, H]`.
        expert_scales: `[E]`, factors on their weights.
        kernel: computes the mixture at once; None goes from expert to expert.
        slots: those on the device of experts in host memory; None where `experts` are on the device.
    """

    spec: Mixture
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
    exchange: Exchange | None = None

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        shared = 0 if self.shared is None else self.shared.nbytes
        experts = sum(expert.nbytes for expert in self.experts) if self.slots is None else self.slots.nbytes
        return self.scores.nbytes + shared + experts + sum(linear.nbytes for linear in self.around)

    def __call__(self, x: Tensor, hidden: Tensor, ops: Ops, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, the norm of `hidden`; an expert reads the rows that chose it, all at once.

        Args:
            routed: `[T, H]`, what the router reads instead of `x`.
        """
        if self.kernel is not None:
            return self.kernel(x, routed)
        return self.weighted(x, *self.route(x if routed is None else routed), ops)

    def exchanged(self, x: Tensor, exchange: Exchange, ops: Ops) -> Tensor:
        """As a call, where `x [T, H]` are tokens of this rank and experts those of all ranks."""
        return exchange(x, *self.route(x), partial(self._weighted, ops=ops))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts for `x [T, H]`: their weights `[T, k]`, and int64 experts `[T, k]`."""
        scores = functional.linear(x.to(self.scores.dtype), self.scores, self.scores_bias)
        scores = scores if self.spec.router.score_scale == 1.0 else scores * self.spec.router.score_scale
        weights, chosen = route(scores, self.spec.router, self.bias)
        return weights if self.expert_scales is None else weights * self.expert_scales[chosen], chosen

    def weighted(self, x: Tensor, weights: Tensor, chosen: Tensor, ops: Ops) -> Tensor:
        """Sums up experts `[T, k]` by their weights, and what all tokens share."""
        if self.around:
            narrow, widen = self.around
            out = widen(self._weighted(narrow(x), weights, chosen, ops))
        else:
            out = self._weighted(x, weights, chosen, ops)
        return out if self.shared is None else out.add_(self._shared(self.shared, x, ops))

    def _weighted(self, x: Tensor, weights: Tensor, chosen: Tensor, ops: Ops) -> Tensor:
        out, mlp = torch.zeros_like(x), self.spec.experts[0]
        for index, expert in self._on_device(chosen.unique().tolist()):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            weight = weights[rows, places].unsqueeze(-1)
            if self.spec.router.weighs_inputs:
                found = apply_mlp(mlp, expert, x[rows] * weight.to(x.dtype), ops)
            else:
                found = apply_mlp(mlp, expert, x[rows], ops) * weight
            out.index_add_(0, rows, found.to(x.dtype))
        return out

    def _on_device(self, chosen: list[int]) -> Iterator[tuple[int, Expert]]:
        if self.slots is not None:
            return self.slots.one_by_one(chosen)
        first = self.spec.first_held
        own = range(first, first + len(self.experts))
        return ((index, self.experts[index - first]) for index in chosen if index in own)

    def _shared(self, expert: Expert, x: Tensor, ops: Ops) -> Tensor:
        found = apply_mlp(self.spec.experts[0], expert, x, ops)
        return found if self.shared_gate is None else found * (x @ self.shared_gate.T).sigmoid()


@dataclass(frozen=True, slots=True)
class Xielu:
    """Quadratic above 0, exponential with a linear part below; both alphas are stored before their softplus."""

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[T, I]` of `x [T, I]`, a new tensor."""
        above = functional.softplus(self.alpha_p) * x * x
        below = (torch.expm1(torch.min(x, self.eps)) - x) * (self.beta + functional.softplus(self.alpha_n))
        return torch.where(x > 0, above, below).add_(self.beta * x)


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """An MLP of all tokens.

    Attributes:
        curve: activation with learned numbers; None for one with a name.
    """

    spec: MLP
    weights: Expert
    curve: Xielu | None = None

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def __call__(self, x: Tensor, hidden: Tensor, ops: Ops) -> Tensor:
        """Computes `[T, H]` of `x [T, H]`, the norm of `hidden [T, H]`."""
        if self.curve is not None:
            return self.weights.down(self.curve(self.weights.gate_up(x)))
        return apply_mlp(self.spec, self.weights, x, ops)


@dataclass(frozen=True, slots=True)
class MLPAndMixture:
    """Weights of `compress.models.block_parts.ParallelMixture`, with its MLP.

    Attributes:
        sum, gather: see `Layer`; None for one that has all.
    """

    mlp: DenseMLP
    mixture: Experts
    mlp_norm: NormWeights
    input_norm: NormWeights
    output_norm: NormWeights
    router_norm: NormWeights
    sum: Sum | None = None
    gather: Gather | None = None

    @property
    def nbytes(self) -> int:
        return self.mlp.nbytes + self.mixture.nbytes

    def __call__(self, x: Tensor, hidden: Tensor, ops: Ops) -> Tensor:
        """Computes `[T, H]`: the MLP of `x [T, H]` and the mixture of `hidden [T, H]`, whose norm `x` is."""
        hidden = hidden if self.gather is None else self.gather(hidden, len(x))
        routed, read = (add_and_normalize(hidden, None, norm, ops) for norm in (self.router_norm, self.input_norm))
        added, mixed = self.mlp(x, hidden, ops), self.mixture(read, hidden, ops, routed)
        if self.sum is not None:
            added, mixed = self.sum(torch.cat((added, mixed), -1)).chunk(2, -1)
        added = add_and_normalize(added, None, self.mlp_norm, ops)
        return added + add_and_normalize(mixed, None, self.output_norm, ops)


FeedForward = DenseMLP | Experts | MLPAndMixture
"""Computation of a layer after its mixer."""
