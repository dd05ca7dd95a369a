"""A linear's weight becomes codes: by its method, or to nearest where nothing is known that the method needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.assignment import Assignment
from compress.checkpoint.fp8 import Fp8Weight
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.scales import GroupScales
from compress.checkpoint.scheme import Scheme
from compress.methods.awq import quantize_awq, search_clip
from compress.methods.fp8 import quantize_fp8
from compress.methods.gptaq import DEFAULT_ALPHA, quantize_gptaq
from compress.methods.gptq import quantize_gptq
from compress.methods.hessian import GptqOptions
from compress.methods.hqq import quantize_hqq
from compress.methods.outlier_columns import beside_outliers, quantize_gptq_beside
from compress.methods.rtn import quantize_rtn
from compress.pipeline.low_rank_work import UNREACHED
from compress.pipeline.shared_factors import SharedFactors
from compress.stages.quantize import DATA_FREE_METHODS

CLIP_ROWS = 512
# Errors of queries and keys pass through a softmax, where the least error of the projection is not the best choice.
_UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv")


@dataclass
class WeightRounding:
    """How one linear is rounded.

    Attributes:
        module: full name.
        model_dtype: dtype in which scales are stored.
        factors: of its inputs, with what is known of them.
        importance: `[I]`, mean square of each (smoothed) input; None when nothing is known.
        details: for the record: what the method met, and what it fell back to.
    """

    module: str
    assignment: Assignment
    model_dtype: torch.dtype
    factors: SharedFactors
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
                factor = self.factors.get(GptqOptions())
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
            factor = self.factors.get(GptqOptions(last=tuple(columns.tolist())))
            self.details |= factor.facts()
            return quantize_gptq_beside(weight, factor, scheme, columns, self.model_dtype)
        codes = self.codes(weight.index_fill(1, columns, 0.0), scheme.base)
        return beside_outliers(weight, codes, columns, scheme)

    @property
    def _statistics(self) -> InputStatistics | None:
        return self.factors.statistics

    def _gptaq(self, weight: Tensor, scheme: Scheme, kept: Tensor | None) -> IntegerWeight:
        alpha = DEFAULT_ALPHA if self.assignment.alpha is None else self.assignment.alpha
        drifted, factor = self.factors.drifted(alpha), self.factors.get(GptqOptions())
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
