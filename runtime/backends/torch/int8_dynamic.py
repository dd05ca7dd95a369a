"""W8A8: int8 weights per output channel times int8 activations per token, summed in int32 by oneDNN.

oneDNN is fast for unsigned activations only (signed ones fall to a reference loop, a thousand times slower), so levels
are moved by 128 and the zero point undoes it. Its activation scale is one number per call, so it is 1 here and the
rows of the float32 result are scaled afterwards: exact per-token scales, whatever else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.fp8 import quantize_tokens
from compress.checkpoint.weights.integer import IntegerWeight
from runtime.backends.base import Kernel, Target
from runtime.backends.cpu.linear import has_byte_products

SHIFT = 128


class Int8DynamicLinear:
    """Weights in oneDNN's own blocked layout."""

    def __init__(self, weight: IntegerWeight, bias: Tensor | None, target: Target) -> None:
        offsets = (weight.codes.to(torch.int16) - weight.scheme.midpoint).to(torch.int8)
        self.nbytes = offsets.nbytes + weight.scale.nbytes
        self._packed = torch.ops.onednn.qlinear_prepack(offsets, None)
        self._scale = weight.scale[:, 0].float().contiguous()
        self._bias = bias
        self._zero = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        levels, scale = quantize_tokens(x)
        levels = levels.add_(SHIFT).to(torch.uint8)
        y = self._multiply(
            levels, 1.0, SHIFT, self._packed, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y.mul_(scale)
        return (y if self._bias is None else y + self._bias).to(x.dtype)


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits is None:
        return "needs 8-bit activations"
    if scheme.group_size is not None or not scheme.symmetric:
        return "takes symmetric weights with one scale per channel"
    if target.device.type != "cpu" or target.dtype == torch.float64:
        return "runs on CPUs, in 16 or 32 bits"
    if not has_byte_products():
        return "needs a CPU with 8-bit dot products (VNNI)"
    return ""


KERNEL = Kernel("int8_dynamic", "8-bit codes times 8-bit activations, exact int32 sums", refuse, Int8DynamicLinear)
