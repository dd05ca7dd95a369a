"""Kernels that serve linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points.

One kernel for each kind of codes over one layout. `cpu` multiplies integers by activations as they come, `cpu_sparse`
does so and reads only what 2:4 sparsity keeps, `cpu_int8` and `cpu_int4` multiply by the 8-bit and 4-bit activations
that the checkpoint asks for. `cpu_w4a8` rounds activations to 8 bits although the checkpoint does not ask for it:
faster for many rows, and a little further from the model, so it serves only the mode `8bit`. `cpu_k` multiplies
integers with scales and minima of blocks, `cpu_table` looks codes up in the table of their form, `cpu_fp8` widens
8-bit floats (e4m3), both whatever their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.activations import EIGHT_BITS
from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.coded import FLOAT8, INTEGERS, TABLE, Coded, CodedWeight
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set
from runtime.backends.backend import DenseKernel, LinearKernel
from runtime.backends.base import Linear, Target
from runtime.backends.cpu.choice import dense_refusal, describe
from runtime.backends.cpu.kept_codes import kept_unsupported_reason
from runtime.backends.cpu.linear import Activations, CpuLinear, form_of
from runtime.backends.cpu.weight_layout import (
    INPUT_MULTIPLE,
    SMALL_GROUP,
    SPARSE_BITS,
    TILE,
    compiled_group,
    padded_features,
    stored_bits,
)
from runtime.backends.prepared_weight import Layout
from runtime.backends.torch.quantized_linear import RoundedInputs

SCALE_BYTES, ZERO_BYTES, STEP_BYTES = 2, 1, 1
FLOAT32_BYTES, EXPONENT_BYTES = 4, 1


def _basic_reason(in_features: int, target: Target) -> str:
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return "computes in bfloat16 and float32"
    return f"takes inputs that are a multiple of {INPUT_MULTIPLE}" if in_features % INPUT_MULTIPLE else ""


def _unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if reason := _basic_reason(in_features, target):
        return reason
    group = scheme.group_size or in_features
    fits = group % INPUT_MULTIPLE == 0 or group == SMALL_GROUP
    return "" if fits else f"takes groups that are a multiple of {INPUT_MULTIPLE}, or {SMALL_GROUP}"


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits:
        return "keeps activations in 16 bits"
    return _unsupported_reason(scheme, in_features, target)


def _small_reason(scheme: Scheme) -> str:
    return f"takes groups that are a multiple of {INPUT_MULTIPLE}" if scheme.group_size == SMALL_GROUP else ""


def rounded_unsupported_reason(bits: int, scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits != bits:
        return f"needs {bits}-bit activations"
    return _unsupported_reason(scheme, in_features, target) or _small_reason(scheme)


def w4a8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits:
        return "rounds activations that the checkpoint has in 16 bits"
    return _unsupported_reason(scheme, in_features, target) or _small_reason(scheme)


def sparse_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    small = _small_reason(scheme)
    return unsupported_reason(scheme, in_features, target) or small or kept_unsupported_reason(scheme)


def _detail(activations: Activations) -> Callable[[Scheme], str]:
    return lambda scheme: describe(form_of(stored_bits(scheme.bits), activations))


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    groups = scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else ZERO_BYTES))
    return padded_features(rows) * (columns * stored_bits(scheme.bits) // 8 + groups)


def _sparse_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return padded_features(rows) * (columns * SPARSE_BITS // 8 + scheme.num_groups(columns) * SCALE_BYTES)


def coded_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    fits = isinstance(scheme, Coded) and compiled_group(scheme, in_features) % SMALL_GROUP == 0
    return _basic_reason(in_features, target) or ("" if fits else f"takes groups that {SMALL_GROUP} divides")


def prepare_coded(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    linear = CpuLinear(weight, bias)
    return RoundedInputs(linear) if weight.scheme.activation_bits else linear


def _coded_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    """Tables have scales in bfloat16 or float16, or in float32 where they are stored so; blocks of whole tiles have a
    scale for each tile."""
    if not isinstance(scheme, Coded):
        raise TypeError(f"{scheme} has no codes under scales")
    padded, groups, kind = padded_features(rows), columns // compiled_group(scheme, columns), scheme.scales
    size = {"float32": FLOAT32_BYTES, "uint8": EXPONENT_BYTES if scheme.numbers == FLOAT8 else SCALE_BYTES}
    scales = (scheme.num_blocks(columns) if kind.step_bits else groups) * size.get(kind.dtype, SCALE_BYTES)
    steps = groups * STEP_BYTES if kind.step_bits else 0
    scaled = padded // TILE if scheme.block_rows % TILE == 0 else padded
    codes = padded * columns * stored_bits(scheme.bits) // 8
    return codes + scaled * (scales + steps) * (2 if kind.has_minima else 1)


def _reads_rows(columns: int, target: Target) -> bool:
    return True


PACKED: LinearKernel[CodedWeight] = LinearKernel(
    "cpu",
    "packed codes in C, float32 sums: exact weights",
    "int",
    unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias),
    _nbytes,
    _reads_rows,
    detail=_detail(Activations.FLOAT),
    layout=Layout("codes", CpuLinear),
)
SPARSE: LinearKernel[CodedWeight] = LinearKernel(
    "cpu_sparse",
    "kept codes alone in C, float32 sums: exact weights",
    "int",
    sparse_unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, sparse=True),
    _sparse_nbytes,
    _reads_rows,
    layout=Layout("kept codes", CpuLinear),
)


def coded_kernel(name: str, numbers: str, summary: str, restored: Layout) -> LinearKernel[CodedWeight]:
    """Returns the kernel of one kind of codes, whatever their form and scales."""
    return LinearKernel(
        name,
        f"{summary}, float32 sums: exact weights",
        numbers,
        coded_unsupported_reason,
        prepare_coded,
        _coded_nbytes,
        _reads_rows,
        detail=_detail(Activations.FLOAT),
        layout=restored,
    )


BLOCKS = coded_kernel(
    "cpu_k", INTEGERS, "packed codes with scales of blocks in C", Layout("codes with scales of blocks", CpuLinear)
)
TABLES = coded_kernel("cpu_table", TABLE, "numbers of a table looked up in C", Layout("numbers of a table", CpuLinear))
FLOATS8 = coded_kernel(
    "cpu_fp8",
    FLOAT8,
    "8-bit floats widened in C",
    Layout("8-bit floats", lambda weight, bias: CpuLinear(weight, bias, is_e4m3=True)),
)


def rounded_kernel(bits: int, activations: Activations) -> LinearKernel[CodedWeight]:
    """Returns the kernel of integers with inputs that the checkpoint rounds to `bits`, token by token."""
    return LinearKernel(
        f"cpu_int{bits}",
        f"packed codes in C, {bits}-bit activations, exact int32 sums",
        "int",
        partial(rounded_unsupported_reason, bits),
        lambda weight, bias, target: CpuLinear(weight, bias, activations=activations),
        _nbytes,
        _reads_rows,
        detail=_detail(activations),
        layout=Layout("codes", lambda weight, bias: CpuLinear(weight, bias, activations=activations)),
    )


INT8, INT4 = rounded_kernel(8, Activations.INT8_ROW), rounded_kernel(4, Activations.INT4_ROW)
W4A8: LinearKernel[CodedWeight] = LinearKernel(
    "cpu_w4a8",
    "packed codes in C, activations rounded to 8 bits by groups",
    "int",
    w4a8_unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, activations=Activations.INT8_GROUP),
    _nbytes,
    _reads_rows,
    mode=EIGHT_BITS,
    detail=_detail(Activations.INT8_GROUP),
    layout=Layout("codes", lambda weight, bias: CpuLinear(weight, bias, activations=Activations.INT8_GROUP)),
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
    return dense_refusal() if has_vectors() else "has no vectors for this CPU"


def _dense_nbytes(out_features: int, in_features: int, target: Target) -> int:
    return padded_features(out_features) * in_features * target.dtype.itemsize


DENSE = DenseKernel(
    "cpu",
    "bfloat16 numbers in C, float32 sums",
    dense_unsupported_reason,
    CpuLinear,
    _dense_nbytes,
    True,
    layout=Layout("bfloat16 numbers", CpuLinear),
)


def is_fast(dtype: torch.dtype) -> bool:
    """Whether the compiled kernels have vectors for products in a dtype."""
    return dtype == torch.bfloat16 and has_vectors()


def has_vectors() -> bool:
    """Whether the compiled kernels have vectors for this CPU."""
    return best_instruction_set() > INSTRUCTION_SETS.index("scalar")
