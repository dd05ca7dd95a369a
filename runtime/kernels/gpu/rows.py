"""Rows between two products: the first one's partial sums added up, and rows in the form that the next one takes."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.rounding import largest, nearest, rounded, to_fp8

ROWS, SUMS, LEVELS, FLOATS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Forms of an input, see `runtime.kernels.handover`."""


@triton.jit
def product_at(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, n, inside, M, N,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, like: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Elements `n` of token m (int64) of a product, `part [SPLITS, M, N]` added in order: rounded to `like`, given in
    float32. Zeros where not `inside`."""
    total = tl.load(part_ptr + m * N + n, mask=inside, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + (split * M + m) * N + n, mask=inside, other=0)
    total = total.to(tl.float32)
    if SCALED:
        row_scale = tl.load(row_scale_ptr + n, mask=inside, other=0.0).to(tl.float32)
        total = total * row_scale * tl.load(token_scale_ptr + m)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return rounded(total, like, INTERPRETED)


@triton.jit
def level_scale(peak, FORM: tl.constexpr):
    """Scale of a token whose largest magnitude is `peak`, as `compress.checkpoint.activations` has it: that becomes
    127, or 448 where levels are 8-bit floats."""
    return tl.div_rn(peak, 127.0 if FORM == LEVELS else 448.0)


@triton.jit
def store_levels(x, scale, m, k, K, out_ptr, FORM: tl.constexpr):
    """Stores inputs `k` of token m, given as 16-bit numbers in float32, as levels."""
    steps = tl.div_rn(x, tl.maximum(scale, 1.1754943508222875e-38))
    codes = nearest(steps) if FORM == LEVELS else to_fp8(steps)
    tl.store(out_ptr + m * K + k, codes.to(out_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def store_row(
    x, m, first, M, K, num_sums, out_ptr, beside_ptr,
    FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores 16-bit numbers `x [BLOCK]` of token m, given in float32 with zeros beyond K, from input `first` on.

    Levels need the whole row in one block.
    """
    k = first + tl.arange(0, BLOCK)
    if FORM == LEVELS or FORM == FLOATS:
        scale = level_scale(largest(x), FORM)
        store_levels(x, scale, m, k, K, out_ptr, FORM)
        tl.store(beside_ptr + m, scale)
    else:
        tl.store(out_ptr + m * K + k, x.to(out_ptr.dtype.element_ty), mask=k < K)
    if FORM == SUMS:
        sums = tl.sum(tl.reshape(x, (BLOCK // UNIT, UNIT)), 1)
        unit = first // UNIT + tl.arange(0, BLOCK // UNIT)
        tl.store(beside_ptr + unit * M + m, sums, mask=unit < num_sums)


@triton.jit(do_not_specialize=["M"])
def prepare_rows(
    x_ptr, out_ptr, beside_ptr, M, K, num_sums, FORM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """`x [M, K]` in a form. Programs (token, block of inputs)."""
    m, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_row(x, m, first, M, K, num_sums, out_ptr, beside_ptr, FORM, UNIT, BLOCK)


@triton.jit(do_not_specialize=["M"])
def finish_rows(
    part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, y_ptr, M, N, ROWS_OUT,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A product as rows `y [M, ROWS_OUT]` in their own dtype. Programs (token, block of outputs)."""
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    like = y_ptr.dtype.element_ty
    y = product_at(
        part_ptr, bias_ptr, token_scale_ptr, row_scale_ptr, m, n, n < ROWS_OUT, M, N,
        SPLITS, HAS_BIAS, SCALED, like, INTERPRETED,
    )  # fmt: skip
    tl.store(y_ptr + m * ROWS_OUT + n, y.to(like), mask=n < ROWS_OUT)
