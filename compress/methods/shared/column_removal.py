"""Removal of input columns of a linear, with a fit of those that stay.

With inputs X the error of `W' X[kept]` against `W X` depends on the Hessian H = X X^T alone. The fit is that of
SparseGPT (Frantar & Alistarh 2023, https://arxiv.org/abs/2301.00774, section 3.1) for one mask of all rows, the score
that of ZipLM (Kurtic et al. 2023, https://arxiv.org/abs/2302.04089, section 3) with all units leaving at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01
"""Share of the mean of diag(H) that is added to it."""


def damped(hessian: Tensor) -> Tensor:
    """Returns `hessian [I, I]` in float64 with a diagonal that makes it positive definite."""
    found = hessian.double()
    mean = found.diagonal().mean()
    found.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    return found


def columns_of(units: Tensor, width: int) -> Tensor:
    """Returns the columns `[k * width]` of `units [k]`."""
    return (units[:, None] * width + torch.arange(width, device=units.device)).flatten()


def choose_fitted(weight: Tensor, hessian: Tensor, width: int, keep: int) -> tuple[Tensor, Tensor]:
    """Returns `keep` units of `width` columns that are fitted to the outputs of all.

    Args:
        weight: `[O, I]`.
        hessian: damped.

    Returns:
        The units `[keep]`, int64, ascending, and the weight `[O, keep * width]`, float64.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    units = fitted_scores(weight, inverse, width).topk(keep).indices.sort().values
    return units, fit(weight, hessian, columns_of(units, width))


def choose_by_norm(weight: Tensor, hessian: Tensor, width: int, keep: int) -> Tensor:
    """Returns the `keep` units of `weight [O, I]`, int64, ascending, whose columns have the highest sum of
    `|W_oc| * ||x_c||` (Wanda, Sun et al. 2024, https://arxiv.org/abs/2306.11695, section 3)."""
    scores = weight.double().abs().sum(0) * hessian.double().diagonal().sqrt()
    return scores.view(-1, width).sum(1).topk(keep).indices.sort().values


def fitted_scores(weight: Tensor, inverse: Tensor, width: int) -> Tensor:
    """Returns `[I / width]`, the squared error of the outputs of `weight [O, I]` without each unit after a fit of all
    others: `tr(W_u (H^-1_uu)^-1 W_u^T)`. `inverse`: of the damped Hessian."""
    units = weight.shape[1] // width
    blocks = inverse.view(units, width, units, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.double().view(-1, units, width).permute(1, 2, 0)
    scores: Tensor = (columns * torch.linalg.solve(blocks, columns)).sum((1, 2))
    return scores


def fit(weight: Tensor, hessian: Tensor, columns: Tensor) -> Tensor:
    """Returns `[O, k]` float64, the weight of `columns [k]` whose outputs are nearest to those of `weight [O, I]`.
    `hessian`: damped."""
    fitted: Tensor = torch.linalg.solve(hessian[columns][:, columns], hessian[columns] @ weight.double().T)
    return fitted.T


def relative_error(weight: Tensor, hessian: Tensor, columns: Tensor, kept: Tensor) -> float:
    """Returns the squared error of the outputs with `kept [O, k]` alone, relative to the squared outputs."""
    difference = weight.double().clone()
    difference[:, columns] -= kept.double()
    error, whole = (float((each @ hessian * each).sum()) for each in (difference, weight.double()))
    return error / whole if whole else 0.0
