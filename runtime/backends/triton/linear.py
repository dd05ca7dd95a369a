"""Packed linears on NVIDIA GPUs through Triton, which is imported when the first weight is prepared."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from runtime.backends.base import LinearKernel, Target
from runtime.backends.triton.fused_linear import Q8_INT, ActivationLayout, PartialSums, QuantizedInput
from runtime.backends.triton.kernels.configs import Plan, config_for, default_plan, measured_plan
from runtime.backends.triton.kernels.weight_layout import interleaved_bytes

FIRST_CAPABILITY = (8, 0)
"""Ampere: asynchronous copies, bfloat16 and 8-bit products on tensor cores."""


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a GPU has a compute capability; one that is not there, and only planned for, is taken to."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= least


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Why no Triton kernel of a model serves a dtype on a device; empty where they may."""
    if reason := device_unsupported_reason(device):
        return reason
    return "" if dtype in (torch.bfloat16, torch.float16) else "computes in 16 bits"


def device_unsupported_reason(device: torch.device) -> str:
    """Why no Triton kernel runs on a device; empty where they may."""
    if device.type != "cuda":
        return "runs on NVIDIA GPUs"
    if not has_triton():
        return "needs Triton"
    if not has_capability(device, FIRST_CAPABILITY):
        return f"needs a GPU of compute capability {FIRST_CAPABILITY[0]}.{FIRST_CAPABILITY[1]} or newer"
    return ""


TABLES = Path(__file__).parent / "tables"
"""Measured kernel tables, one file per GPU, named after it."""
MEASURED_BITS = 4
"""Tables are of such codes: a tile of 2-bit codes takes twice the shared memory."""
UNIT = 32
SCALE_BYTES = 2
"""Group sizes are a multiple of this, or the whole row."""


class InterleavedLinear:
    """2- to 4-bit codes in planes; which kernel runs is looked up by the number of tokens."""

    def __init__(self, weight: IntegerWeight, bias: Tensor | None, target: Target) -> None:
        from runtime.backends.triton.kernels import w4a16
        from runtime.backends.triton.kernels.weight_layout import interleave

        self._weight = interleave(weight, target.device)
        self._bias = bias
        tiles, rows, _ = self._weight.words.shape
        self._plan = _plan(target.device, self._weight.bits, rows, tiles, weight.shape)
        self._launch = w4a16
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch.multiply_w4a16(x, self._weight, self._bias, config_for(self._plan, len(x)))

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return self._launch.activation_layout(self._weight, config_for(self._plan, num_tokens))

    def product(self, x: QuantizedInput) -> PartialSums:
        return self._launch.product(x, self._weight, self._bias, config_for(self._plan, len(x.rows)))


class Int8Linear:
    """8-bit codes with 16-bit activations, or with 8-bit ones where the scheme says so."""

    def __init__(self, weight: IntegerWeight, bias: Tensor | None, target: Target) -> None:
        from runtime.backends.triton.kernels import int8_gemm

        self._weight = int8_gemm.pack_int8(weight, target.device)
        self._bias = bias
        self._processors = num_processors(target.device)
        self._rounds = weight.scheme.activation_bits is not None
        self._launch = int8_gemm
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        multiply = self._launch.multiply_int8 if self._rounds else self._launch.multiply_w8a16
        return multiply(x, self._weight, self._bias, self._processors)

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return ActivationLayout(Q8_INT) if self._rounds else ActivationLayout()

    def product(self, x: QuantizedInput) -> PartialSums:
        parts = self._launch.int8_partial_sums if self._rounds else self._launch.w8a16_partial_sums
        return parts(x, self._weight, self._bias, self._processors)


def table_path(gpu: str) -> Path:
    """Where the measured table of a GPU stands, by the name that its driver gives."""
    return TABLES / f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def _plan(device: torch.device, bits: int, rows: int, tiles: int, shape: tuple[int, int]) -> Plan:
    if device.type == "cuda" and bits == MEASURED_BITS:
        gpu = torch.cuda.get_device_name(device)
        path = table_path(gpu)
        measured = measured_plan(path, gpu, *shape) if path.is_file() else None
        if measured is not None:
            return measured
    return default_plan(bits, rows, tiles, num_processors(device))


