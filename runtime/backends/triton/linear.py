"""Packed linears on NVIDIA GPUs through Triton, which is imported when the first weight is prepared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.kv_quant import hadamard_transform
from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.exl3 import CODEBOOKS, TURN, Exl3Weight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.checkpoint.weights.mxfp4 import FP4, Mxfp4Weight
from compress.checkpoint.weights.nvfp4 import Nvfp4Weight
from runtime.backends.base import Linear, LinearKernel, Target
from runtime.backends.measured import table_path
from runtime.backends.triton.device import gpu_name, multiplies_fp8, num_processors, unsupported_reason
from runtime.backends.triton.kernels.configs import Plan, default_plan, measured_plan
from runtime.backends.triton.kernels.weight_layout import interleave, interleaved_bytes
from runtime.backends.triton.sizes import cdiv

TABLES = Path(__file__).parent / "tables"
"""Measured kernel tables, one file per GPU, named after it."""
MEASURED_BITS = 4
"""Tables are of such codes: a tile of 2-bit codes takes twice the shared memory."""
UNIT = 32
"""Group sizes are a multiple of this, or the whole row."""


def prepare_codes(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    """2- to 8-bit codes in planes; which kernel runs is looked up by the number of tokens."""
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear

    planes = interleave(weight, target.device)
    tiles, rows, _ = planes.words.shape
    return W4A16Linear(planes, bias, _plan(target.device, planes.bits, rows, tiles, weight.shape))


def prepare_w8a8(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    """Codes of 5 to 8 bits as signed bytes; those of fewer bits keep their distance to the zero point."""
    from runtime.backends.triton.kernels.int8_gemm import W8A8Linear

    device = target.device
    codes = (weight.qweight.to(torch.int16) - weight.scheme.midpoint).to(torch.int8).to(device)
    return W8A8Linear(codes, weight.scales.T.contiguous().to(device), bias, num_processors(device))


def prepare_fp8(weight: Fp8Weight, bias: Tensor | None, target: Target) -> Linear:
    """8-bit floats as they are stored."""
    from runtime.backends.triton.kernels.fp8 import Fp8Linear

    device, rounds_inputs = target.device, weight.scheme.activation_bits is not None
    codes, scale = weight.qweight.view(torch.uint8).to(device), weight.scales[:, 0].contiguous().to(device)
    native = multiplies_fp8(device)
    return Fp8Linear(codes, scale, bias, rounds_inputs, native, num_processors(device), target.dtype)


def prepare_fp4(weight: Mxfp4Weight | Nvfp4Weight, bias: Tensor | None, target: Target) -> Linear:
    """4-bit floats, two in a byte, with scales in the dtype of activations."""
    from runtime.backends.triton.kernels.fp4 import Fp4Linear, packed_halves, padded_scales

    device, inputs = target.device, weight.shape[1]
    scales, row_scales = weight.factors()
    codes, scales = packed_halves(weight.qweight), padded_scales(scales, inputs, target.dtype)
    on_device = codes.to(device), scales.to(device), row_scales.contiguous().to(device)
    return Fp4Linear(*on_device, bias, inputs, num_processors(device))


def prepare_exl3(weight: Exl3Weight, bias: Tensor | None, target: Target) -> Linear:
    """Trellis codes as they are stored, with scales in float32."""
    from runtime.backends.triton.kernels.trellis import TrellisLinear

    device, scheme = target.device, weight.scheme
    words = weight.trellis.contiguous().view(torch.int32).to(device)
    scales = weight.suh.float().to(device) / TURN, weight.svh.float().to(device)
    turn = hadamard_transform(torch.eye(TURN)).to(device)
    codebook = CODEBOOKS.index(scheme.codebook)
    return TrellisLinear(words, *scales, turn, bias, scheme.bits, codebook, num_processors(device))


def _exl3_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * columns * scheme.bits // 8 + (rows + columns + TURN * TURN) * FLOAT_BYTES


def _fp4_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    filled = cdiv(columns, FP4_BLOCK) * FP4_BLOCK
    return rows * (filled // 2 + filled // (scheme.group_size or filled) * SCALE_BYTES + ROW_SCALE_BYTES)


def _plan(device: torch.device, bits: int, rows: int, tiles: int, shape: tuple[int, int]) -> Plan:
    gpu = gpu_name(device)
    if gpu and bits == MEASURED_BITS:
        path = table_path(TABLES, gpu)
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


SCALE_BYTES = 2
"""Bytes of a scale of 8-bit codes; checkpoints may hold wider ones."""


FLOAT_BYTES = 4
FP4_BLOCK, ROW_SCALE_BYTES = 128, 4
"""Inputs that 4-bit floats are padded to a multiple of, and bytes of the scale of a row."""


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else 1)))


def _fp8_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    reason = _linear_reason(scheme, in_features, target)
    if reason or scheme.activation_bits is None:
        return reason or "needs 8-bit activations"
    return "" if multiplies_fp8(target.device) else "needs a GPU that multiplies 8-bit floats (Ada, Hopper or newer)"


W4A16_KERNEL = LinearKernel(
    "triton_w4a16",
    "packed 2- to 4-bit codes, float32 sums",
    "int",
    _w4a16_reason,
    prepare_codes,
    interleaved_bytes,
)
W8A16_KERNEL = LinearKernel(
    "triton_w8a16",
    "packed 5- to 8-bit codes, float32 sums",
    "int",
    _w8a16_reason,
    prepare_codes,
    interleaved_bytes,
)
W8A8_KERNEL = LinearKernel(
    "triton_w8a8", "8-bit codes times 8-bit activations, exact int32 sums", "int", _w8a8_reason, prepare_w8a8, _nbytes
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
FP4_KERNEL = LinearKernel(
    "triton_fp4",
    "4-bit floats multiplied in 16 bits, float32 sums",
    FP4,
    lambda scheme, in_features, target: unsupported_reason(target.device, target.dtype),
    prepare_fp4,
    _fp4_nbytes,
)
EXL3_KERNEL = LinearKernel(
    "triton_exl3",
    "trellis codes decoded for every product, multiplied in TF32, float32 sums",
    "exl3",
    lambda scheme, in_features, target: unsupported_reason(target.device, target.dtype),
    prepare_exl3,
    _exl3_nbytes,
    saves_memory=True,
)
KERNELS = (W8A8_KERNEL, W4A16_KERNEL, W8A16_KERNEL, FP8_KERNEL, FP8_W8A16_KERNEL, FP4_KERNEL, EXL3_KERNEL)
