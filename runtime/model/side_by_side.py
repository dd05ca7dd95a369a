"""Linears over one input, as one weight where their forms allow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.weights import Weight
from runtime.backends.base import Linear


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Linears over one input whose schemes differ, so that they cannot be one weight."""

    parts: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def fuse_weights(weights: Sequence[Weight | Tensor]) -> Weight | Tensor | None:
    """Concatenates weights over one input along the output features; None when their forms or dtypes differ, or when
    their form does not allow it."""
    if len(weights) == 1:
        return weights[0]
    packed = [weight for weight in weights if isinstance(weight, Weight)]
    if len(packed) == len(weights):
        return packed[0].fuse(packed[1:])
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    return torch.cat(dense) if len(dense) == len(weights) and len({weight.dtype for weight in dense}) == 1 else None


def fuse_biases(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Concatenates biases, with zeros for parts without one; None when no part has one."""
    present = next((bias for bias in biases if bias is not None), None)
    if present is None:
        return None
    return torch.cat([present.new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True)])
