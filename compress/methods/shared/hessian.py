"""The layer Hessian `H = 2 X^T X / tokens`, factorized once for all linears that share their input.

GPTQ (Frantar et al. 2023, https://arxiv.org/abs/2210.17323, section 3.3) inverts H and uses the Cholesky factor of the
inverse. QuIP (Chee et al. 2023, https://arxiv.org/abs/2307.13304, theorem 6) shows the same update needs only
`H = M D M^T` with M unit upper triangular: column k absorbs `sum_{j<k} E_j M_jk`, where E are the errors of preceding
columns. That is one factorization instead of three, and no inverse of an ill-conditioned matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from calibration.statistics import InputDifference, InputStatistics
from compress.checkpoint.weights.rotated_inputs import mean_of_blocks, rotate
from compress.common.device import require_finite

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class HessianOptions:
    """Options of the factorization of a Hessian.

    Attributes:
        activation_order: quantize columns in order of descending diag(H): the most sensitive ones are rounded while
            most others can still compensate. Groups are those of the original order, so no order is stored.
        damping: shares of mean(diag(H)) added to the diagonal, tried in turn until the factorization succeeds.
        last: columns processed after all others: they are not rounded, and compensate the error of the rest.
    """

    activation_order: bool = True
    damping: tuple[float, ...] = (0.01, 0.1, 1.0)
    last: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HessianFactor:
    """Factorized Hessian, with details of the factorization.

    Attributes:
        feedback: `[I, I]` float32, unit upper triangular, rows and columns in `order`; None means round to nearest.
        spread: `[I]` float32, in `order`: standard deviation of each input given those after it.
        order: `[I]` int64, original column of each position.
        importance: `[I]` diag(H) in the original order, for the scale search.
        damping: share of mean(diag(H)) added to the diagonal; None if no damping sufficed.
        recovery: line for the report about a fallback; empty if the first damping sufficed.
        dead_columns: inputs that were zero on every calibration token.
    """

    feedback: Tensor | None
    spread: Tensor | None
    order: Tensor
    importance: Tensor
    damping: float | None
    recovery: str
    dead_columns: int

    def facts(self) -> dict[str, float | str | None]:
        """Returns damping, fallback and dead columns for the report."""
        return {"recovery": self.recovery, "damping": self.damping, "dead_columns": self.dead_columns}

    def equivalent_inputs(self) -> Tensor | None:
        """Returns `[I, I]` input rows, columns in original order, with second moments proportional to the damped
        Hessian."""
        if self.feedback is None or self.spread is None:
            return None
        rows = torch.empty_like(self.feedback)
        rows[:, self.order] = (self.feedback * self.spread).T
        return rows


def factorize(hessian: Tensor, options: HessianOptions = HessianOptions()) -> HessianFactor:
    """Factorizes `hessian [I, I]` (symmetric, float32). If it is not positive definite, tries each damping, then a
    floor for its eigenvalues, then falls back to round to nearest. The result records the fallback. Raises
    NumericsError: NaN or infinity in the Hessian."""
    require_finite(hessian, "the Hessian")
    importance = hessian.diagonal().float().clamp(min=0)
    dead = importance == 0
    order = _column_order(importance, options)
    mean = float(importance.double().mean())
    if mean == 0:
        recovery = "rtn: every calibration input was zero"
        return HessianFactor(None, None, order, importance, None, recovery, len(importance))
    # Reversing rows and columns converts the lower Cholesky factor to an upper one. These matrices dominate the memory
    # of a wide layer, so each is freed before the next is made.
    reverse = order.flip(0)
    matrix = hessian[reverse.unsqueeze(1), reverse].float()
    del hessian
    # A mean diagonal of 1 makes the result independent of the inputs' unit, and dampings absolute.
    matrix.div_(mean).diagonal().add_(dead[reverse].float())
    lower, damping, recovery = _climb(matrix, options.damping)
    del matrix
    if lower is None:
        return HessianFactor(None, None, order, importance, None, recovery, int(dead.sum()))
    upper = lower.flip(0, 1)
    del lower
    spread = upper.diagonal().clone()
    upper /= spread
    return HessianFactor(upper, spread, order, importance, damping, recovery, int(dead.sum()))


def _column_order(importance: Tensor, options: HessianOptions) -> Tensor:
    order = torch.arange(len(importance), device=importance.device)
    if options.activation_order:
        order = torch.argsort(importance, descending=True, stable=True)
    is_last = torch.isin(order, torch.tensor(options.last, dtype=order.dtype, device=order.device))
    return torch.cat((order[~is_last], order[is_last]))


def _climb(matrix: Tensor, dampings: tuple[float, ...]) -> tuple[Tensor | None, float | None, str]:
    """Returns the lower triangular factor of `matrix`, whose diagonal it changes, with the damping and the fallback."""
    diagonal = matrix.diagonal().clone()
    for damping in dampings:
        matrix.diagonal().copy_(diagonal + damping)
        lower = _lower_factor(matrix)
        if lower is not None:
            return lower, damping, "" if damping == dampings[0] else f"damping raised to {damping:g}"
    matrix.diagonal().copy_(diagonal)
    lower = _factor_with_floor(matrix, dampings[0])
    if lower is not None:
        return lower, None, f"eigenvalues raised to at least {dampings[0]:g} of the mean diagonal"
    return None, None, "rtn: the Hessian could not be factorized"


def _lower_factor(matrix: Tensor) -> Tensor | None:
    """Returns the lower triangular L of `matrix = L L^T`, float32; None if it is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        return None
    return factor.float() if bool(torch.isfinite(factor.sum())) else None


