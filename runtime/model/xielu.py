"""xIELU (arXiv:2411.13010): an activation whose curve is learned, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Xielu:
    """Quadratic above 0, exponential with a linear part below; both alphas are stored before their softplus."""

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[T, I]` of `x [T, I]`, a new tensor."""
        above = functional.softplus(self.alpha_p) * x * x
        below = (torch.expm1(torch.min(x, self.eps)) - x) * (self.beta + functional.softplus(self.alpha_n))
        return torch.where(x > 0, above, below).add_(self.beta * x)
