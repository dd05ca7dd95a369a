"""Several linears over the same input as one call: fused into one weight where their schemes agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.fp8 import Fp8Weight
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.low_rank import LowRankWeight
from compress.checkpoint.outliers import OutlierWeight
from compress.checkpoint.packed import CodedWeight
from runtime.kernels.base import Linear

Weight = CodedWeight | LowRankWeight | OutlierWeight | Tensor


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Linears over the same input whose schemes differ, so that they cannot be one weight."""

    parts: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def fuse_weights(weights: Sequence[Weight]) -> Weight | None:
    """Weights over the same input as one weight along the output features; None when their schemes or dtypes differ, or
    when one is of low rank: each has a right factor of its own. With outlier columns they must be the same."""
    if len(weights) == 1:
        return weights[0]
    if any(isinstance(weight, LowRankWeight) for weight in weights):
        return None
    mixed = [weight for weight in weights if isinstance(weight, OutlierWeight)]
    if mixed:
        return _fuse_outliers(mixed) if len(mixed) == len(weights) else None
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    packed = [weight for weight in weights if isinstance(weight, CodedWeight)]
    kinds = {weight.dtype for weight in dense} | {(weight.scheme, weight.scale.dtype) for weight in packed}
    if len(kinds) > 1:
        return None
    if dense:
        return torch.cat(dense)
    return _stacked(packed)


def _stacked(weights: Sequence[CodedWeight]) -> CodedWeight:
    """Weights of one scheme as one, along the output features."""
    codes, scale = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scale"))
    zeros = [weight.zero for weight in weights if isinstance(weight, IntegerWeight)]
    scheme = weights[0].scheme
    return IntegerWeight(codes, scale, torch.cat(zeros), scheme) if zeros else Fp8Weight(codes, scale, scheme)


def _fuse_outliers(weights: Sequence[OutlierWeight]) -> OutlierWeight | None:
    first = weights[0]
    base = fuse_weights([weight.base for weight in weights])
    same = all(torch.equal(weight.columns, first.columns) for weight in weights)
    if not isinstance(base, IntegerWeight) or not same:
        return None
    return OutlierWeight(base, first.columns, torch.cat([weight.values for weight in weights]), first.scheme)


def fuse_biases(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Biases side by side, zeros where there is none; None when no part has one."""
    present = next((bias for bias in biases if bias is not None), None)
    if present is None:
        return None
    return torch.cat([present.new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True)])
