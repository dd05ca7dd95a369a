"""Rounding inside of kernels, bit for bit as torch rounds: to 16 bits, to whole numbers, to e4m3 and back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, like: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 `x` as the nearest numbers of type `like`, still in float32. The interpreter would cut bfloat16 off."""
    if INTERPRETED and like == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(like).to(tl.float32)


@triton.jit
def nearest(x):
    """Whole numbers int32 next to float32 `x` of at most 2 ** 21; halves go to the even one. One addition rounds, as
    1.5 * 2 ** 23 leaves no room for a fraction."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def to_fp8(x):
    """Bits (int32) of the e4m3 numbers next to float32 `x` of at most 448. Works on GPUs without 8-bit floats."""
    bits = x.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 numbers are 2 ** -9 apart, which is what one addition to 2 ** 14 leaves.
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return sign | tl.where(size < 0x3C800000, tiny, normal)


@triton.jit
def from_fp8(codes, INTERPRETED: tl.constexpr, like):
    """Bytes of e4m3 as numbers, exactly: their bits moved into a float32, whose exponent is then put right. Works on
    GPUs without 8-bit floats."""
    bits = (codes.to(tl.int32) & 0x80) << 24 | (codes.to(tl.int32) & 0x7F) << 20
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return numbers if INTERPRETED else numbers.to(like)


@triton.jit
def to_float16(x):
    """float32 `x` rounded to float16 and saturated, still in float32; what is not finite becomes NaN."""
    inside = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), inside, float("nan"))


@triton.jit
def largest(x):
    """The largest magnitude in `x [n]`; infinite when something is not a number."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)
