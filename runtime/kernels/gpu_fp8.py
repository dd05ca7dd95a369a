"""Linears of 8-bit floats on NVIDIA GPUs through Triton, which is imported when the first weight is prepared."""

from __future__ import annotations

from torch import Tensor

from compress.checkpoint.fp8 import Fp8Weight
from runtime.kernels.base import Kernel, Target
from runtime.kernels.gpu_linears import num_processors, refuse_gpu
from runtime.kernels.handover import InputForm, Prepared, Product


class Fp8Linear:
    """Codes as they are stored, with 16-bit activations, or with 8-bit floats where the scheme says so."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, target: Target) -> None:
        from runtime.kernels.gpu import launch_fp8

        self._weight = launch_fp8.place_fp8(weight, target, num_processors(target.device))
        self._bias = bias
        self._launch = launch_fp8
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch.multiply_fp8(x, self._weight, self._bias)

    def input_form(self, num_tokens: int) -> InputForm:
        return self._weight.form

    def product(self, x: Prepared) -> Product:
        return self._launch.fp8_parts(x, self._weight, self._bias)


KERNEL = Kernel("triton_fp8", "8-bit floats as they are stored, exact products, float32 sums", refuse_gpu, Fp8Linear)
