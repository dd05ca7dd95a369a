"""Products with weights of 8-bit floats (e4m3), with activations in 16 bits or rounded to such floats too."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.gpu.planes import multiply
from runtime.kernels.gpu.rounding import from_fp8
from runtime.kernels.gpu.tiles import grouped_tile, load_tile, split_tile, store_sums, store_tile


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
    n, split, m = split_tile(BLOCK_N, BLOCK_M)
    like = tl.float16 if LEVELS else x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    for block in tl.range(first, tl.minimum(first + blocks_per_split, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        codes = load_tile(codes_ptr, n[:, None], k[None, :], ROWS, K)
        x = load_tile(x_ptr, m[None, :], k[:, None], M, K)
        if LEVELS:
            x = widened(x, like, NATIVE, INTERPRETED)
        total = multiply(widened(codes, like, NATIVE, INTERPRETED), x, total, INTERPRETED)
    if not LEVELS:
        total *= tl.load(row_scale_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[:, None]
    store_sums(part_ptr, total, split, m[None, :], n[:, None], M, ROWS)


@triton.jit(do_not_specialize=["M"])
def wide_fp8_product(
    levels_ptr, codes_ptr, token_scale_ptr, row_scale_ptr, bias_ptr, y_ptr, M, K, ROWS,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y [M, ROWS]` in its own dtype: the product of e4m3 `levels [M, K]` and e4m3 codes `[ROWS, K]` by a GPU's own
    8-bit products, times both scales, and the bias. Those products keep about 14 bits of a sum: after each BLOCK_K of
    inputs they are added up in float32."""
    n, m = grouped_tile(M, ROWS, BLOCK_N, BLOCK_M, GROUP_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        levels = load_tile(levels_ptr, m[:, None], k[None, :], M, K)
        codes = load_tile(codes_ptr, n[None, :], k[:, None], ROWS, K)
        if INTERPRETED:
            total = tl.dot(from_fp8(levels, True, tl.float32), from_fp8(codes, True, tl.float32), total)
        else:
            levels = levels.to(tl.float8e4nv, bitcast=True)
            codes = codes.to(tl.float8e4nv, bitcast=True)
            total = tl.dot(levels, codes, total, max_num_imprecise_acc=BLOCK_K)
    token_scale = tl.load(token_scale_ptr + m, mask=m < M, other=0.0)
    row_scale = tl.load(row_scale_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)
    y = total * row_scale[None, :] * token_scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < ROWS, other=0.0).to(tl.float32)[None, :]
    store_tile(y_ptr, y, m[:, None], n[None, :], M, ROWS)
