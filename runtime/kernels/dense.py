"""Linears that are not quantized."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.kernels.base import Linear, Target
from runtime.kernels.cpu import is_fast


class DenseLinear:
    """`F.linear` with the weight as it is; a memory-mapped weight stays mapped."""

    reads_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.index_select(0, indices).to(dtype)


class PrepackedLinear:
    """oneDNN with the weight in its own blocked layout: up to twice as fast as `F.linear` for few rows on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed, self._bias, "none", [], "")


def dense_linear(weight: Tensor, bias: Tensor | None, target: Target, *, reference: bool = False) -> Linear:
    """The best linear for a dense weight `[O, I]`; `reference` asks for plain `F.linear`."""
    weight = weight.to(target.device, target.dtype)
    return PrepackedLinear(weight, bias) if is_prepacked(target) and not reference else DenseLinear(weight, bias)


def is_prepacked(target: Target) -> bool:
    """Whether `dense_linear` makes a copy of its weight in oneDNN's layout."""
    return target.device.type == "cpu" and target.dtype == torch.bfloat16 and is_fast(torch.bfloat16)
