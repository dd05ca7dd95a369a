"""Dequantized once at load: exact weights at dense speed, for widths without a packed product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import CodedWeight
from compress.checkpoint.weights.fp8 import round_tokens
from runtime.backends.base import Kernel, Linear, Target
from runtime.backends.torch.linear import dense_linear


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """A linear whose inputs are rounded to 8-bit floats, token by token."""

    linear: Linear

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(round_tokens(x, fp8=True))


def prepare(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    linear = dense_linear(weight.dequantize(target.dtype), bias, target)
    return RoundedInputs(linear) if weight.scheme.activation_bits else linear


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    return "keeps activations in 16 bits" if scheme.activation_bits and not scheme.fp8 else ""


KERNEL = Kernel("dequantized", "dequantized once at load: dense speed, dense memory", refuse, prepare)