def linear_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """Why no Triton linear serves a scheme on a target; empty where one may."""
    if reason := unsupported_reason(target.device, target.dtype):
        return reason
    if scheme.group_size is not None and scheme.group_size % UNIT:
        return f"takes groups that are a multiple of {UNIT}"
    return ""


def w4a16_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.bits > 4 or scheme.activation_bits is not None:
        return "takes 2 to 4 bits and 16-bit activations"
    return linear_unsupported_reason(scheme, in_features, target)


def w8a16_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if not 4 < scheme.bits <= 8 or scheme.activation_bits is not None:
        return "takes 5 to 8 bits and 16-bit activations"
    return linear_unsupported_reason(scheme, in_features, target)


def w8a8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits is None:
        return "needs 8-bit activations"
    if scheme.group_size is not None or not scheme.symmetric:
        return "takes symmetric weights with one scale per channel"
    return linear_unsupported_reason(scheme, in_features, target)


def _bytes_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else 1)))


def _planes_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return interleaved_bytes(scheme, rows, columns, SCALE_BYTES)


W4A16_KERNEL = LinearKernel(
    "triton_w4a16",
    "packed 2- to 4-bit codes, float32 sums",
    "int",
    w4a16_unsupported_reason,
    InterleavedLinear,
    _planes_nbytes,
)
W8A16_KERNEL = LinearKernel(
    "triton_w8a16",
    "8-bit codes, 16-bit activations, float32 sums",
    "int",
    w8a16_unsupported_reason,
    Int8Linear,
    _bytes_nbytes,
)
W8A8_KERNEL = LinearKernel(
    "triton_w8a8",
    "8-bit codes times 8-bit activations, exact int32 sums",
    "int",
    w8a8_unsupported_reason,
    Int8Linear,
    _bytes_nbytes,
)
KERNELS = (W8A8_KERNEL, W4A16_KERNEL, W8A16_KERNEL)


NATIVE_CAPABILITY = (8, 9)
"""Compute capability since which GPUs multiply 8-bit floats: Ada and Hopper."""


class Fp8Linear:
    """Codes as they are stored, with 16-bit activations, or with 8-bit floats where the scheme says so."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, target: Target) -> None:
        from runtime.backends.triton.kernels import fp8

        native, processors = multiplies_fp8(target.device), num_processors(target.device)
        self._weight = fp8.place_fp8(weight, target, native, processors)
        self._bias = bias
        self._launch = fp8
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch.multiply_fp8(x, self._weight, self._bias)

    def activation_layout(self, num_tokens: int) -> ActivationLayout:
        return self._weight.form

    def product(self, x: QuantizedInput) -> PartialSums:
        return self._launch.fp8_partial_sums(x, self._weight, self._bias)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floats itself; one that is not there, and only planned for, is taken to."""
    return device.type == "cuda" and has_capability(device, NATIVE_CAPABILITY)


def fp8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    reason = linear_unsupported_reason(scheme, in_features, target)
    if reason or scheme.activation_bits is None:
        return reason or "needs 8-bit activations"
    return "" if multiplies_fp8(target.device) else "needs a GPU that multiplies 8-bit floats (Ada, Hopper or newer)"


FP8_KERNEL = LinearKernel(
    "triton_fp8",
    "8-bit floats times 8-bit floats, float32 sums",
    "float",
    fp8_unsupported_reason,
    Fp8Linear,
    _bytes_nbytes,
)
FP8_W8A16_KERNEL = LinearKernel(
    "triton_fp8_w8a16",
    "8-bit floats multiplied in 16 bits, float32 sums",
    "float",
    linear_unsupported_reason,
    Fp8Linear,
    _bytes_nbytes,
)
FP8_KERNELS = (FP8_KERNEL, FP8_W8A16_KERNEL)
