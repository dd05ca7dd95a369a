"""Products with weights of 8-bit floats (e4m3), with activations in 16 bits or rounded to such floats too."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.attention import from_fp8
from runtime.kernels.gpu.planes import multiply


@triton.jit
def widened(codes, like: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Bytes of e4m3 as floats of type `like`, exactly (float32 in the interpreter). NATIVE: by an instruction that GPUs
    without 8-bit floats lack."""
    if NATIVE and not INTERPRETED:
        # By way of float32: there is an instruction from float16 to bfloat16, but a slow one.
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(like)
    else:
        return from_fp8(codes, INTERPRETED, like)


@triton.jit(do_not_specialize=["M"])
def narrow_fp8_product(
    x_ptr, codes_ptr, row_scale_ptr, part_ptr, M, K, ROWS, blocks_per_split,
    LEVELS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Partial sums `part [splits, M, ROWS]` float32 of `x [M, K]` and e4m3 codes `[ROWS, K]`: 16-bit x by weights with
    their scale, or with LEVELS e4m3 levels by codes, both without scales. 8-bit floats are exact in 16 bits, so only
    sums are rounded."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane, has_token, has_row = tl.arange(0, BLOCK_K), m < M, n < ROWS
    like = tl.float16 if LEVELS else x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + lane
        inside = k < K
        places = n.to(tl.int64)[:, None] * K + k[None, :]
        codes = tl.load(codes_ptr + places, mask=has_row[:, None] & inside[None, :], other=0)
        x = tl.load(
            x_ptr + m.to(tl.int64)[None, :] * K + k[:, None], mask=has_token[None, :] & inside[:, None], other=0
        )
        if LEVELS:
            x = widened(x, like, NATIVE, INTERPRETED)
        total = multiply(widened(codes, like, NATIVE, INTERPRETED), x, total, INTERPRETED)
    if not LEVELS:
        total *= tl.load(row_scale_ptr + n, mask=has_row, other=0.0).to(tl.float32)[:, None]
    places = (split * M + m).to(tl.int64)[None, :] * ROWS + n[:, None]
    tl.store(part_ptr + places, total, mask=has_row[:, None] & has_token[None, :])


@triton.jit(do_not_specialize=["M"])
def wide_fp8_product(
    levels_ptr, codes_ptr, token_scale_ptr, row_scale_ptr, bias_ptr, y_ptr, M, K, ROWS,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y [M, ROWS]` in its own dtype: the product of e4m3 `levels [M, K]` and e4m3 codes `[ROWS, K]` by a GPU's own
    8-bit products, times both scales, and the bias. Those products keep about 14 bits of a sum: after each BLOCK_K of
    inputs they are added up in float32."""
    program, blocks_n = tl.program_id(0), tl.cdiv(ROWS, BLOCK_N)
    first_m = program // (GROUP_M * blocks_n) * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    m = (first_m + program % (GROUP_M * blocks_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % (GROUP_M * blocks_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    lane, has_token, has_row = tl.arange(0, BLOCK_K), m < M, n < ROWS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        k = block * BLOCK_K + lane
        x_mask = has_token[:, None] & (k < K)[None, :]
        levels = tl.load(levels_ptr + m.to(tl.int64)[:, None] * K + k[None, :], mask=x_mask, other=0)
        w_mask = has_row[None, :] & (k < K)[:, None]
        codes = tl.load(codes_ptr + n.to(tl.int64)[None, :] * K + k[:, None], mask=w_mask, other=0)
        if INTERPRETED:
            total = tl.dot(from_fp8(levels, True, tl.float32), from_fp8(codes, True, tl.float32), total)
        else:
            levels = levels.to(tl.float8e4nv, bitcast=True)
            codes = codes.to(tl.float8e4nv, bitcast=True)
            total = tl.dot(levels, codes, total, max_num_imprecise_acc=BLOCK_K)
    token_scale = tl.load(token_scale_ptr + m, mask=has_token, other=0.0)
    row_scale = tl.load(row_scale_ptr + n, mask=has_row, other=0.0).to(tl.float32)
    y = total * row_scale[None, :] * token_scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=has_row, other=0.0).to(tl.float32)[None, :]
    places = m.to(tl.int64)[:, None] * ROWS + n[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=has_token[:, None] & has_row[None, :])
