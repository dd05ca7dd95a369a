"""One linear on its way to its stored form: pruned or factorized, quantized, by what is known of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.assignment import Assignment, Pruning
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.low_rank import LowRankWeight
from compress.checkpoint.packed import PackedWeight
from compress.checkpoint.pruned import PrunedWeight
from compress.checkpoint.scheme import Scheme
from compress.methods.hessian import GptqOptions
from compress.methods.pruning import PER_OUTPUT, keep_pattern, keep_share, scores
from compress.methods.sparsegpt import OPTIONS as SPARSEGPT_OPTIONS
from compress.methods.sparsegpt import prune_sparsegpt
from compress.pipeline.block_job import LinearRecord
from compress.pipeline.low_rank_work import UNREACHED, WHOLE, FactorRounding, Ranked
from compress.pipeline.shared_factors import SharedFactors
from compress.pipeline.weight_rounding import WeightRounding

Stored = PackedWeight | Tensor
"""What becomes of a weight `[O, I]`: packed, or a dense tensor in the model's dtype, zeros and all."""


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
        rounding = WeightRounding(
            self.module, self.assignment, self.model_dtype, factors, self.importance, self.details
        )
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
