"""The linears of one unit, changed into one form after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.assignment import Assignment
from compress.pipeline.linear_work import LinearWork, values_of
from compress.pipeline.low_rank_work import Ranked, decompose_block
from compress.pipeline.shared_factors import SharedFactors


@dataclass
class ChangedUnit:
    """Weights of linears that share their input. What several forms need is computed once: the Hessian's factor, and
    the singular values that all ranks of a method are cut from.

    Attributes:
        weights: float32 `[O, I]` by full name.
        model_dtype: dtype in which scales and unquantized values are stored.
        statistics: of the input; None when nothing is known.
    """

    weights: Mapping[str, Tensor]
    model_dtype: torch.dtype
    statistics: InputStatistics | None
    _ranked: dict[tuple[str, str], Ranked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._factors = SharedFactors(self.statistics)

    def values(self, module: str, assignment: Assignment) -> Tensor:
        """The weight `[O, I]` as the finished checkpoint would multiply by it, float32.

        Raises:
            SchemeError, NumericsError: from the methods.
        """
        weight, ranked = self.weights[module], self._rank(module, assignment)
        work = LinearWork(module, weight, assignment, self.model_dtype, self.statistics, ranked=ranked)
        return values_of(work.apply(self._factors)[0])

    def _rank(self, module: str, assignment: Assignment) -> Ranked | None:
        if assignment.factoring is None or assignment.scheme is None:
            return None
        key = module, assignment.factoring.method
        if key not in self._ranked:
            seen = {} if self.statistics is None else {module: self.statistics}
            self._ranked[key] = decompose_block(self.weights, {module: assignment}, seen)[module]
        return replace(self._ranked[key], rank=assignment.scheme.rank)
