"""Dequantized once at load: exact weights at dense speed, for widths without a packed product."""

from __future__ import annotations

from torch import Tensor

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scheme import Scheme
from runtime.kernels.base import Kernel, Linear, Target
from runtime.kernels.dense import dense_linear


def prepare(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return dense_linear(weight.dequantize(target.dtype), bias, target)


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    return "" if scheme.activation_bits is None else "keeps activations in 16 bits"


KERNEL = Kernel("dequantized", "dequantized once at load: dense speed, dense memory", refuse, prepare)
