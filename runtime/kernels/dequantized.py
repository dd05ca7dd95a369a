"""Dequantized once at load: exact weights at dense speed, for widths without a packed product."""

from __future__ import annotations

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scheme import Scheme
from runtime.kernels.base import Kernel, Product, Target
from runtime.kernels.dense import dense_product


def prepare(weight: IntegerWeight, target: Target) -> Product:
    return dense_product(weight.dequantize(target.dtype), target)


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    return "" if scheme.activation_bits is None else "activations are quantized too"


KERNEL = Kernel("dequantized", "dequantized once at load: dense speed, dense memory", refuse, prepare)
