"""Linears of a block on their way to two factors: decomposed, and ranks allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.methods import base
from compress.methods.low_rank import RankedLinear, largest_rank, rank_step, share_out
from compress.methods.shared.decomposition import Decomposition, Whitening, decompose, spectrum
from compress.plan import LayerPlan

UNREACHED = "no calibration token reached this layer"
WHOLE = "kept whole: the weights that its rank would need are no fewer than its own"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A linear's decomposition, and how much of it stays; None keeps the linear as it is."""

    decomposition: Decomposition
    whitening: Whitening
    rank: int | None


def decompose_block(
    weights: Mapping[str, Tensor],
    assignments: Mapping[str, LayerPlan],
    statistics: Mapping[str, InputStatistics],
) -> dict[str, Ranked]:
    """Every linear of a block that is to be factorized, with its rank.

    Args:
        weights: float32 `[O, I]` by name inside the block, after smoothing.
        statistics: of inputs, by name; linears that nothing reached have none.

    Raises:
        NumericsError: from the decomposition.
    """
    chosen = {name: each for name, each in assignments.items() if each.factoring}
    parts: dict[str, tuple[Decomposition, Whitening]] = {}
    known = _Whitenings(statistics)
    for name, assignment in chosen.items():
        whitening, most = known.of(name, assignment), largest_rank(*_shape(weights[name]), 1)
        parts[name] = decompose(weights[name], whitening, most), whitening
    ranks = _ranks(chosen, weights, {name: decomposition for name, (decomposition, _) in parts.items()})
    return {name: Ranked(*parts[name], ranks[name]) for name in parts}


def energies(
    weights: Mapping[str, Tensor], assignments: Mapping[str, LayerPlan], statistics: Mapping[str, InputStatistics]
) -> dict[str, Tensor]:
    """What each rank of linears that are to be factorized would keep, float64 `[min(O, I)]`, falling; arguments as
    those of `decompose_block`. Raises NumericsError from the decomposition."""
    known = _Whitenings(statistics)
    return {
        name: _comparable(each, spectrum(weights[name], known.of(name, each))) for name, each in assignments.items()
    }


@dataclass(frozen=True, slots=True)
class _Whitenings:
    """Linears that share their input share its whitening."""

    statistics: Mapping[str, InputStatistics]
    known: dict[tuple[str, int], Whitening] = field(default_factory=dict)

    def of(self, name: str, assignment: LayerPlan) -> Whitening:
        key = (_method(assignment), id(self.statistics.get(name)))
        if key not in self.known:
            self.known[key] = _whitening(key[0], self.statistics.get(name))
        return self.known[key]


def _ranks(
    chosen: Mapping[str, LayerPlan], weights: Mapping[str, Tensor], parts: Mapping[str, Decomposition]
) -> dict[str, int | None]:
    """Planned ranks, or for those that are allocated by block the ranks of least loss; stages allocate on their own."""
    ranks = {name: each.scheme.rank if each.scheme else None for name, each in chosen.items()}
    for factoring in {each.factoring for each in chosen.values() if each.factoring and each.factoring.is_shared}:
        members = {
            name: RankedLinear(
                *_shape(weights[name]), rank_step(each.scheme.codes), _comparable(each, parts[name].energies).tolist()
            )
            for name, each in chosen.items()
            if each.factoring == factoring and each.scheme
        }
        ranks |= share_out(members, factoring.keep_ratio)
    return ranks


def _comparable(plan: LayerPlan, energies: Tensor) -> Tensor:
    """Return energies that compare between linears: errors of the output, or where the method's energies are in
    units of their own, shares of each layer's total."""
    if plan.factoring and base.factorization(plan.factoring.method).energies_are_errors:
        return energies
    return energies / energies.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _method(plan: LayerPlan) -> str:
    return plan.factoring.method if plan.factoring else ""


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _whitening(name: str, statistics: InputStatistics | None) -> Whitening:
    method = base.factorization(name)
    if statistics is not None:
        return method.whitening(statistics)
    return Whitening(recovery=f"{base.fallback('factorize').name}: {UNREACHED}" if method.needs(None).inputs else "")
