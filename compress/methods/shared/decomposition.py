"""Low-rank decomposition of a weight into two factors with the least error of the layer's output.

`W S = U diag(sigma) V^T` is truncated to the largest singular values, and the right factor is multiplied by S^-1. The
methods differ in S: the identity (plain SVD: the least error of the weight); the diagonal of mean |x|^alpha (ASVD, Yuan
et al. 2023, https://arxiv.org/abs/2312.05821, section 3.2); or a Cholesky factor of the inputs' second moments
(SVD-LLM, Wang et al. 2024, https://arxiv.org/abs/2403.07378, section 3.1), for which the mean squared output error is
exactly the sum of the squared singular values that are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from compress.common.device import require_finite
from compress.common.errors import NumericsError

ALPHA = 0.5
DAMPING = (0.01, 0.1, 1.0)
"""Shares of the mean second moment added to the diagonal, tried in turn, as for GPTQ's Hessian."""
FLOOR = 1e-4
"""Lower bound on ASVD's input scales, relative to the mean, because their inverse is needed."""


@dataclass(frozen=True, slots=True)
class Whitening:
    """Whitening matrix of a weight, with its provenance.

    Attributes:
        root: float64: `[I, I]` lower triangular, `[I]` diagonal, or None for the identity.
        damping: share of the mean second moment added to the diagonal; None without second moments.
        recovery: line for the report about a fallback; empty without one.
    """

    root: Tensor | None = None
    damping: float | None = None
    recovery: str = ""

    def to(self, device: torch.device) -> Whitening:
        """Returns the same whitening on `device`."""
        return self if self.root is None else replace(self, root=self.root.to(device))

    def apply(self, weight: Tensor) -> Tensor:
        """Returns `W S`, float64 `[O, I]`."""
        if self.root is None:
            return weight
        return weight * self.root if self.root.dim() == 1 else weight @ self.root

    def undo(self, right: Tensor) -> Tensor:
        """Returns `right S^-1`, float64 `[r, I]`."""
        if self.root is None:
            return right
        if self.root.dim() == 1:
            return right / self.root
        return cast(Tensor, torch.linalg.solve_triangular(self.root, right, upper=False, left=False))


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Decomposition of a weight `[O, I]` into ranks, in order of output energy.

    Attributes:
        left: float32 `[O, n]`, times the square roots of the singular values.
        right: float32 `[n, I]`, times the square roots, with whitening undone.
        energies: float64 `[min(O, I)]`, squared singular values, descending, including ranks beyond n.
    """

    left: Tensor
    right: Tensor
    energies: Tensor

    def to(self, device: torch.device) -> Decomposition:
        """Returns the same factors on `device`."""
        return Decomposition(self.left.to(device), self.right.to(device), self.energies.to(device))

    def truncated(self, rank: int) -> tuple[Tensor, Tensor]:
        """Returns the factors `[O, rank]` and `[rank, I]` of least error."""
        return self.left[:, :rank].contiguous(), self.right[:rank].contiguous()


def scale_inputs(abs_mean: Tensor, alpha: float = ALPHA) -> Whitening:
    """Returns ASVD's diagonal from `abs_mean [I]`, the mean magnitude of each input. Raises NumericsError: `abs_mean`
    contains NaN or infinity."""
    require_finite(abs_mean, "the mean input magnitude")
    mean = abs_mean.double().mean()
    if float(mean) == 0:
        return Whitening(recovery="svd: every calibration input was zero")
    return Whitening((abs_mean.double() / mean).clamp(min=FLOOR).pow(alpha))


def whiten(second_moment: Tensor, damping: tuple[float, ...] = DAMPING) -> Whitening:
    """Returns SVD-LLM's factor L of `second_moment [I, I] = L L^T`, the mean of x x^T. If it is not positive definite,
    increasing damping is added to its diagonal, and finally its eigenvalues are raised to a floor; the result records
    which. Raises NumericsError: `second_moment` contains NaN or infinity."""
    require_finite(second_moment, "the inputs' second moments")
    moment = second_moment.double()
    mean = float(moment.diagonal().mean())
    if mean <= 0:
        return Whitening(recovery="svd: every calibration input was zero")
    for share in damping:
        damped = moment.clone()
        damped.diagonal().add_(share * mean)
        factor, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            return Whitening(factor, share, "" if share == damping[0] else f"damping raised to {share:g}")
    values, vectors = torch.linalg.eigh(moment)
    floored = (vectors * values.clamp(min=damping[0] * mean)) @ vectors.T
    recovery = f"eigenvalues raised to at least {damping[0]:g} of the mean diagonal"
    return Whitening(torch.linalg.cholesky(floored), None, recovery)


def spectrum(weight: Tensor, whitening: Whitening) -> Tensor:
    """Returns the energies of `decompose` without the factors, float64 `[min(O, I)]`, in a fraction of the time. Raises
    NumericsError: as `decompose`."""
    with _searching(weight):
        return torch.square(torch.linalg.svdvals(whitening.apply(weight.double())))


@contextmanager
def _searching(weight: Tensor) -> Iterator[None]:
    require_finite(weight, "the weight")
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise NumericsError(
            f"the singular value decomposition of a weight {tuple(weight.shape)} failed: {error}",
            "Leave this layer out with --ignore, or use --method svd",
        ) from error


def decompose(weight: Tensor, whitening: Whitening, most: int) -> Decomposition:
    """Computes the exact singular value decomposition of the whitened `weight [O, I]` in float64. Raises NumericsError:
    the weight contains NaN or infinity, or the decomposition failed. `most`: maximum number of ranks in the factors."""
    with _searching(weight):
        left, sigma, right = torch.linalg.svd(whitening.apply(weight.double()), full_matrices=False)
    roots = sigma[:most].sqrt()
    right = whitening.undo(roots.unsqueeze(1) * right[:most])
    return Decomposition((left[:, :most] * roots).float(), right.float(), sigma.square())
