"""One linear on its way to its stored form: pruned or factorized, quantized, by what is known of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calibration.difference import InputDifference
from calibration.statistics import InputStatistics
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.low_rank import Factor, LowRankWeight
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.packed import PackedWeight
from compress.checkpoint.pruned import PrunedWeight
from compress.checkpoint.scales import GroupScales
from compress.checkpoint.scheme import Scheme
from compress.methods.awq import quantize_awq, search_clip
from compress.methods.gptaq import DEFAULT_ALPHA, DriftedFactor, quantize_gptaq
from compress.methods.gptq import quantize_gptq
from compress.methods.hessian import GptqOptions, HessianFactor, factorize
from compress.methods.hqq import quantize_hqq
from compress.methods.outlier_columns import beside_outliers, quantize_gptq_beside
from compress.methods.pruning import PER_OUTPUT, keep_pattern, keep_share, scores
from compress.methods.rtn import quantize_rtn
from compress.methods.sparsegpt import OPTIONS as SPARSEGPT_OPTIONS
from compress.methods.sparsegpt import prune_sparsegpt
from compress.pipeline.block_job import LinearRecord
from compress.pipeline.low_rank_work import UNREACHED, WHOLE, FactorRounding, Ranked
from compress.plan import Assignment, Pruning
from compress.stages.quantize import DATA_FREE_METHODS

CLIP_ROWS = 512
# Errors of queries and keys pass through a softmax, where the least error of the projection is not the best choice.
_UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv")

Stored = PackedWeight | Tensor
"""What becomes of a weight `[O, I]`: packed, or a dense tensor in the model's dtype, zeros and all."""


@dataclass
class SharedFactors:
    """Factorized Hessians of linears that share their input, each made when first asked for.

    Attributes:
        statistics: of the input before smoothing; None when nothing is known.
        scale: `[I]`, what smoothing divided the input by; None when nothing was folded.
        difference: of the input to the dense model's; None when it is not known.
    """

    statistics: InputStatistics | None
    scale: Tensor | None = None
    difference: InputDifference | None = None
    factors: dict[GptqOptions, HessianFactor] = field(default_factory=dict)
    with_drift: dict[float, DriftedFactor] = field(default_factory=dict)

    def get(self, options: GptqOptions) -> HessianFactor:
        if self.statistics is None:
            raise ValueError("a Hessian was asked for, and nothing was observed")
        if options not in self.factors:
            self.factors[options] = factorize(self._smoothed(self.statistics.hessian), options)
        return self.factors[options]

    def drifted(self, alpha: float) -> DriftedFactor | None:
        """The Hessian's factor for GPTAQ; None when the difference is not known."""
        if self.difference is None:
            return None
        if alpha not in self.with_drift:
            moment = self._smoothed(self.difference.moment)
            self.with_drift[alpha] = DriftedFactor.of(self.get(GptqOptions()), moment, alpha)
        return self.with_drift[alpha]

    def _smoothed(self, moment: Tensor) -> Tensor:
        return moment if self.scale is None else moment / self.scale / self.scale.unsqueeze(-1)


