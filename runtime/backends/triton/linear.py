"""Packed linears on NVIDIA GPUs through Triton, which is imported when the first weight is prepared."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.coded import EXPONENT_BIAS, EXPONENTS, FLOAT8, INTEGERS, TABLE, Coded, CodedWeight
from compress.checkpoint.weights.exl3 import CODEBOOKS, TURN, Exl3Weight, padded
from compress.checkpoint.weights.forms import E2M1_VALUES
from runtime.backends.backend import LinearKernel
from runtime.backends.base import Linear, Target
from runtime.backends.measured import table_path
from runtime.backends.prepared_weight import Layout, PreparedWeight
from runtime.backends.torch.quantized_linear import IntegerInputs
from runtime.backends.triton.device import gpu_name, multiplies_fp8, num_processors, unsupported_reason
from runtime.backends.triton.kernels.configs import LEAST_SCALED, Plan, default_plan, measured_plan
from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, interleave, interleaved_bytes, restored
from runtime.backends.triton.product_times import NEVER, measured_panel_from
from runtime.backends.triton.sizes import cdiv

TABLES = Path(__file__).parent / "tables"
"""Measured kernel tables, one file per GPU, named after it."""
MEASURED_BITS = 4
"""Tables are of such codes, in groups of LEAST_SCALED or more: a tile of 2-bit codes takes twice the shared memory."""
TESTED_TOKENS = (1, 16, 64, 256, 1025)
"""Numbers of tokens between which kernels change: skinny products, torch's, larger tiles, panels, those of integers."""
UNIT = 32
"""Group sizes are a multiple of this, or the whole row; and the least order of Hadamard matrices."""


