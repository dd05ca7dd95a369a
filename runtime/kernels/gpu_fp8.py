"""Linears of 8-bit floats on NVIDIA GPUs through Triton, which is imported when the first weight is prepared."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.fp8 import Fp8Weight
from compress.checkpoint.scheme import Scheme
from runtime.kernels.base import Kernel, Target
from runtime.kernels.gpu_linears import refuse_gpu
from runtime.kernels.handover import InputForm, Prepared, Product
from runtime.kernels.triton_device import has_capability, num_processors

NATIVE_CAPABILITY = (8, 9)
"""Compute capability since which GPUs multiply 8-bit floats: Ada and Hopper."""


class Fp8Linear:
    """Codes as they are stored, with 16-bit activations, or with 8-bit floats where the scheme says so."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, target: Target) -> None:
        from runtime.kernels.gpu import launch_fp8

        native, processors = multiplies_fp8(target.device), num_processors(target.device)
        self._weight = launch_fp8.place_fp8(weight, target, native, processors)
        self._bias = bias
        self._launch = launch_fp8
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch.multiply_fp8(x, self._weight, self._bias)

    def input_form(self, num_tokens: int) -> InputForm:
        return self._weight.form

    def product(self, x: Prepared) -> Product:
        return self._launch.fp8_parts(x, self._weight, self._bias)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floats itself; one that is not there, and only planned for, is taken to."""
    return device.type == "cuda" and has_capability(device, NATIVE_CAPABILITY)


def refuse_native(scheme: Scheme, in_features: int, target: Target) -> str:
    refusal = refuse_gpu(scheme, in_features, target)
    if refusal or scheme.activation_bits is None:
        return refusal or "needs 8-bit activations"
    return "" if multiplies_fp8(target.device) else "needs a GPU that multiplies 8-bit floats (Ada, Hopper or newer)"


NATIVE = Kernel("triton_fp8", "8-bit floats times 8-bit floats, float32 sums", refuse_native, Fp8Linear)
WIDENED = Kernel("triton_fp8_16bit", "8-bit floats multiplied in 16 bits, float32 sums", refuse_gpu, Fp8Linear)
KERNELS = (NATIVE, WIDENED)
