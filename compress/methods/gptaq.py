"""GPTAQ: GPTQ that matches each layer's output in the dense model, so it also corrects the drift of earlier layers.

Li et al. 2025, https://arxiv.org/abs/2504.02692 (section 4). X are the inputs of a layer in the quantized model,
`X + D` those in the dense model, and `|W^ X - W (X + D)|` is minimized. At column i, its share `w_i d_i` of the output
difference is projected onto the inputs of the remaining columns, which absorb it. With U the upper Cholesky factor of
the inverse Hessian, these projections are the rows of

    P = alpha triu(D X^T U^T, 1) U        and column k moves by  sum_{i<k} w_i P_ik,  w_i as it was before rounding.

This recursion is linear in the weights, so it can be moved out of the column loop. GPTQ's loop with feedback M gives
column k the value `w_k = t_k + sum_{j<k} (t_j - q_j) M_jk`, in matrices `w = t M + q (1 - M)`. Adding the update
`w P M` (which also changes the column's error) and solving for w gives the same form, with another feedback M' and
another target t':

    K = (1 - P M)^-1        M' = 1 - (1 - M) K        t' = t M K M'^-1
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

from compress.checkpoint.weights import Scheme, Weight
from compress.common.cli import option
from compress.methods.base import Layer, MethodOptions, Needs, QuantizationMethod, register
from compress.methods.gptq import compress_gptq, quantize_gptq

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.methods.shared.hessian import HessianFactor

DEFAULT_ALPHA = 1.0


@dataclass(frozen=True, slots=True)
class GPTAQOptions(MethodOptions):
    """Options of GPTAQ."""

    alpha: float | None = option(
        default=None,
        limits={"at least": 0, "at most": 1},
        help="Share of the inputs' drift from the dense model to correct, 0 to 1. Default: 1.",
    )


@register
class GPTAQ(QuantizationMethod):
    """GPTAQ."""

    name: ClassVar[str] = "gptaq"
    help: ClassVar[str] = "gptq that also corrects the drift of earlier layers"
    Options: ClassVar[type] = GPTAQOptions
    data: ClassVar[Needs] = Needs(inputs=True, hessian=True, dense_inputs=True)
    takes_grids: ClassVar[bool] = True

    def unsupported(self, scheme: Scheme) -> str:
        return (
            "it does not support outlier columns"
            if scheme.num_outliers
            else QuantizationMethod.unsupported(self, scheme)
        )

    def compress(self, layer: Layer) -> Weight:
        difference = layer.inputs.difference
        if difference is None:
            layer.details["recovery"] = "gptq: its inputs in the dense model come from other tokens"
            return compress_gptq(layer)
        alpha = DEFAULT_ALPHA if layer.options.alpha is None else layer.options.alpha
        factor = layer.inputs.factor()
        layer.details |= factor.facts()
        drifted = layer.inputs.shared(("gptaq", alpha), lambda: DriftedFactor.of(factor, difference, alpha))
        return drifted.quantize(layer.weight, layer.scheme, layer.dtype, layer.kept)


@dataclass(frozen=True, slots=True)
class DriftedFactor:
    """Factorized Hessian combined with the drift of inputs from the dense model.

    Attributes:
        factor: factor of the Hessian with M' as `feedback`.
        transfer: `[I, I]` in the factor's order, maps weights to the loop's targets; None if the Hessian could not be
            factorized, and weights are rounded to nearest.
    """

    factor: HessianFactor
    transfer: Tensor | None

    @classmethod
    def of(cls, factor: HessianFactor, difference: Tensor, alpha: float = DEFAULT_ALPHA) -> DriftedFactor:
        """Combines Hessian and drift.

        Args:
            difference: `[I, I]` float32, `2 D X^T / tokens`, in the unit of the Hessian; rows belong to D.
            alpha: share of the drift to correct, 0 (GPTQ) to 1.
        """
        import torch

        if factor.feedback is None or factor.spread is None:
            return cls(factor, None)
        feedback = factor.feedback.double()
        # H / mean(diag(H)) = R R^T, hence U = R^-1 in that unit.
        ordered = difference[factor.order][:, factor.order].double() / factor.importance.double().mean()
        moves = alpha * _projections(feedback * factor.spread, ordered)
        one = torch.eye(len(feedback), dtype=feedback.dtype, device=feedback.device)
        # K = (1 - P M)^-1, never formed: M' = 1 - (1 - M) K and M K, each by one triangular solve.
        rest = one - moves @ feedback
        drifted = one - _divided(one - feedback, rest)
        transfer = _divided(_divided(feedback, rest), drifted)
        return cls(replace(factor, feedback=drifted.float()), transfer.float())

    def quantize(
        self, weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype | None = None, kept: Tensor | None = None
    ) -> Weight:
        """Quantizes `weight [O, I]`; see `quantize_gptq`, also for the errors raised."""
        return quantize_gptq(self.targets(weight), self.factor, scheme, scale_dtype, kept)

    def targets(self, weight: Tensor) -> Tensor:
        """Returns targets `[O, I]` in the original order."""
        if self.transfer is None:
            return weight
        import torch

        targets = torch.empty_like(weight)
        targets[:, self.factor.order] = weight[:, self.factor.order] @ self.transfer
        return targets


def _projections(root: Tensor, difference: Tensor) -> Tensor:
    """Returns `triu(D X^T U^T, 1) U` with `U = root^-1`, by triangular solves."""
    import torch

    seen = torch.linalg.solve_triangular(root, difference.T, upper=True).T
    return _divided(seen.triu(1), root)


def _divided(left: Tensor, right: Tensor) -> Tensor:
    """Returns `left right^-1`, `right` upper triangular."""
    import torch

    return cast("Tensor", torch.linalg.solve_triangular(right, left, upper=True, left=False))
