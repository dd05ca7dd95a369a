"""Packed linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points, float32 or int32 sums.

Four kernels over one layout. `cpu` multiplies by activations as they come, `cpu_sparse` does so and reads only
what 2:4 sparsity keeps, `cpu_int8` multiplies by the 8-bit activations that the checkpoint asks for. `cpu_w4a8`
rounds activations to 8 bits although the checkpoint does not ask for it: faster for many rows, and a little further
from the model, so it serves only the mode `w4a8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set
from compress.cpu.linear import (
    INPUT_MULTIPLE,
    SPARSE_BITS,
    Activations,
    CpuLinear,
    padded_features,
    stored_bits,
)
from compress.cpu.linear import sparse_unsupported_reason as words_unsupported_reason
from runtime.backends.base import DenseKernel, Linear, LinearKernel, Target

SCALE_BYTES, ZERO_BYTES = 2, 1


def prepare(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return CpuLinear(weight, bias)


def prepare_sparse(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return CpuLinear(weight, bias, sparse=True)


def prepare_int8(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return CpuLinear(weight, bias, activations=Activations.INT8_ROW)


def prepare_w4a8(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return CpuLinear(weight, bias, activations=Activations.INT8_GROUP)


def _unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return "computes in bfloat16 and float32"
    if (scheme.group_size or in_features) % INPUT_MULTIPLE:
        return f"takes groups that are a multiple of {INPUT_MULTIPLE}"
    return ""


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return (
        "keeps activations in 16 bits" if scheme.activation_bits else _unsupported_reason(scheme, in_features, target)
    )


def int8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return _unsupported_reason(scheme, in_features, target) if scheme.activation_bits else "needs 8-bit activations"


def sparse_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return unsupported_reason(scheme, in_features, target) or words_unsupported_reason(scheme)


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    groups = scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else ZERO_BYTES))
    return padded_features(rows) * (columns * stored_bits(scheme.bits) // 8 + groups)


def _sparse_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return padded_features(rows) * (columns * SPARSE_BITS // 8 + scheme.num_groups(columns) * SCALE_BYTES)


def _reads_rows(columns: int, target: Target) -> bool:
    return True


PACKED = LinearKernel(
    "cpu",
    "packed codes in C, float32 sums: exact weights",
    "int",
    unsupported_reason,
    prepare,
    _nbytes,
    _reads_rows,
)
SPARSE = LinearKernel(
    "cpu_sparse",
    "kept codes alone in C, float32 sums: exact weights",
    "int",
    sparse_unsupported_reason,
    prepare_sparse,
    _sparse_nbytes,
    _reads_rows,
)
INT8 = LinearKernel(
    "cpu_int8",
    "packed codes in C, 8-bit activations, exact int32 sums",
    "int",
    int8_unsupported_reason,
    prepare_int8,
    _nbytes,
    _reads_rows,
)
W4A8 = LinearKernel(
    "cpu_w4a8",
    "packed codes in C, activations rounded to 8 bits by groups",
    "int",
    unsupported_reason,
    prepare_w4a8,
    _nbytes,
    _reads_rows,
    mode="w4a8",
)


def dense_unsupported_reason(out_features: int, in_features: int, target: Target) -> str:
    """Why a dense weight cannot be multiplied in C on a target; "" when it can."""
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype != torch.bfloat16:
        return "holds bfloat16 numbers"
    if in_features % INPUT_MULTIPLE:
        return f"takes inputs that are a multiple of {INPUT_MULTIPLE}"
    if has_matrix_tiles():
        return "multiplies no matrix tiles (AMX), which oneDNN does on this CPU"
    return "" if has_vectors() else "has no vectors for this CPU"


def _dense_nbytes(out_features: int, in_features: int, target: Target) -> int:
    return padded_features(out_features) * in_features * target.dtype.itemsize


DENSE = DenseKernel(
    "cpu", "bfloat16 numbers in C, float32 sums", dense_unsupported_reason, CpuLinear, _dense_nbytes, True
)


def is_fast(dtype: torch.dtype) -> bool:
    """Whether the compiled kernels have vectors for products in a dtype."""
    return dtype == torch.bfloat16 and has_vectors()


def has_vectors() -> bool:
    """Whether the compiled kernels have vectors for this CPU."""
    return best_instruction_set() > INSTRUCTION_SETS.index("scalar")


def has_matrix_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 numbers (AMX), as oneDNN does and the compiled kernels do not."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))
