"""The oracle: dequantize, multiply. Any width, group, dtype and device; memory of a few rows beside the codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.activations import quantize_tokens
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scheme import Scheme
from runtime.kernels.base import Kernel, Target

PANEL_ELEMENTS = 2**22
"""Weights that are dense at one time."""


class ReferenceLinear:
    """Keeps codes as bytes and dequantizes rows on every call."""

    reads_rows = True

    def __init__(self, weight: IntegerWeight, bias: Tensor | None, target: Target) -> None:
        codes, scale, zero = (t.to(target.device) for t in (weight.codes, weight.scale, weight.zero))
        rows = max(1, PANEL_ELEMENTS // codes.shape[1])
        parts = zip(codes.split(rows), scale.split(rows), zero.split(rows), strict=True)
        self.weight = IntegerWeight(codes, scale, zero, weight.scheme)
        self.bias = bias
        self.panels = [IntegerWeight(*part, weight.scheme) for part in parts]
        self.nbytes = codes.nbytes + scale.nbytes + zero.nbytes
        self.quantize_activations = weight.scheme.activation_bits is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self.quantize_activations:
            levels, scale = quantize_tokens(x)
            y = (self._multiply(levels) * scale).to(x.dtype)
        else:
            y = self._multiply(x)
        return y if self.bias is None else y + self.bias

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        codes, scale, zero = (each.index_select(0, indices) for each in (weight.codes, weight.scale, weight.zero))
        return IntegerWeight(codes, scale, zero, weight.scheme).dequantize(dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.cat([functional.linear(x, panel.dequantize(x.dtype)) for panel in self.panels], -1)


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    return ""


KERNEL = Kernel("reference", "dequantizes on every call: the oracle, slow, least memory", refuse, ReferenceLinear)