@dataclass
class LinearWork:
    """A linear's master weight, what is to be done to it, and what is known of its (smoothed) inputs.

    Attributes:
        module: full name.
        weight: float32 `[O, I]`.
        model_dtype: dtype in which scales and unquantized values are stored.
        statistics: of its inputs before smoothing; None when nothing is known.
        scale: `[I]`, what smoothing multiplied its columns by; None when nothing was folded.
        ranked: its decomposition, when it is to be factorized.
        outliers: columns `[k]` that stay in 16 bits; None when none do.
    """

    module: str
    weight: Tensor
    assignment: Assignment
    model_dtype: torch.dtype
    statistics: InputStatistics | None = None
    scale: Tensor | None = None
    ranked: Ranked | None = None
    outliers: Tensor | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def importance(self) -> Tensor | None:
        """`[I]`, mean square of each (smoothed) input."""
        if self.statistics is None:
            return None
        squares = self.statistics.mean_square
        return squares if self.scale is None else squares / self.scale.square()

    def apply(self, factors: SharedFactors) -> tuple[Stored, LinearRecord]:
        """Prunes or factorizes, quantizes, and says what that did.

        Raises:
            SchemeError, NumericsError: from the methods.
        """
        if self.ranked is not None and self.ranked.rank is not None:
            return self.finish(self._factorize(self.ranked, self.ranked.rank, factors))
        if self.ranked is not None:
            self.details["kept_whole"] = WHOLE
        weight, kept = self.weight, None
        pruning = self.assignment.pruning
        if pruning is not None and pruning.method == "sparsegpt" and self.statistics is not None:
            found = self._sparsegpt(pruning, factors)
            if isinstance(found, IntegerWeight):
                return self.finish(found)
            weight, kept = found, found != 0
        elif pruning is not None:
            kept = self._mask(pruning)
            weight = weight.masked_fill(~kept, 0.0)
        scheme = self._scheme
        if scheme is None or self.assignment.method is None:
            return self.finish(self._unquantized(weight))
        if self.outliers is not None:
            return self.finish(self._quantize_beside(weight, self.outliers, scheme, factors))
        return self.finish(self._quantize(weight, kept, scheme, factors))

    @property
    def is_learned(self) -> bool:
        """Whether what `apply` gives is where learning starts."""
        return self.assignment.tuning is not None and self.statistics is not None

    def note_recovery(self, what: str) -> None:
        """Adds to what the method fell back to."""
        self.details["recovery"] = "; ".join(filter(None, (self.details.get("recovery", ""), what)))

    @property
    def _scheme(self) -> Scheme | None:
        """How the weight is stored, or both its factors are; None when that is as numbers."""
        scheme = self.assignment.scheme
        return scheme.factor if scheme and self.assignment.factoring else scheme

    def _factorize(self, ranked: Ranked, rank: int, factors: SharedFactors) -> LowRankWeight:
        rounds = self.assignment.method == "gptq" and self.statistics is not None
        factor = factors.get(GptqOptions()) if rounds else None
        self.details |= {
            "recovery": "; ".join(filter(None, (ranked.whitening.recovery, factor.recovery if factor else ""))),
            "damping": ranked.whitening.damping,
            "rank": rank,
        }
        rounding = FactorRounding(self.assignment.method, self._scheme, self.model_dtype, self.statistics, factor)
        return rounding.apply(*ranked.decomposition.truncated(rank))

    def _sparsegpt(self, pruning: Pruning, factors: SharedFactors) -> IntegerWeight | Tensor:
        factor = factors.get(SPARSEGPT_OPTIONS)
        # GPTQ after SparseGPT is one loop, which makes up for both at once.
        joint = self.assignment.quantized if self.assignment.method == "gptq" else None
        self._note(factor)
        return prune_sparsegpt(self.weight, factor, pruning.pattern, pruning.share, joint, self.model_dtype)

    def _mask(self, pruning: Pruning) -> Tensor:
        method = pruning.method
        if method != "magnitude" and self.statistics is None:
            method = "magnitude"
            self.details["recovery"] = f"pruned by magnitude: {UNREACHED}"
        score = scores(method, self.weight, self.importance)
        if pruning.pattern:
            return keep_pattern(score, pruning.pattern)
        return keep_share(score, pruning.share, per_output=method in PER_OUTPUT)

    def _quantize(self, weight: Tensor, kept: Tensor | None, scheme: Scheme, factors: SharedFactors) -> IntegerWeight:
        method = self.assignment.method
        if method not in DATA_FREE_METHODS and self.statistics is None:
            self.details["recovery"] = f"rtn: {UNREACHED}"
            method = "rtn"
        match method:
            case "gptq" | "signround":
                # Rounding is learned from GPTQ's codes on: see `compress.pipeline.tuning`.
                factor = factors.get(GptqOptions())
                self._note(factor)
                return quantize_gptq(weight, factor, scheme, self.model_dtype, kept)
            case "gptaq":
                return self._gptaq(weight, kept, scheme, factors)
            case "awq":
                clip = self._clip(weight, scheme)
                self.details["clipped"] = clip is not None
                return quantize_awq(weight, scheme, self.importance, clip, self.model_dtype)
            case "hqq":
                return quantize_hqq(weight, scheme, self.model_dtype)
            case _:
                return quantize_rtn(weight, scheme, self.importance, self.model_dtype)

    def _quantize_beside(
        self, weight: Tensor, columns: Tensor, scheme: Scheme, factors: SharedFactors
    ) -> OutlierWeight:
        if self.assignment.method == "gptq" and self.statistics is not None:
            factor = factors.get(GptqOptions(last=tuple(columns.tolist())))
            self._note(factor)
            return quantize_gptq_beside(weight, factor, scheme, columns, self.model_dtype)
        codes = self._quantize(weight.index_fill(1, columns, 0.0), None, scheme.base, factors)
        return beside_outliers(weight, codes, columns, scheme)

    def _gptaq(self, weight: Tensor, kept: Tensor | None, scheme: Scheme, factors: SharedFactors) -> IntegerWeight:
        alpha = DEFAULT_ALPHA if self.assignment.alpha is None else self.assignment.alpha
        drifted, factor = factors.drifted(alpha), factors.get(GptqOptions())
        self._note(factor)
        if drifted is None:
            self.details["recovery"] = "gptq: its inputs in the dense model are of other tokens"
            return quantize_gptq(weight, factor, scheme, self.model_dtype, kept)
        return quantize_gptaq(weight, drifted, scheme, self.model_dtype, kept)

    def _unquantized(self, weight: Tensor) -> Stored:
        values = weight.to(self.model_dtype)
        scheme = self._scheme
        return values if scheme is None else PrunedWeight(values, scheme)

    def _clip(self, weight: Tensor, scheme: Scheme) -> GroupScales | None:
        if self.statistics is None or any(part in self.module for part in _UNCLIPPED):
            return None
        rows = self.statistics.sample(CLIP_ROWS).float()
        return search_clip(weight, rows if self.scale is None else rows / self.scale, scheme, self.model_dtype)

    def _note(self, factor: HessianFactor) -> None:
        self.details |= {
            "recovery": factor.recovery,
            "damping": factor.damping,
            "dead_columns": factor.dead_columns,
        }

    def finish(self, stored: Stored) -> tuple[Stored, LinearRecord]:
        """What becomes of the weight, in host memory, and the record of it."""
        values = values_of(stored)
        record = LinearRecord(
            self.module,
            self.assignment.method or "none",
            _relative_error(self.weight, values, self.importance),
            factoring=str(self.assignment.factoring or ""),
            pruning=str(self.assignment.pruning or ""),
            zeros=float((values == 0).float().mean()) if self.assignment.pruning else 0.0,
            input_outlier=_outlier(self.statistics),
            **self.details,
        )
        return _on_host(stored), record


