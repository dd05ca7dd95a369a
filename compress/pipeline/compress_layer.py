"""One linear on its way to its stored form: pruned or factorized, quantized, by what is known of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calibration.statistics import InputDifference, InputStatistics
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import PackedWeight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import GroupScales, IntegerWeight
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierWeight
from compress.checkpoint.weights.sparse_nm import PrunedWeight
from compress.methods.awq import quantize_awq, search_clip
from compress.methods.gptaq import DEFAULT_ALPHA, DriftedFactor, quantize_gptaq
from compress.methods.gptq import quantize_gptq
from compress.methods.hqq import quantize_hqq
from compress.methods.outlier_columns import beside_outliers, highest, quantize_gptq_beside, sensitivity
from compress.methods.pruning import PER_OUTPUT, keep_pattern, keep_share, scores
from compress.methods.rtn import quantize_fp8, quantize_rtn
from compress.methods.shared.hessian import HessianFactor, HessianOptions, factorize
from compress.methods.sparsegpt import OPTIONS as SPARSEGPT_OPTIONS
from compress.methods.sparsegpt import prune_sparsegpt
from compress.pipeline.block import LinearRecord
from compress.pipeline.low_rank import UNREACHED, WHOLE, FactorRounding, Ranked
from compress.plan import LayerPlan, Pruning
from compress.recipe import DATA_FREE_METHODS


@dataclass
class HessianCache:
    """Factorized Hessians of one input, each made when first asked for.

    Attributes:
        statistics: of the input before smoothing; None when nothing is known.
        scale: `[I]`, what smoothing divided the input by; None when nothing was folded.
        difference: of the input to the dense model's; None when it is not known.
    """

    statistics: InputStatistics | None
    scale: Tensor | None = None
    difference: InputDifference | None = None
    factors: dict[HessianOptions, HessianFactor] = field(default_factory=dict)
    with_drift: dict[float, DriftedFactor] = field(default_factory=dict)

    def get(self, options: HessianOptions) -> HessianFactor:
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
            self.with_drift[alpha] = DriftedFactor.of(self.get(HessianOptions()), moment, alpha)
        return self.with_drift[alpha]

    def _smoothed(self, moment: Tensor) -> Tensor:
        return moment if self.scale is None else moment / self.scale / self.scale.unsqueeze(-1)


CLIP_ROWS = 512
# Errors of queries and keys pass through a softmax, where the least error of the projection is not the best choice.
_UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv")


@dataclass
class LayerRounding:
    """How one linear is rounded.

    Attributes:
        module: full name.
        model_dtype: dtype in which scales are stored.
        factors: of its inputs, with what is known of them.
        importance: `[I]`, mean square of each (smoothed) input; None when nothing is known.
        details: for the record: what the method met, and what it fell back to.
    """

    module: str
    assignment: LayerPlan
    model_dtype: torch.dtype
    factors: HessianCache
    importance: Tensor | None
    details: dict[str, Any] = field(default_factory=dict)

    def floats(self, weight: Tensor, scheme: Scheme) -> Fp8Weight:
        """The nearest 8-bit floats of a float32 weight `[O, I]`. Raises NumericsError for NaN or infinity."""
        return quantize_fp8(weight, scheme, self.importance, self.model_dtype)

    def codes(self, weight: Tensor, scheme: Scheme, kept: Tensor | None = None) -> IntegerWeight:
        """Integers of a float32 weight `[O, I]`; GPTQ changes only what is `kept` (bool `[O, I]`; None is all).

        Raises:
            SchemeError, NumericsError: from the methods.
        """
        method = self.assignment.method
        if method not in DATA_FREE_METHODS and self._statistics is None:
            self.details["recovery"] = f"rtn: {UNREACHED}"
            method = "rtn"
        match method:
            case "gptq" | "signround":
                # Rounding is learned from GPTQ's codes on: see `compress.pipeline.tuning`.
                factor = self.factors.get(HessianOptions())
                self.details |= factor.facts()
                return quantize_gptq(weight, factor, scheme, self.model_dtype, kept)
            case "gptaq":
                return self._gptaq(weight, scheme, kept)
            case "awq":
                clip = self._clip(weight, scheme)
                self.details["clipped"] = clip is not None
                return quantize_awq(weight, scheme, self.importance, clip, self.model_dtype)
            case "hqq":
                return quantize_hqq(weight, scheme, self.model_dtype)
            case _:
                return quantize_rtn(weight, scheme, self.importance, self.model_dtype)

    def beside(self, weight: Tensor, scheme: Scheme, columns: Tensor) -> OutlierWeight:
        """The same with some `columns [k]` in 16 bits. Raises as `codes` does."""
        if self.assignment.method == "gptq" and self._statistics is not None:
            factor = self.factors.get(HessianOptions(last=tuple(columns.tolist())))
            self.details |= factor.facts()
            return quantize_gptq_beside(weight, factor, scheme, columns, self.model_dtype)
        codes = self.codes(weight.index_fill(1, columns, 0.0), scheme.base)
        return beside_outliers(weight, codes, columns, scheme)

    @property
    def _statistics(self) -> InputStatistics | None:
        return self.factors.statistics

    def _gptaq(self, weight: Tensor, scheme: Scheme, kept: Tensor | None) -> IntegerWeight:
        alpha = DEFAULT_ALPHA if self.assignment.alpha is None else self.assignment.alpha
        drifted, factor = self.factors.drifted(alpha), self.factors.get(HessianOptions())
        self.details |= factor.facts()
        if drifted is None:
            self.details["recovery"] = "gptq: its inputs in the dense model are of other tokens"
            return quantize_gptq(weight, factor, scheme, self.model_dtype, kept)
        return quantize_gptaq(weight, drifted, scheme, self.model_dtype, kept)

    def _clip(self, weight: Tensor, scheme: Scheme) -> GroupScales | None:
        if self._statistics is None or any(part in self.module for part in _UNCLIPPED):
            return None
        rows, scale = self._statistics.sample(CLIP_ROWS).float(), self.factors.scale
        return search_clip(weight, rows if scale is None else rows / scale, scheme, self.model_dtype)


Stored = PackedWeight | Tensor
"""What becomes of a weight `[O, I]`: packed, or a dense tensor in the model's dtype, zeros and all."""