def _factor_with_floor(matrix: Tensor, floor: float) -> Tensor | None:
    try:
        values, vectors = torch.linalg.eigh(matrix.double())
    except torch.linalg.LinAlgError:
        return None
    return _lower_factor((vectors * values.clamp(min=floor)) @ vectors.T)


@dataclass
class HessianCache:
    """Statistics of one input before smoothing, divided by `scale [I]` and then multiplied by Hadamard matrices of
    order `hadamard` (0: none), and cached factorizations of its Hessian."""

    statistics: InputStatistics | None
    scale: Tensor | None = None
    drift: InputDifference | None = None
    hadamard: int = 0
    made: dict[Hashable, Any] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def mean_square(self) -> Tensor | None:
        """Mean square of each input, `[I]`; None without statistics. Those of rotated inputs are the means of their
        blocks, as if inputs did not depend on each other."""
        if self.statistics is None:
            return None
        squares = self.statistics.mean_square
        squares = squares if self.scale is None else squares / self.scale.square()
        return mean_of_blocks(squares, self.hadamard) if self.hadamard else squares

    @property
    def hessian(self) -> Tensor:
        """Hessian `[I, I]`, float32. Raises ValueError without statistics."""
        if self.statistics is None:
            raise ValueError("a Hessian was requested without statistics")
        return self._smoothed(self.statistics.hessian)

    @property
    def difference(self) -> Tensor | None:
        """Drift matrix `[I, I]`, float32: `2 D X^T / tokens` with the drift D of the inputs X; None if unknown."""
        return None if self.drift is None else self._smoothed(self.drift.moment)

    def factor(self, options: HessianOptions = HessianOptions()) -> HessianFactor:
        """Returns the factorized Hessian. Raises ValueError without statistics."""
        return self.shared(options, lambda: factorize(self.hessian, options))

    def sample(self, count: int) -> Tensor | None:
        """Returns up to `count` input rows `[n, I]`, float32; None without statistics."""
        if self.statistics is None:
            return None
        rows = self.statistics.sample(count).float()
        rows = rows if self.scale is None else rows / self.scale
        return rotate(rows, self.hadamard) if self.hadamard else rows

    def rotated(self, order: int) -> HessianCache:
        """Returns the statistics of the inputs times Hadamard matrices of an order, for all linears that share them."""
        return self.shared(("rotated", order), lambda: HessianCache(self.statistics, self.scale, self.drift, order))

    def shared(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Returns the result of `make`, cached for all linears that share the input."""
        with self.lock:
            if key not in self.made:
                self.made[key] = make()
            return cast(Made, self.made[key])

    def to(self, device: torch.device) -> HessianCache:
        """Returns the same statistics on `device`, without factorizations if they were elsewhere."""
        statistics, drift = self.statistics and self.statistics.to(device), self.drift and self.drift.to(device)
        scale = None if self.scale is None else self.scale.to(device)
        is_there = statistics is self.statistics and scale is self.scale and drift is self.drift
        return self if is_there else HessianCache(statistics, scale, drift, self.hadamard)

    def _smoothed(self, moment: Tensor) -> Tensor:
        moment = moment if self.scale is None else moment / self.scale / self.scale.unsqueeze(-1)
        return rotate(rotate(moment, self.hadamard).T, self.hadamard).T if self.hadamard else moment