def prepare_codes(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    """2- to 8-bit codes in planes; which kernel runs is looked up by the number of tokens."""
    return _planes_linear(interleave(weight, target.device), bias)


def prepare_rounded(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    """As `prepare_codes`, for inputs that are rounded before."""
    if weight.scheme.activations is None:
        raise TypeError(f"inputs of {weight.scheme} are not rounded")
    return IntegerInputs(prepare_codes(weight, None, target), bias, weight.scheme.activations)


def restore_codes(weight: PreparedWeight, bias: Tensor | None) -> Linear:
    """As `prepare_codes`, of planes that a file keeps."""
    return _planes_linear(restored(weight), bias)


def _planes_linear(planes: InterleavedWeight, bias: Tensor | None) -> Linear:
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear

    tiles, rows, _ = planes.words.shape
    scaled = planes.unit if planes.group_size else 0
    return W4A16Linear(planes, bias, _plan(planes.words.device, planes.bits, rows, tiles, planes.shape, scaled))


def prepare_block_integers(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    """Codes in planes, with scales and minima of groups in float32."""
    from runtime.backends.triton.kernels.block_integers import linear_of

    # Panels were not measured for them: as for the other 4-bit codes with float32 scales of groups.
    return linear_of(weight, bias, target.device, num_processors(target.device), measured_panel_from("nf4"))


def prepare_w8a8(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    """Codes of 5 to 8 bits as signed bytes; those of fewer bits keep their distance to the zero point."""
    from runtime.backends.triton.kernels.int8_gemm import W8A8Linear

    device = target.device
    codes = (weight.qweight.to(torch.int16) - weight.scheme.zero).to(torch.int8).to(device)
    return W8A8Linear(codes, weight.scales.T.contiguous().to(device), bias, num_processors(device))


def prepare_fp8(
    weight: CodedWeight, bias: Tensor | None, target: Target, scaled_from: int = NEVER, row_multiple: int = 1
) -> Linear:
    """8-bit floats as they are stored, with scales of rows and perhaps of groups of inputs, and rows of zeros up to a
    multiple; `scaled_from` as of `Fp8Linear`."""
    from runtime.backends.triton.kernels.fp8 import Fp8Linear

    device, scheme, inputs = target.device, weight.scheme, weight.shape[1]
    group = scheme.columns(inputs) if _is_grouped(scheme) else 0
    scales, row_scales = _factors(weight) if group else (None, weight.scales[:, 0])
    rounds_inputs, native = scheme.activation_bits is not None, multiplies_fp8(device)
    panel_from = NEVER if rounds_inputs else measured_panel_from("fp8 blocks" if group else "fp8")
    codes = weight.qweight.view(torch.uint8).to(device)
    codes = functional.pad(codes, (0, 0, 0, -len(codes) % row_multiple))
    tensors = codes, row_scales.contiguous().to(device), None if scales is None else scales.to(device)
    processors = num_processors(device), target.dtype
    return Fp8Linear(*tensors, bias, rounds_inputs, native, *processors, group, panel_from, scaled_from)


def _is_grouped(scheme: Coded) -> bool:
    """Whether scales are of groups or blocks of inputs, not of rows."""
    return scheme.columns(0) > 0


def _factors(weight: CodedWeight) -> tuple[Tensor, Tensor]:
    """Scales `[O, G]` that multiply numbers of codes, times one of each row `[O]` in float32.

    Powers of two are divided by the largest of their row, so they are at most 1: in float16 those below 2^-24 vanish.
    8-bit floats are as stored, with the reciprocal of their divisor. Others are as stored, with ones.
    """
    if weight.scheme.scales.dtype == EXPONENTS:
        exponents = weight.scales.int()
        largest = exponents.amax(1, keepdim=True)
        ones = torch.ones_like(exponents, dtype=torch.float32)
        return torch.ldexp(ones, exponents - largest), torch.ldexp(ones, largest - EXPONENT_BIAS)[:, 0]
    if weight.divisors is not None:
        return weight.scales.float(), weight.divisors[:, 0].reciprocal()
    return weight.scales, torch.ones(len(weight.scales), device=weight.scales.device)


def prepare_table(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    """Codes that are places in a table of 16 numbers, two in a byte, with scales of groups."""
    from runtime.backends.triton.kernels.fp4 import HALF, Fp4Linear, packed_halves, padded_scales

    device, inputs, scheme = target.device, weight.shape[1], weight.scheme
    scales, row_scales = _factors(weight)
    # Scales of whole halves of a block multiply float32 sums: they keep their precision.
    is_exact = scheme.code_values == E2M1_VALUES
    half = HALF if is_exact else scheme.columns(inputs)
    summed = torch.float32 if scheme.scales.dtype == "float16" else scales.dtype
    dtype = target.dtype if is_exact else summed
    codes, scales = packed_halves(weight.qweight, half), padded_scales(scales, inputs, dtype)
    on_device = codes.to(device), scales.to(device), row_scales.contiguous().to(device)
    processors, panel_from = num_processors(device), measured_panel_from("nvfp4" if is_exact else "nf4")
    return Fp4Linear(*on_device, bias, inputs, processors, scheme.code_values, target.dtype, half, panel_from)


def turned(linear: Linear, inputs: int, order: int, target: Target) -> Linear | None:
    """A linear that multiplies its inputs by Hadamard matrices; see `Backend.turned`."""
    if order < UNIT or unsupported_reason(target.device, target.dtype):
        return None
    from runtime.backends.triton.kernels.turned import TritonTurnedInputs

    return TritonTurnedInputs.of(linear, order, inputs, target.device)


def prepare_exl3(weight: Exl3Weight, bias: Tensor | None, target: Target) -> Linear:
    """Trellis codes as they are stored, with scales in float32."""
    from runtime.backends.triton.kernels.trellis import TrellisLinear

    device, scheme = target.device, weight.scheme
    words = weight.trellis.contiguous().view(torch.int32).to(device)
    scales = weight.suh.float().to(device) / TURN, weight.svh.float().to(device)
    codebook = CODEBOOKS.index(scheme.codebook)
    return TrellisLinear(words, *scales, bias, scheme.pair_bits, codebook)


def _exl3_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return int(padded(rows) * padded(columns) * scheme.bits) // 8 + (rows + columns) * FLOAT_BYTES


def _table_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    """Counts scales that are stored in float32 or float16 as float32."""
    filled = cdiv(columns, FP4_BLOCK) * FP4_BLOCK
    is_wide = isinstance(scheme, Coded) and scheme.scales.dtype in ("float32", "float16")
    scales = filled // (scheme.group_size or filled) * (FLOAT_BYTES if is_wide else SCALE_BYTES)
    return rows * (filled // 2 + scales + ROW_SCALE_BYTES)


def _plan(device: torch.device, bits: int, rows: int, tiles: int, shape: tuple[int, int], scaled: int = 0) -> Plan:
    gpu = gpu_name(device)
    if gpu and bits == MEASURED_BITS and not 0 < scaled < LEAST_SCALED:
        path = table_path(TABLES, gpu)
        measured = measured_plan(path, gpu, *shape) if path.is_file() else None
        if measured is not None:
            return measured
    return default_plan(bits, rows, tiles, num_processors(device), scaled)


def _linear_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """Why no Triton linear serves a scheme on a target; empty where one may."""
    if reason := unsupported_reason(target.device, target.dtype):
        return reason
    if scheme.group_size is not None and scheme.group_size % UNIT:
        return f"takes groups that are a multiple of {UNIT}"
    return ""


def _table_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """e2m1 times scales is exact in 16 bits. Scales of other numbers multiply the float32 sums of halves of blocks."""
    if len(scheme.code_values) > TABLE_NUMBERS:
        return f"takes tables of {TABLE_NUMBERS} numbers"
    if scheme.code_values != E2M1_VALUES and scheme.group_size not in HALVES:
        return f"takes groups of {' or '.join(map(str, HALVES))}"
    return unsupported_reason(target.device, target.dtype)


def _w4a16_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.bits > 4 or scheme.activation_bits is not None:
        return "takes 2 to 4 bits and 16-bit activations"
    return _linear_reason(scheme, in_features, target)


def _w8a16_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if not 4 < scheme.bits <= 8 or scheme.activation_bits is not None:
        return "takes 5 to 8 bits and 16-bit activations"
    return _linear_reason(scheme, in_features, target)


def _rounded_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return _linear_reason(scheme, in_features, target) if scheme.activation_bits else "needs rounded activations"


def _w8a8_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits != 8:
        return "needs 8-bit activations"
    if scheme.group_size is not None or not scheme.symmetric:
        return "takes symmetric weights with one scale per channel"
    return _linear_reason(scheme, in_features, target)


SCALE_BYTES = 2
"""Bytes of a scale of 8-bit codes; checkpoints may hold wider ones."""


FLOAT_BYTES = 4
FP4_BLOCK, ROW_SCALE_BYTES = 128, 4
"""Inputs that 4-bit floats are padded to a multiple of, and bytes of the scale of a row."""
TABLE_NUMBERS, HALVES = 16, (FP4_BLOCK // 4, FP4_BLOCK // 2)
"""Numbers of a table, and sizes of groups whose scales multiply sums."""
FP8_BLOCK = 128
"""Inputs of one pass over 8-bit floats."""
SCALED_FROM, SCALED_MULTIPLE = 16, 16
"""Tokens from which torch's product of 8-bit floats takes over, and what rows and inputs of that are multiples of. On
an H200 the product of this project was slower than a dense one at 64 tokens; torch's was not measured."""


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else 1)))


def _block_integers_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return interleaved_bytes(scheme, rows, columns, target, 2 * FLOAT_BYTES)


def _fp8_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    reason = _linear_reason(scheme, in_features, target)
    if reason or scheme.activation_bits is None:
        return reason or "needs 8-bit activations"
    return "" if multiplies_fp8(target.device) else "needs a GPU that multiplies 8-bit floats (Ada, Hopper or newer)"


def _scaled_fp8_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    uneven = f"takes inputs that are a multiple of {SCALED_MULTIPLE}" if in_features % SCALED_MULTIPLE else ""
    return _fp8_reason(scheme, in_features, target) or uneven


def _scaled_fp8_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return _nbytes(scheme, rows, columns, target) + -rows % SCALED_MULTIPLE * columns


def _target_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return unsupported_reason(target.device, target.dtype)


def _w8a16_float_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """Scales of groups that are shorter than a block multiply numbers in 16 bits, which powers of two do exactly."""
    is_exact = isinstance(scheme, Coded) and (scheme.scales.dtype == EXPONENTS or not _is_grouped(scheme))
    if not is_exact and isinstance(scheme, Coded) and scheme.columns(in_features) % FP8_BLOCK:
        return f"takes blocks of a multiple of {FP8_BLOCK} columns"
    return unsupported_reason(target.device, target.dtype)


def _w8a16_float_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    if not isinstance(scheme, Coded) or not _is_grouped(scheme):
        return _nbytes(scheme, rows, columns, target)
    return rows * (columns + scheme.num_groups(columns) * FLOAT_BYTES + ROW_SCALE_BYTES)


PLANES = Layout("codes in planes", restore_codes)
_kernel = partial(LinearKernel, tested_tokens=TESTED_TOKENS)
W4A16_KERNEL = _kernel(
    "triton_w4a16",
    "packed 2- to 4-bit codes, float32 sums",
    "int",
    _w4a16_reason,
    prepare_codes,
    interleaved_bytes,
    layout=PLANES,
)
W8A16_KERNEL = _kernel(
    "triton_w8a16",
    "packed 5- to 8-bit codes, float32 sums",
    "int",
    _w8a16_reason,
    prepare_codes,
    interleaved_bytes,
    layout=PLANES,
)
BLOCK_INTEGERS_KERNEL = _kernel(
    "triton_k",
    "packed codes with scales and minima of groups in float32, multiplied in 16 bits, float32 sums",
    INTEGERS,
    _linear_reason,
    prepare_block_integers,
    _block_integers_nbytes,
)
W8A8_KERNEL = _kernel(
    "triton_w8a8", "8-bit codes times 8-bit activations, exact int32 sums", "int", _w8a8_reason, prepare_w8a8, _nbytes
)
ROUNDED_KERNEL = _kernel(
    "triton_rounded",
    "packed codes times inputs rounded as stored, multiplied in 16 bits, float32 sums",
    "int",
    _rounded_reason,
    prepare_rounded,
    interleaved_bytes,
)
FP8_KERNEL = _kernel(
    "triton_fp8", "8-bit floats times 8-bit floats, float32 sums", FLOAT8, _fp8_reason, prepare_fp8, _nbytes
)
SCALED_FP8_KERNEL = _kernel(
    "torch_scaled_fp8",
    f"8-bit floats times 8-bit floats, by torch from {SCALED_FROM} tokens on, float32 sums",
    FLOAT8,
    _scaled_fp8_reason,
    partial(prepare_fp8, scaled_from=SCALED_FROM, row_multiple=SCALED_MULTIPLE),
    _scaled_fp8_nbytes,
)
FP8_W8A16_KERNEL = _kernel(
    "triton_fp8_w8a16",
    "8-bit floats multiplied in 16 bits, float32 sums",
    FLOAT8,
    _w8a16_float_reason,
    prepare_fp8,
    _w8a16_float_nbytes,
)
TABLE_KERNEL = _kernel(
    "triton_table",
    "numbers of a table multiplied in 16 bits, float32 sums",
    TABLE,
    _table_reason,
    prepare_table,
    _table_nbytes,
)
EXL3_KERNEL = _kernel(
    "triton_exl3",
    "trellis codes decoded into dense panels, float32 sums",
    "exl3",
    _target_reason,
    prepare_exl3,
    _exl3_nbytes,
    saves_memory=True,
)
KERNELS = (
    *(W8A8_KERNEL, ROUNDED_KERNEL, W4A16_KERNEL, W8A16_KERNEL, BLOCK_INTEGERS_KERNEL),
    *(SCALED_FP8_KERNEL, FP8_KERNEL, FP8_W8A16_KERNEL, TABLE_KERNEL, EXL3_KERNEL),
)