@dataclass
class LayerCompressor:
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
    assignment: LayerPlan
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

    def apply(self, factors: HessianCache) -> tuple[Stored, LinearRecord]:
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
        rounding = LayerRounding(self.module, self.assignment, self.model_dtype, factors, self.importance, self.details)
        if self.outliers is not None:
            return self.finish(rounding.beside(weight, scheme, self.outliers))
        return self.finish(rounding.floats(weight, scheme) if scheme.fp8 else rounding.codes(weight, scheme, kept))

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

    def _factorize(self, ranked: Ranked, rank: int, factors: HessianCache) -> LowRankWeight:
        rounds = self.assignment.method == "gptq" and self.statistics is not None
        factor = factors.get(HessianOptions()) if rounds else None
        self.details |= {
            "recovery": "; ".join(filter(None, (ranked.whitening.recovery, factor.recovery if factor else ""))),
            "damping": ranked.whitening.damping,
            "rank": rank,
        }
        rounding = FactorRounding(self.assignment.method, self._scheme, self.model_dtype, self.statistics, factor)
        return rounding.apply(*ranked.decomposition.truncated(rank))

    def _sparsegpt(self, pruning: Pruning, factors: HessianCache) -> IntegerWeight | Tensor:
        factor = factors.get(SPARSEGPT_OPTIONS)
        # GPTQ after SparseGPT is one loop, which makes up for both at once.
        joint = self.assignment.quantized if self.assignment.method == "gptq" else None
        self.details |= factor.facts()
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

    def _unquantized(self, weight: Tensor) -> Stored:
        values = weight.to(self.model_dtype)
        scheme = self._scheme
        return values if scheme is None else PrunedWeight(values, scheme)

    def finish(self, stored: Stored) -> tuple[Stored, LinearRecord]:
        """What becomes of the weight, where it was computed, and the record of it."""
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
        return stored, record


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


def choose_columns(
    weights: Mapping[str, Tensor],
    assignments: Mapping[str, LayerPlan],
    statistics: InputStatistics | None,
    scale: Tensor | None,
) -> dict[str, Tensor]:
    """Columns `[k]`, int64, rising, of every linear whose scheme has outliers.

    Inputs that are rounded to 8 bits are freed of their largest columns, others of those that cost most when the weight
    is rounded.

    Args:
        weights: `[O, I]` of linears that share their input, by name.
        statistics: of that input before smoothing; None when nothing is known.
        scale: `[I]`, what smoothing divided the input by.
    """
    members: dict[Scheme, list[str]] = {}
    for name in weights:
        scheme = assignments[name].quantized
        if scheme is not None and scheme.outliers is not None:
            members.setdefault(scheme, []).append(name)
    chosen: dict[str, Tensor] = {}
    for scheme, names in members.items():
        divided = 1.0 if scale is None else scale
        if scheme.activation_bits and statistics is not None:
            score = statistics.abs_max / divided
        else:
            importance = None if statistics is None else statistics.mean_square / torch.as_tensor(divided) ** 2
            score = sensitivity([weights[name] for name in names], scheme.base, importance)
        chosen |= dict.fromkeys(names, highest(score, scheme.outliers or 0))
    return chosen


def outlier_columns(weights: Mapping[str, PackedWeight], block: str) -> dict[str, Tensor]:
    """Columns `[k]`, int64, of those packed weights that have some, by name inside the block."""
    return {
        module.removeprefix(f"{block}."): weight.columns.long()
        for module, weight in weights.items()
        if isinstance(weight, OutlierWeight)
    }
