"""Kernels that serve linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points.

Twelve kernels over one layout. `cpu` multiplies by activations as they come, `cpu_sparse` does so and reads only
what 2:4 sparsity keeps, `cpu_int8` multiplies by the 8-bit activations that the checkpoint asks for. `cpu_w4a8`
rounds activations to 8 bits although the checkpoint does not ask for it: faster for many rows, and a little further
from the model, so it serves only the mode `8bit`. `cpu_fp4`, `cpu_nf4` and `cpu_bnb_fp4` look 4-bit floats up in a
table, whatever their scales, `cpu_iq4_nl` does so with the levels of a type of GGUF, `cpu_k` multiplies integers with
scales and minima of blocks. `cpu_fp8`, `cpu_fp8_block` and `cpu_mxfp8` widen 8-bit floats (e4m3) with scales of rows,
blocks and groups.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

from compress.checkpoint.activations import EIGHT_BITS
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.block_fp8 import BlockFp8, BlockFp8Weight
from compress.checkpoint.weights.bnb4 import FP4_VALUES, Bnb4
from compress.checkpoint.weights.codebooks import NF4, NF4_VALUES, TableFloatWeight
from compress.checkpoint.weights.fp8 import Fp8, Fp8Weight
from compress.checkpoint.weights.gguf_blocks import INTEGERS, BlockScheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.checkpoint.weights.k_quants import KQuantWeight
from compress.checkpoint.weights.legacy_blocks import MinimaWeight
from compress.checkpoint.weights.mxfp4 import FP4, VALUES, Mxfp4Weight
from compress.checkpoint.weights.mxfp8 import Mxfp8, Mxfp8Weight
from compress.checkpoint.weights.nonlinear import LEVEL_VALUES, LEVELS, NonlinearWeight
from compress.checkpoint.weights.nvfp4 import Nvfp4Weight
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set
from runtime.backends.base import DenseKernel, Linear, LinearKernel, Target
from runtime.backends.cpu.block_scales import BlockScaledCodes
from runtime.backends.cpu.choice import dense_refusal, describe
from runtime.backends.cpu.kept_codes import kept_unsupported_reason
from runtime.backends.cpu.linear import Activations, CpuLinear, form_of
from runtime.backends.cpu.weight_layout import (
    INPUT_MULTIPLE,
    SMALL_GROUP,
    SPARSE_BITS,
    TILE,
    padded_features,
    stored_bits,
)
from runtime.backends.prepared_weight import Layout
from runtime.backends.torch.quantized_linear import RoundedInputs

CodebookWeight = Mxfp4Weight | Nvfp4Weight | TableFloatWeight
Float8Weight = Fp8Weight | BlockFp8Weight | Mxfp8Weight


def with_codes(weight: CodebookWeight) -> IntegerWeight:
    """Codes as they are, with scales in bfloat16 where it holds them exactly, else in float32."""
    steps = weight.steps
    short = steps.bfloat16()
    scales = short if torch.equal(short.float(), steps) else steps
    scheme = Int(weight.scheme.bits, weight.scheme.group_size)
    zeros = torch.full(steps.shape, scheme.midpoint, dtype=torch.uint8)
    return IntegerWeight(weight.qweight, scales, zeros, scheme)


def with_blocks(weight: KQuantWeight | MinimaWeight) -> BlockScaledCodes:
    """Codes, scales and minima as they are stored."""
    if isinstance(weight, MinimaWeight):
        return BlockScaledCodes(weight.qweight, weight.scheme.bits, weight.group_scales, -weight.group_minima)
    steps, minimum_steps, scales, minima = (
        weight.scale_codes,
        weight.min_codes,
        weight.super_scales,
        weight.super_minima,
    )
    if not weight.scheme.has_minima:
        return BlockScaledCodes(weight.qweight, weight.scheme.bits, scales, steps=steps)
    return BlockScaledCodes(weight.qweight, weight.scheme.bits, scales, minima, steps, minimum_steps)


def with_float8_scales(weight: Float8Weight) -> BlockScaledCodes:
    """Bytes of 8-bit floats as they are. Scales are those of the longest groups that blocks, of which the last one of a
    row may be shorter, consist of."""
    scales = weight.exponents if isinstance(weight, Mxfp8Weight) else weight.scales
    if isinstance(weight, BlockFp8Weight):
        columns, block = weight.shape[1], weight.scheme.block[1]
        group = float8_group(weight.scheme, columns)
        scales = scales.repeat_interleave(block // group, 1)[:, : columns // group]
    return BlockScaledCodes(weight.qweight.view(torch.uint8), 8, scales)


def float8_group(scheme: Scheme, columns: int) -> int:
    """Columns that share a scale in C."""
    return gcd(columns, scheme.block[1] if isinstance(scheme, BlockFp8) else scheme.group_size or columns)


def with_levels(weight: NonlinearWeight) -> BlockScaledCodes:
    """Codes and scales as they are stored."""
    return BlockScaledCodes(weight.qweight, weight.scheme.bits, weight.scales)


SCALE_BYTES, ZERO_BYTES, STEP_BYTES = 2, 1, 1
FLOAT32_BYTES, EXPONENT_BYTES = 4, 1


def _unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return "computes in bfloat16 and float32"
    group = scheme.group_size or in_features
    if in_features % INPUT_MULTIPLE or (group % INPUT_MULTIPLE and group != SMALL_GROUP):
        return f"takes groups that are a multiple of {INPUT_MULTIPLE}, or {SMALL_GROUP}"
    return ""


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits:
        return "keeps activations in 16 bits"
    return _unsupported_reason(scheme, in_features, target)


def _small_reason(scheme: Scheme) -> str:
    return f"takes groups that are a multiple of {INPUT_MULTIPLE}" if scheme.group_size == SMALL_GROUP else ""


def int8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if not scheme.activation_bits:
        return "needs 8-bit activations"
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


def _codebook_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    """Scales of bitsandbytes are float32 numbers, unless bfloat16 happens to hold all of them."""
    wider = FLOAT32_BYTES - SCALE_BYTES if isinstance(scheme, Bnb4) else 0
    return _nbytes(scheme, rows, columns, target) + padded_features(rows) * scheme.num_groups(columns) * wider


def _sparse_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return padded_features(rows) * (columns * SPARSE_BITS // 8 + scheme.num_groups(columns) * SCALE_BYTES)


def _blocks_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    if not isinstance(scheme, BlockScheme):
        raise TypeError(f"{scheme} has no blocks")
    steps = scheme.num_groups(columns) * STEP_BYTES if scheme.block_size > scheme.group_size else 0
    scales = steps + scheme.num_blocks(columns) * SCALE_BYTES
    codes = columns * stored_bits(scheme.bits) // 8
    return padded_features(rows) * (codes + scales * (2 if scheme.has_minima else 1))


def float8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if float8_group(scheme, in_features) % INPUT_MULTIPLE:
        return f"takes blocks of columns and inputs that are a multiple of {INPUT_MULTIPLE}"
    return _unsupported_reason(scheme, in_features, target)


def prepare_float8(weight: Float8Weight, bias: Tensor | None, target: Target) -> Linear:
    linear = CpuLinear(with_float8_scales(weight), bias, is_e4m3=True)
    return RoundedInputs(linear) if weight.scheme.activation_bits else linear


def _float8_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    """Blocks of whole tiles have a scale for each tile."""
    padded, groups = padded_features(rows), columns // float8_group(scheme, columns)
    size = SCALE_BYTES if isinstance(scheme, Fp8) else EXPONENT_BYTES
    if isinstance(scheme, BlockFp8):
        scaled = padded // TILE if scheme.block[0] % TILE == 0 else padded
        return padded * columns + scaled * groups * FLOAT32_BYTES
    return padded * (columns + groups * size)


def _reads_rows(columns: int, target: Target) -> bool:
    return True


PACKED: LinearKernel[IntegerWeight] = LinearKernel(
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
SPARSE: LinearKernel[IntegerWeight] = LinearKernel(
    "cpu_sparse",
    "kept codes alone in C, float32 sums: exact weights",
    "int",
    sparse_unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, sparse=True),
    _sparse_nbytes,
    _reads_rows,
    layout=Layout("kept codes", CpuLinear),
)


def codebook_kernel(name: str, numbers: str, values: tuple[float, ...]) -> LinearKernel[CodebookWeight]:
    """Returns the kernel of codes of 4 bits that stand for `values`, up to scales of groups."""
    codebook = torch.tensor(values)
    return LinearKernel(
        name,
        f"{numbers}s looked up in C as stored, 16-bit activations, float32 sums: exact weights",
        numbers,
        unsupported_reason,
        lambda weight, bias, target: CpuLinear(with_codes(weight), bias, codebook=codebook),
        _codebook_nbytes,
        _reads_rows,
        detail=_detail(Activations.FLOAT),
        layout=Layout(f"{numbers}s", lambda weight, bias: CpuLinear(weight, bias, codebook=codebook)),
    )


FLOATS4 = codebook_kernel("cpu_fp4", FP4, VALUES)
NORMAL_FLOATS = codebook_kernel("cpu_nf4", NF4, NF4_VALUES)
BNB_FP4 = codebook_kernel("cpu_bnb_fp4", Bnb4("fp4").numbers, FP4_VALUES)
BLOCKS: LinearKernel[KQuantWeight | MinimaWeight] = LinearKernel(
    "cpu_k",
    "packed codes with scales of blocks in C, float32 sums: exact weights",
    INTEGERS,
    unsupported_reason,
    lambda weight, bias, target: CpuLinear(with_blocks(weight), bias),
    _blocks_nbytes,
    _reads_rows,
    detail=_detail(Activations.FLOAT),
    layout=Layout("codes with scales of blocks", CpuLinear),
)


def float8_kernel(name: str, form: Scheme, scaled: str) -> LinearKernel[Float8Weight]:
    """Returns the kernel of 8-bit floats of a form, whatever its sizes, with scales of `scaled`."""
    return LinearKernel(
        name,
        f"8-bit floats with scales of {scaled} widened in C, float32 sums: exact weights",
        form.numbers,
        float8_unsupported_reason,
        prepare_float8,
        _float8_nbytes,
        _reads_rows,
        detail=_detail(Activations.FLOAT),
        layout=Layout("8-bit floats", lambda weight, bias: CpuLinear(weight, bias, is_e4m3=True)),
    )


FLOATS8 = (
    float8_kernel("cpu_fp8", Fp8(), "rows"),
    float8_kernel("cpu_fp8_block", BlockFp8(), "blocks"),
    float8_kernel("cpu_mxfp8", Mxfp8(), "groups"),
)
NONLINEAR: LinearKernel[NonlinearWeight] = LinearKernel(
    "cpu_iq4_nl",
    f"{LEVELS}s looked up in C as stored, 16-bit activations, float32 sums: exact weights",
    LEVELS,
    unsupported_reason,
    lambda weight, bias, target: CpuLinear(with_levels(weight), bias, codebook=torch.tensor(LEVEL_VALUES)),
    _blocks_nbytes,
    _reads_rows,
    detail=_detail(Activations.FLOAT),
    layout=Layout(f"{LEVELS}s", lambda weight, bias: CpuLinear(weight, bias, codebook=torch.tensor(LEVEL_VALUES))),
)
INT8: LinearKernel[IntegerWeight] = LinearKernel(
    "cpu_int8",
    "packed codes in C, 8-bit activations, exact int32 sums",
    "int",
    int8_unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, activations=Activations.INT8_ROW),
    _nbytes,
    _reads_rows,
    detail=_detail(Activations.INT8_ROW),
    layout=Layout("codes", lambda weight, bias: CpuLinear(weight, bias, activations=Activations.INT8_ROW)),
)
W4A8: LinearKernel[IntegerWeight] = LinearKernel(
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
