"""Quantized keys and values: each head of each token by itself, so written values never change.

Along the last axis, of length head_dim, `x ~ code * scale + offset`:

    int8, int4   unsigned codes; offset = min, scale = (max - min) / (2 ** bits - 1)
    fp8          codes are the bits of e4m3 numbers; scale = max |x| / 448, no offset

Scale and offset are rounded to float16 first, and codes are chosen against the rounded ones. Arithmetic is float32, or
float64 for float64 input. Scales and offsets saturate at 65504, the largest float16, and fp8 heads below 1.3e-5 become
zero. A head that is not finite gets a NaN scale, so that it is not finite when read back and its row fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import CODE_BITS, EXACT
from compress.common.device import divide

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class QuantizedHeads:
    """Codes `[..., D]` as uint8 (int4 not packed: pages do that), float16 scale `[...]`, and offset alike or None."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None


def quantize_heads(heads: Tensor, format: str) -> QuantizedHeads:
    """Quantizes `[..., D]` over its last axis; `format` is `fp8`, `int8` or `int4`."""
    exact = _working(heads)
    return _quantize_fp8(exact) if format == "fp8" else _quantize_integer(exact, CODE_BITS[format])


def dequantize_heads(quantized: QuantizedHeads, dtype: torch.dtype) -> Tensor:
    """`[..., D]` in `dtype`, rounded once at the end."""
    working = torch.promote_types(dtype, torch.float32)
    scale = quantized.scale.to(working).unsqueeze(-1)
    if quantized.offset is None:
        return _decode_fp8(quantized.codes, working).mul_(scale).to(dtype)
    offset = quantized.offset.to(working).unsqueeze(-1)
    return quantized.codes.to(working).mul_(scale).add_(offset).to(dtype)


def read_back(heads: Tensor, format: str) -> Tensor:
    """`[..., D]` as a cache of this format gives them back; `16bit` changes nothing."""
    return heads if format == EXACT else dequantize_heads(quantize_heads(heads, format), heads.dtype)


def rotate_heads(heads: Tensor) -> Tensor:
    """`[..., D]` times an orthonormal Hadamard matrix along the last axis, in the input's dtype; its own inverse.

    Blocks of the largest power of two that divides D are rotated separately (Sylvester's construction), so scalar
    products of two rotated heads are those of the heads. Computed in float32, or float64 for float64 input.
    """
    size = heads.shape[-1] & -heads.shape[-1]
    rotated = hadamard_transform(_working(heads).reshape(-1, size))
    return divide(rotated, math.sqrt(size)).view(heads.shape).to(heads.dtype)


def hadamard_transform(rows: Tensor) -> Tensor:
    """`rows [..., 2^k]` times the Hadamard matrix of 1 and -1 by Sylvester's construction: the fast transform."""
    width = 1
    while width < rows.shape[-1]:
        first, second = rows.unflatten(-1, (-1, 2, width)).unbind(-2)
        rows = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    return rows


def _quantize_integer(heads: Tensor, bits: int) -> QuantizedHeads:
    low, high = heads.aminmax(dim=-1)
    max_code = (1 << bits) - 1
    # Divided before they are subtracted: the difference of two finite numbers may be infinite.
    scale, offset = _float16(divide(high, max_code) - divide(low, max_code)), _float16(low)
    steps = (heads - offset.to(heads.dtype).unsqueeze(-1)) / _divisor(scale, heads.dtype)
    return QuantizedHeads(steps.round_().clamp_(0, max_code).nan_to_num_(0.0).to(torch.uint8), scale, offset)


def _quantize_fp8(heads: Tensor) -> QuantizedHeads:
    scale = _float16(divide(heads.abs().amax(-1), FP8_MAX))
    steps = (heads / _divisor(scale, heads.dtype)).clamp_(-FP8_MAX, FP8_MAX)
    return QuantizedHeads(steps.nan_to_num_(0.0).float().to(FP8).view(torch.uint8), scale, None)


def _decode_fp8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    # Looked up: on CPUs that is five times as fast as converting.
    values = torch.arange(256, dtype=torch.uint8, device=codes.device).view(FP8).to(dtype)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def _float16(exact: Tensor) -> Tensor:
    """Rounded and saturated; what is not finite becomes NaN, which saturation would hide."""
    rounded = exact.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
    return rounded.masked_fill_(~exact.isfinite(), math.nan)


def _divisor(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divisor for codes `[..., 1]`; infinite where the scale is zero, so that codes are 0."""
    return scale.to(dtype).masked_fill(scale == 0, math.inf).unsqueeze(-1)


def _working(heads: Tensor) -> Tensor:
    return heads if heads.dtype == torch.float64 else heads.float()
