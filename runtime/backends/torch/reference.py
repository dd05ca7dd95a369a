"""The oracle: dequantize, multiply. Any width, group, dtype and device; memory of a few rows beside the codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import CodedWeight
from compress.checkpoint.weights.fp8 import quantize_tokens
from runtime.backends.base import Kernel, Target

PANEL_ELEMENTS = 2**22
"""Weights that are dense at one time."""


class ReferenceLinear:
    """Keeps codes as bytes and dequantizes rows on every call."""

    reads_rows = True

    def __init__(self, weight: CodedWeight, bias: Tensor | None, target: Target) -> None:
        (features, inputs), self.scheme = weight.shape, weight.scheme
        rows = max(1, PANEL_ELEMENTS // inputs)
        self.weight = weight.changed(lambda tensor: tensor.to(target.device))
        self.bias = bias
        self.panels = [self._slice(first, first + rows) for first in range(0, features, rows)]
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.scheme.activation_bits:
            levels, scale = quantize_tokens(x, self.scheme.fp8)
            y = (self._multiply(levels) * scale).to(x.dtype)
        else:
            y = self._multiply(x)
        return y if self.bias is None else y + self.bias

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.changed(lambda tensor: tensor.index_select(0, indices)).dequantize(dtype)

    def _slice(self, first: int, stop: int) -> CodedWeight:
        return self.weight.changed(lambda tensor: tensor[first:stop])

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.cat([functional.linear(x, panel.dequantize(x.dtype)) for panel in self.panels], -1)


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    return ""


KERNEL = Kernel("reference", "dequantizes on every call: the oracle, slow, least memory", refuse, ReferenceLinear)
