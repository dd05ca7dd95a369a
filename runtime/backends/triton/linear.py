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
from runtime.backends.base import Linear, LinearKernel, Target
from runtime.backends.triton.kernels.configs import Plan, default_plan, measured_plan
from runtime.backends.triton.kernels.weight_layout import SCALE_BYTES, interleave, interleaved_bytes

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
"""Group sizes are a multiple of this, or the whole row."""


def prepare_w4a16(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    """2- to 4-bit codes in planes; which kernel runs is looked up by the number of tokens."""
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear

    planes = interleave(weight, target.device)
    tiles, rows, _ = planes.words.shape
    return W4A16Linear(planes, bias, _plan(target.device, planes.bits, rows, tiles, weight.shape))


def prepare_int8(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    """Codes of 5 to 8 bits as signed bytes; those of fewer bits keep their distance to the zero point."""
    from runtime.backends.triton.kernels.int8_gemm import W8A8Linear, W8A16Linear

    scheme, device = weight.scheme, target.device
    codes, zero = (
        (t.to(torch.int16) - scheme.midpoint).to(torch.int8).to(device) for t in (weight.qweight, weight.zero_points)
    )
    return (W8A16Linear if scheme.activation_bits is None else W8A8Linear)(
        codes,
        weight.scales.T.contiguous().to(device),
        None if scheme.symmetric else zero.T.contiguous(),
        scheme.group_size or 0,
        bias,
        num_processors(device),
    )


def prepare_fp8(weight: Fp8Weight, bias: Tensor | None, target: Target) -> Linear:
    """8-bit floats as they are stored."""
    from runtime.backends.triton.kernels.fp8 import Fp8Linear

    device, rounds_inputs = target.device, weight.scheme.activation_bits is not None
    codes, scale = weight.qweight.view(torch.uint8).to(device), weight.scales[:, 0].contiguous().to(device)
    native = multiplies_fp8(device)
    return Fp8Linear(codes, scale, bias, rounds_inputs, native, num_processors(device), target.dtype)


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


def _linear_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """Why no Triton linear serves a scheme on a target; empty where one may."""
    if reason := unsupported_reason(target.device, target.dtype):
        return reason
    if scheme.group_size is not None and scheme.group_size % UNIT:
        return f"takes groups that are a multiple of {UNIT}"
    return ""


def _w4a16_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.bits > 4 or scheme.activation_bits is not None:
        return "takes 2 to 4 bits and 16-bit activations"
    return _linear_reason(scheme, in_features, target)


def _w8a16_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if not 4 < scheme.bits <= 8 or scheme.activation_bits is not None:
        return "takes 5 to 8 bits and 16-bit activations"
    return _linear_reason(scheme, in_features, target)


def _w8a8_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits is None:
        return "needs 8-bit activations"
    if scheme.group_size is not None or not scheme.symmetric:
        return "takes symmetric weights with one scale per channel"
    return _linear_reason(scheme, in_features, target)


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else 1)))


NATIVE_CAPABILITY = (8, 9)
"""Compute capability since which GPUs multiply 8-bit floats: Ada and Hopper."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floats itself; one that is not there, and only planned for, is taken to."""
    return device.type == "cuda" and has_capability(device, NATIVE_CAPABILITY)


def _fp8_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    reason = _linear_reason(scheme, in_features, target)
    if reason or scheme.activation_bits is None:
        return reason or "needs 8-bit activations"
    return "" if multiplies_fp8(target.device) else "needs a GPU that multiplies 8-bit floats (Ada, Hopper or newer)"


W4A16_KERNEL = LinearKernel(
    "triton_w4a16", "packed 2- to 4-bit codes, float32 sums", "int", _w4a16_reason, prepare_w4a16, interleaved_bytes
)
W8A16_KERNEL = LinearKernel(
    "triton_w8a16", "8-bit codes, 16-bit activations, float32 sums", "int", _w8a16_reason, prepare_int8, _nbytes
)
W8A8_KERNEL = LinearKernel(
    "triton_w8a8", "8-bit codes times 8-bit activations, exact int32 sums", "int", _w8a8_reason, prepare_int8, _nbytes
)
FP8_KERNEL = LinearKernel(
    "triton_fp8", "8-bit floats times 8-bit floats, float32 sums", "float", _fp8_reason, prepare_fp8, _nbytes
)
FP8_W8A16_KERNEL = LinearKernel(
    "triton_fp8_w8a16",
    "8-bit floats multiplied in 16 bits, float32 sums",
    "float",
    _linear_reason,
    prepare_fp8,
    _nbytes,
)
KERNELS = (W8A8_KERNEL, W4A16_KERNEL, W8A16_KERNEL, FP8_KERNEL, FP8_W8A16_KERNEL)
