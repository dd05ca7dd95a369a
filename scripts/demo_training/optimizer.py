"""Muon on the matrices, Adam on embeddings and norms, with a state that is a flat dictionary of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95
BETAS, EPSILON = (0.9, 0.95), 1e-8
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al., "Muon", 2024: maximal slope at zero


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, by a quintic Newton-Schulz iteration in bfloat16."""
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class MuonAdam:
    """Two learning rates and one step. `state` holds every tensor a resumed run needs."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], muon_lr: float, adam_lr: float) -> None:
        self.params = dict(named)
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.matrices = [n for n, p in self.params.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        self.others = [n for n in self.params if n not in set(self.matrices)]
        slots = [("momentum", n) for n in self.matrices] + [(s, n) for n in self.others for s in ("mean", "square")]
        self.state = {f"{slot}.{n}": torch.zeros_like(self.params[n]) for slot, n in slots}

    @torch.no_grad()
    def step(self, number: int, scale: float) -> None:
        """Update number `number` (from 0) with both learning rates times `scale`."""
        for name in self.matrices:
            self._muon(name, self.muon_lr * scale)
        for name in self.others:
            self._adam(name, self.adam_lr * scale, number + 1)
        for parameter in self.params.values():
            parameter.grad = None

    def _muon(self, name: str, lr: float) -> None:
        p, momentum = self.params[name], self.state[f"momentum.{name}"]
        momentum.lerp_(p.grad, 1 - MOMENTUM)
        update = orthogonalize(p.grad.lerp(momentum, MOMENTUM))
        p.sub_(update, alpha=lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

    def _adam(self, name: str, lr: float, count: int) -> None:
        p, mean, square = self.params[name], self.state[f"mean.{name}"], self.state[f"square.{name}"]
        mean.lerp_(p.grad, 1 - BETAS[0])
        square.lerp_(p.grad.square(), 1 - BETAS[1])
        denominator = (square / (1 - BETAS[1] ** count)).sqrt_().add_(EPSILON)
        p.addcdiv_(mean, denominator, value=-lr / (1 - BETAS[0] ** count))
