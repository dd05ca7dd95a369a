"""Linears of a block on their way to two factors: decomposed, ranks shared out, and the factors rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.checkpoint.scheme import FLOAT_BITS, Scheme
from compress.checkpoint.weights.low_rank import Factor, LowRankWeight, values
from compress.methods.gptq import quantize_gptq
from compress.methods.low_rank import RankedLinear, largest_rank, rank_step, share_out
from compress.methods.rtn import quantize_rtn
from compress.methods.shared.decomposition import Decomposition, Whitening, decompose, scale_inputs, spectrum, whiten
from compress.methods.shared.hessian import HessianFactor, factorize
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
                *_shape(weights[name]), rank_step(each.scheme.factor), _comparable(each, parts[name].energies).tolist()
            )
            for name, each in chosen.items()
            if each.factoring == factoring and each.scheme
        }
        ranks |= share_out(members, factoring.keep)
    return ranks


def _comparable(assignment: LayerPlan, energies: Tensor) -> Tensor:
    """What each rank is worth beside those of other linears. Whitened, it is error of an output, in the units of the
    model; otherwise units differ from layer to layer, and only shares of each layer's total compare."""
    if _method(assignment) == "svd-llm":
        return energies
    return energies / energies.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _method(assignment: LayerPlan) -> str:
    return assignment.factoring.method if assignment.factoring else ""


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _whitening(method: str, statistics: InputStatistics | None) -> Whitening:
    if method == "svd":
        return Whitening()
    if statistics is None:
        return Whitening(recovery=f"svd: {UNREACHED}")
    # The Hessian is twice the second moment.
    return scale_inputs(statistics.abs_mean) if method == "asvd" else whiten(statistics.hessian / 2)


@dataclass(frozen=True, slots=True)
class FactorRounding:
    """How both factors of a linear are rounded.

    Attributes:
        method: rtn or gptq; rtn also where nothing is known of the inputs.
        scheme: of both factors; None keeps them in the model's dtype.
        statistics: of the linear's inputs, which are those of the right factor.
        factor: their factorized Hessian, for gptq.
    """

    method: str | None
    scheme: Scheme | None
    model_dtype: torch.dtype
    statistics: InputStatistics | None = None
    factor: HessianFactor | None = None

    def apply(self, left: Tensor, right: Tensor) -> LowRankWeight:
        """Rounds `right [r, I]` by the layer's inputs, then `left [O, r]` by what the rounded right factor gives it.

        Raises:
            SchemeError, NumericsError: from the methods.
        """
        rank = right.shape[0]
        if self.scheme is None:
            stored = left.to(self.model_dtype), right.to(self.model_dtype)
            return LowRankWeight(*stored, Scheme(FLOAT_BITS, None, rank=rank))
        first: Factor
        if self.factor is not None and self.statistics is not None:
            first = quantize_gptq(right, self.factor, self.scheme, self.model_dtype)
            passed = values(first, torch.float32)
            between = factorize(passed @ self.statistics.hessian @ passed.T)
            last = quantize_gptq(left, between, self.scheme, self.model_dtype)
        else:
            inputs = self.statistics.mean_square if self.statistics else None
            first = quantize_rtn(right, self.scheme, inputs, self.model_dtype)
            # Of inputs that are taken as independent: the mean square of what lies between the two products.
            passed = values(first, torch.float32).square()
            importance = None if inputs is None else passed @ inputs
            last = quantize_rtn(left, self.scheme, importance, self.model_dtype)
        return LowRankWeight(last, first, replace(self.scheme, rank=rank))