def values_of(stored: Stored) -> Tensor:
    """The weight `[O, I]` as float32."""
    return stored.float() if isinstance(stored, Tensor) else stored.dequantize(torch.float32)


def _relative_error(weight: Tensor, values: Tensor, importance: Tensor | None) -> float:
    """Squared error over squared weights, each column weighted by the mean square of its input."""
    columns = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance
    error = ((values - weight).square() * columns).sum()
    total = (weight.square() * columns).sum()
    return float(error / total) if float(total) else 0.0


def _outlier(statistics: InputStatistics | None) -> float | None:
    """How far the largest input stands out from the median channel's; None when that one was always zero."""
    if statistics is None:
        return None
    typical = float(statistics.abs_max.median())
    return float(statistics.abs_max.max()) / typical if typical else None


def _on_host(stored: Stored) -> Stored:
    if isinstance(stored, LowRankWeight):
        left, right = map(_factor_on_host, stored.factors)
        return LowRankWeight(left, right, stored.scheme)
    if isinstance(stored, Tensor):
        return stored.cpu()
    if isinstance(stored, PrunedWeight):
        return PrunedWeight(stored.values.cpu(), stored.scheme)
    if isinstance(stored, OutlierWeight):
        base = _integers_on_host(stored.base)
        return OutlierWeight(base, stored.columns.cpu(), stored.values.cpu(), stored.scheme)
    return _integers_on_host(stored)


def _integers_on_host(weight: IntegerWeight) -> IntegerWeight:
    return IntegerWeight(weight.codes.cpu(), weight.scale.cpu(), weight.zero.cpu(), weight.scheme)


def _factor_on_host(factor: Factor) -> Factor:
    return factor.cpu() if isinstance(factor, Tensor) else _integers_on_host(factor)
