"""What linears that share their input also share: the factorized Hessians of that input."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from calibration.difference import InputDifference
from calibration.statistics import InputStatistics
from compress.methods.gptaq import DriftedFactor
from compress.methods.hessian import GptqOptions, HessianFactor, factorize


@dataclass
class SharedFactors:
    """Factorized Hessians of one input, each made when first asked for.

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
